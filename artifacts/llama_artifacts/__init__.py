"""The bundle format: manifest, signatures, dtypes, weights header, errors. Imports no framework."""

from __future__ import annotations

from llama_artifacts.bundle import Bundle, open_bundle
from llama_artifacts.errors import (
    BuildError,
    CheckpointError,
    ChoiceError,
    CompatibilityError,
    GroupError,
    InputError,
    IntegrityError,
    LlamaExportError,
    ManifestError,
    SessionError,
    SignatureError,
    TokenizerError,
    TransferError,
    VerificationError,
)
from llama_artifacts.manifest import Manifest, Program
from llama_artifacts.signature import Dim, Signature, StateSpec, TensorSpec

__all__ = [
    "BuildError",
    "Bundle",
    "CheckpointError",
    "ChoiceError",
    "CompatibilityError",
    "Dim",
    "GroupError",
    "InputError",
    "IntegrityError",
    "LlamaExportError",
    "Manifest",
    "ManifestError",
    "Program",
    "SessionError",
    "Signature",
    "SignatureError",
    "StateSpec",
    "TensorSpec",
    "TokenizerError",
    "TransferError",
    "VerificationError",
    "open_bundle",
]
