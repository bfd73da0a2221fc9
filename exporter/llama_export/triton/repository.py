"""The folder of a model repository: configurations, and the bundle's files where Triton looks.

```
model_repository/
  forward/config.pbtxt
  forward/1/model.onnx                the program as it is in the bundle
  forward/1/weights.safetensors       its external data, which must lie beside it
  rows/config.pbtxt
  rows/1/model.py                     the Python backend's entry point
  rows/1/bundle/...                   the bundle
```

Files are hard links to those of the bundle where the file system allows it, so that the weights
are there once; else they are copied once and linked from then on.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from llama_artifacts.bundle import Bundle, check_digest, open_bundle, staging
from llama_artifacts.manifest import FILE_NAME
from llama_export.triton.config import config_text
from llama_export.triton.plan import Options, TritonModel, plan

CONFIG_NAME, VERSION = "config.pbtxt", "1"
MODEL_PY = '''"""Entries of the bundle beside this file, on llama_runtime."""

from pathlib import Path

from llama_runtime.triton import TritonModel


class TritonPythonModel(TritonModel):
    """What Triton's Python backend looks for."""

    bundle = Path(__file__).parent / "bundle"
'''


@dataclass(frozen=True)
class Repository:
    """What was written.

    Attributes:
        models: in the order in which they were planned.
        linked_bytes: bytes of the bundle's files that were linked.
        copied_bytes: bytes that were copied, once each.
    """

    models: tuple[TritonModel, ...]
    linked_bytes: int
    copied_bytes: int


def write_repository(folder: Path, output: Path, options: Options) -> Repository:
    """Writes the model repository of a bundle, whole or not at all.

    Raises:
        ManifestError, IntegrityError: the folder holds no sound bundle.
        CompatibilityError, ChoiceError: as `plan`.
        BuildError: the output exists or cannot be written.
    """
    bundle = open_bundle(folder)
    models = plan(bundle.manifest, options)
    for model in models:
        if model.backend == "onnxruntime":
            check_digest(bundle, model.programs[0].file)  # Triton does not
    placer = _Placer(bundle)
    with staging(output) as stage:
        for model in models:
            _write_model(placer, stage / model.name, model, options)
    return Repository(models, placer.linked_bytes, placer.copied_bytes)


def _write_model(placer: _Placer, folder: Path, model: TritonModel, options: Options) -> None:
    version = folder / VERSION
    version.mkdir(parents=True)
    _write(folder / CONFIG_NAME, config_text(model, options))
    if model.backend == "onnxruntime":
        placer.place(model.programs[0].file, version / "model.onnx")
        for name in placer.bundle.manifest.weights_headers:
            placer.place(name, version / name)
    else:
        _write(version / "model.py", MODEL_PY)
        (version / "bundle").mkdir()
        for name in (FILE_NAME, *placer.bundle.manifest.files):
            placer.place(name, version / "bundle" / name)
    for path in (*version.rglob("*"), version):
        if path.is_dir():
            _sync(path)


@dataclass
class _Placer:
    """Puts files of the bundle into the repository."""

    bundle: Bundle
    linked_bytes: int = 0
    copied_bytes: int = 0
    _copies: dict[str, Path] = field(default_factory=dict)

    def place(self, name: str, target: Path) -> None:
        source = self._copies.get(name) or self.bundle.path(name).resolve()
        try:
            os.link(source, target)
            self.linked_bytes += target.stat().st_size
        except OSError:  # another file system, or one without links: only a copy tells
            shutil.copyfile(source, target)
            _sync(target)
            self._copies[name] = target
            self.copied_bytes += target.stat().st_size


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
