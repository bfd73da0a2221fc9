"""The bill of materials of a bundle: CycloneDX 1.6, for models (ML-BOM), through its library."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from llama_artifacts.bundle import Bundle
from llama_artifacts.codec import encode
from llama_artifacts.digests import sha256
from llama_artifacts.errors import BuildError
from llama_artifacts.extras import needs
from llama_artifacts.manifest import FILE_NAME, Manifest, Source
from llama_artifacts.signature import TensorSpec
from llama_artifacts.strict_json import shown
from llama_artifacts.summary import interfaces

if TYPE_CHECKING:
    from cyclonedx.model import ExternalReference, Property
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component
    from cyclonedx.model.license import License

EPOCH_VARIABLE = "SOURCE_DATE_EPOCH"
MODEL_REF = "model"
_MAX_EPOCH_S = 253402300799  # the last second of the year 9999


def to_json(bundle: Bundle) -> str:
    """The bill of materials: one JSON text for one bundle, whenever and wherever it is written.

    The serial number follows from the manifest's digest. There is no time stamp unless the
    environment variable SOURCE_DATE_EPOCH (seconds since 1970) gives one. Digests are those of the
    manifest; they are not computed again.

    Raises:
        CompatibilityError: the CycloneDX library is not installed.
        BuildError: SOURCE_DATE_EPOCH is no time.
    """
    written = _written()
    digest = sha256(bundle.path(FILE_NAME))
    with needs("sbom"):
        from cyclonedx.output.json import JsonV1Dot6
    value = json.loads(JsonV1Dot6(_bom(bundle, digest, written)).output_as_string())
    if written is None:
        del value["metadata"]["timestamp"]
    # The library has no type for model cards yet.
    value["metadata"]["component"]["modelCard"] = _model_card(bundle.manifest)
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _written() -> datetime | None:
    text = os.environ.get(EPOCH_VARIABLE, "")
    if not text:
        return None
    if not text.isdecimal() or len(text) > 12 or int(text) > _MAX_EPOCH_S:
        message = f"expected seconds since 1970, got {shown(text)}"
        raise BuildError(message, where=EPOCH_VARIABLE, hint="unset it, or `date +%s` for now")
    return datetime.fromtimestamp(int(text), timezone.utc)


def _bom(bundle: Bundle, digest: str, written: datetime | None) -> Bom:
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.tool import ToolRepository

    manifest = bundle.manifest
    model, files = _model(manifest), list(_files(bundle, digest))
    bom = Bom(
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"sha256:{digest}"),
        metadata=BomMetaData(
            component=model,
            tools=ToolRepository(components=list(_tools(manifest.toolchain))),
            timestamp=written,
        ),
        components=files,
    )
    bom.register_dependency(model, files)
    return bom


def _model(manifest: Manifest) -> Component:
    from cyclonedx.model.component import Component, ComponentType

    return Component(
        type=ComponentType.MACHINE_LEARNING_MODEL,
        name=manifest.name,
        bom_ref=MODEL_REF,
        version=manifest.source.revision,
        description=f"Ahead-of-time exported programs: {', '.join(manifest.entries())}",
        licenses=_licenses(manifest.source),
        external_references=_references(manifest.source),
        properties=list(_properties(manifest)),
    )


def _licenses(source: Source) -> list[License]:
    from cyclonedx.contrib.license.factories import LicenseFactory

    name = source.license
    return [] if name is None else [LicenseFactory().make_from_string(name)]


def _references(source: Source) -> list[ExternalReference]:
    from cyclonedx.model import ExternalReference, ExternalReferenceType, XsUri

    if source.kind != "hub":
        return []
    url = f"https://huggingface.co/{source.name}"
    if source.revision is not None:
        url += f"/tree/{source.revision}"
    return [
        ExternalReference(
            type=ExternalReferenceType.VCS, url=XsUri(url), comment="the checkpoint's repository"
        )
    ]


def _properties(manifest: Manifest) -> Iterator[Property]:
    from cyclonedx.model import Property

    source = manifest.source
    facts = {
        "schema": manifest.schema,
        "source:kind": source.kind,
        "source:name": source.name,
        "source:revision": source.revision,
        "weights": manifest.weights,
        "dtype": manifest.dtype,
    }
    for name, fact in facts.items():
        if fact is not None:
            yield Property(name=f"llama-export:{name}", value=str(fact))


def _files(bundle: Bundle, digest: str) -> Iterator[Component]:
    """The manifest and every file that it lists."""
    manifest = bundle.manifest
    used = {program.file: program for program in manifest.programs}
    own = bundle.path(FILE_NAME).stat().st_size
    yield _file(FILE_NAME, digest, {"bytes": str(own)})
    for name, file in sorted(manifest.files.items()):
        facts = {"bytes": str(file.bytes)}
        if name in used:
            program = used[name]
            target = program.target
            place = (target.device, target.machine, target.isa, target.capability)
            facts |= {
                "entry": program.title,
                "format": program.format,
                "target": " ".join(part for part in place if part is not None),
            }
        yield _file(name, file.sha256, facts)


def _file(name: str, digest: str, facts: Mapping[str, str]) -> Component:
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.component import Component, ComponentType

    return Component(
        type=ComponentType.FILE,
        name=name,
        bom_ref=f"file:{name}",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
        properties=[
            Property(name=f"llama-export:{key}", value=fact) for key, fact in facts.items()
        ],
    )


def _tools(toolchain: Mapping[str, str]) -> Iterator[Component]:
    """What built the programs, as packages of PyPI."""
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    for name, version in sorted(toolchain.items()):
        yield Component(
            type=ComponentType.LIBRARY,
            name=name,
            version=version,
            bom_ref=f"tool:{name}",
            purl=PackageURL("pypi", name=name, version=version),
        )


def _model_card(manifest: Manifest) -> dict[str, Any]:
    """The card of CycloneDX's `modelCard`: what the manifest knows, and nothing else."""
    calls = [(found.entry, found.signature) for found in interfaces(manifest)]
    card: dict[str, Any] = {
        "modelParameters": {
            "task": "text-generation",
            "architectureFamily": "transformer",
            "modelArchitecture": "LlamaForCausalLM",
            "inputs": [_format(entry, spec) for entry, call in calls for spec in call.inputs],
            "outputs": [_format(entry, spec) for entry, call in calls for spec in call.outputs],
        },
        "considerations": {
            "technicalLimitations": [
                f"A state holds {manifest.max_seq - 1} positions, in batches of {manifest.batch}."
            ]
        },
        "properties": [
            {"name": f"llama-export:model:{name}", "value": str(value)}
            for name, value in encode(manifest.model).items()
        ],
    }
    if manifest.checks:
        card["quantitativeAnalysis"] = {
            "performanceMetrics": [
                {
                    "type": f"{check.law}, at most {check.limit:g}",
                    "value": f"{check.figure:g}",
                    "slice": " ".join(part for part in (check.entry, check.format) if part)
                    or "bundle",
                }
                for check in manifest.checks
            ]
        }
    return card


def _format(entry: str, spec: TensorSpec) -> dict[str, str]:
    shape = ", ".join(str(size) for size in spec.shape)
    return {"format": f"{entry}: {spec.name} {spec.dtype} [{shape}]"}
