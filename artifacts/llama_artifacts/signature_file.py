"""The file `model.sig`, read as untrusted text: who signed, and the digests that were signed.

It is a Sigstore bundle (JSON) around a DSSE envelope around an in-toto statement, as OpenSSF
model-signing 1.x writes it. Nothing here says that the signature is good; see `signing`.
"""

from __future__ import annotations

import base64
import binascii
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llama_artifacts.codec import decode
from llama_artifacts.errors import ManifestError, SignatureError
from llama_artifacts.manifest import SIGNATURE_NAME
from llama_artifacts.strict_json import parse_object, shown

MAX_SIGNATURE_BYTES = 16 * 2**20
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
DAMAGED_HINT = "sign the bundle again, or get it again from whoever signed it"

Kind = Literal["key", "certificate", "sigstore"]
_KINDS: dict[str, Kind] = {
    "publicKey": "key",
    "x509CertificateChain": "certificate",
    "certificate": "sigstore",
}


@dataclass(frozen=True)
class SignatureFile:
    """What a signature says of itself.

    Attributes:
        path: where it was read.
        data: its bytes, read once.
        kind: what it was made with.
        digests: SHA-256 of each file it covers, by name, in hexadecimal.
        certificates: X.509 certificates in DER, the signer's first; empty where a key signed.
        key_digest: SHA-256 of the key's PEM text, in hexadecimal; None where a certificate signed.
    """

    path: Path
    data: bytes
    kind: Kind
    digests: Mapping[str, str]
    certificates: tuple[bytes, ...]
    key_digest: str | None


@dataclass(frozen=True)
class _Resource:
    name: str
    algorithm: Literal["sha256"]
    digest: str


@dataclass(frozen=True)
class _Serialization:
    method: Literal["files"]
    hash_type: Literal["sha256"]
    allow_symlinks: bool
    ignore_paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Predicate:
    serialization: _Serialization
    resources: tuple[_Resource, ...]


def read(path: Path) -> SignatureFile:
    """Reads a signature.

    Raises:
        SignatureError: there is none, it is too large, or it is not of the form that is written
            here: whole files, SHA-256, nothing left out but the signature itself.
    """
    data = _read_bytes(path)
    value = parse_object(data, where=path, error=SignatureError)
    _keys(value, ("mediaType", "verificationMaterial", "dsseEnvelope"), path, "")
    material = _object(value, "verificationMaterial", path)
    envelope = _object(value, "dsseEnvelope", path)
    _keys(envelope, ("payload", "payloadType", "signatures"), path, "dsseEnvelope")
    kind = _kind(material, path)
    payload = parse_object(
        _base64(envelope.get("payload"), path, "dsseEnvelope.payload"),
        where=f"{path}#dsseEnvelope.payload",
        error=SignatureError,
    )
    return SignatureFile(
        path=path,
        data=data,
        kind=kind,
        digests=_digests(payload, path),
        certificates=() if kind == "key" else _certificates(material, path),
        key_digest=_key_digest(material, path) if kind == "key" else None,
    )


def _read_bytes(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_SIGNATURE_BYTES:
            message = f"expected a file of at most {MAX_SIGNATURE_BYTES:,} bytes"
            raise SignatureError(message, where=path, hint=DAMAGED_HINT)
        return path.read_bytes()
    except FileNotFoundError as cause:
        message = f"the bundle is not signed: expected a `{SIGNATURE_NAME}` in it, found none"
        hint = "`llama-export sign` signs a bundle"
        raise SignatureError(message, where=path.parent, hint=hint) from cause
    except OSError as cause:
        raise SignatureError(f"cannot be read: {cause.strerror}", where=path) from cause


def _kind(material: Mapping[str, Any], path: Path) -> Kind:
    _keys(material, (*_KINDS, "tlogEntries", "timestampVerificationData"), path, "")
    found = [key for key in _KINDS if material.get(key) is not None]
    if len(found) != 1:
        message = f"expected one of {', '.join(_KINDS)}, got {' and '.join(found) or 'none'}"
        raise _damaged(message, path, "verificationMaterial")
    return _KINDS[found[0]]


def _key_digest(material: Mapping[str, Any], path: Path) -> str:
    hint = _object(material, "publicKey", path).get("hint")
    if not isinstance(hint, str) or not hint:
        raise _damaged("expected the key's digest, got none", path, "publicKey.hint")
    return hint


def _certificates(material: Mapping[str, Any], path: Path) -> tuple[bytes, ...]:
    found: Any = [material.get("certificate")]
    if material.get("x509CertificateChain") is not None:
        found = _object(material, "x509CertificateChain", path).get("certificates")
    if not isinstance(found, list) or not found or not all(isinstance(x, dict) for x in found):
        raise _damaged("expected certificates", path, "verificationMaterial")
    return tuple(_base64(item.get("rawBytes"), path, "rawBytes") for item in found)


def _digests(payload: Mapping[str, Any], path: Path) -> dict[str, str]:
    if payload.get("predicateType") != PREDICATE_TYPE:
        got = shown(payload.get("predicateType"))
        raise _damaged(f"expected a signature of a model, got predicate type {got}", path, "")
    try:
        predicate = decode(_Predicate, payload.get("predicate"), where=f"{path}#", ignored=[])
    except ManifestError as cause:
        raise SignatureError(cause.message, where=cause.where, hint=DAMAGED_HINT) from cause
    others = set(predicate.serialization.ignore_paths) - {SIGNATURE_NAME}
    if others:
        raise _damaged(f"it leaves out {shown(min(others))}: expected every file", path, "")
    return {resource.name: resource.digest for resource in predicate.resources}


def _object(value: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    found = value.get(key)
    if not isinstance(found, dict):
        raise _damaged("expected an object", path, key)
    return found


def _keys(value: Mapping[str, Any], known: Collection[str], path: Path, key: str) -> None:
    # A key that only another reader knows could say something else than what was checked.
    unknown = sorted(set(value) - set(known))
    if unknown:
        raise _damaged(f"unknown key {shown(unknown[0])}", path, key)


def _base64(text: object, path: Path, key: str) -> bytes:
    try:
        return base64.b64decode(text if isinstance(text, str) else "!", validate=True)
    except (binascii.Error, ValueError) as cause:
        raise _damaged("expected base64", path, key) from cause


def _damaged(message: str, path: Path, key: str) -> SignatureError:
    return SignatureError(message, where=f"{path}#{key}" if key else path, hint=DAMAGED_HINT)
