"""Signatures that are somebody else's, damaged, or not there."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts import signature_file
from llama_artifacts.errors import SignatureError
from llama_artifacts.manifest import SIGNATURE_NAME
from llama_artifacts.signing import (
    Authority,
    Certificate,
    Identity,
    PrivateKey,
    PublicKey,
    Verifier,
    sign,
)
from tests.artifacts.signatures import edit, refused
from tests.bundles import write_sample
from tests.keys import DAY, NOW, Pair, write_certificate, write_pair

# --- somebody else's, or none ---------------------------------------------------------------------


def test_no_signature(tmp_path: Path, pair: Pair) -> None:
    folder = write_sample(tmp_path / "bundle")
    error = refused(folder, PublicKey(pair.public))
    assert error.message == "the bundle is not signed: expected a `model.sig` in it, found none"


def test_another_key(signed: Path, tmp_path: Path) -> None:
    other = write_pair(tmp_path / "other")
    error = refused(signed, PublicKey(other.public))
    assert error.message == "is not good: by another key than expected, or altered"


def test_another_key_that_claims_to_be_the_expected_one(
    signed: Path, pair: Pair, tmp_path: Path
) -> None:
    expected = signature_file.read(signed / SIGNATURE_NAME).key_digest
    other = write_pair(tmp_path / "other")
    sign(signed, PrivateKey(other.private))
    edit(signed, lambda value: value["verificationMaterial"]["publicKey"].update(hint=expected))
    assert "another key" in refused(signed, PublicKey(pair.public)).message


@pytest.mark.parametrize("verifier", [Authority((Path("none"),)), Identity("me", "https://issuer")])
def test_another_kind_of_signer(signed: Path, verifier: Verifier) -> None:
    message = refused(signed, verifier).message
    shown = {"certificate": "a certificate", "sigstore": "a Sigstore identity"}[verifier.kind]
    assert message == f"expected a signature by {shown}, got one by a key"


def test_another_authority(signed: Path, tmp_path: Path) -> None:
    issued, other = write_certificate(tmp_path / "one"), write_certificate(tmp_path / "two")
    sign(signed, Certificate(issued.private, issued.certificate))
    assert "is not good" in refused(signed, Authority((other.authority,))).message


@pytest.mark.parametrize(("first", "last"), [(-9, -1), (1, 9)], ids=["expired", "not yet valid"])
def test_a_certificate_that_is_not_valid_today(
    signed: Path, tmp_path: Path, first: int, last: int
) -> None:
    issued = write_certificate(tmp_path / "keys", first=NOW + first * DAY, last=NOW + last * DAY)
    sign(signed, Certificate(issued.private, issued.certificate))
    error = refused(signed, Authority((issued.authority,)))
    assert error.message.startswith("expected a certificate that is valid today, got one from")


def test_a_certificate_that_is_not_for_signing(signed: Path, tmp_path: Path) -> None:
    issued = write_certificate(tmp_path / "keys", can_sign=False)
    sign(signed, Certificate(issued.private, issued.certificate))
    message = refused(signed, Authority((issued.authority,))).message
    assert "cannot be used for signing" in message


@pytest.mark.parametrize("content", [b"", b"-----BEGIN PUBLIC KEY-----\n", b"\xff\x00"])
def test_a_key_file_that_holds_no_key(signed: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.pub").write_bytes(content)
    assert "is not good" in refused(signed, PublicKey(tmp_path / "bad.pub")).message


def test_a_key_file_that_is_not_there(signed: Path, tmp_path: Path) -> None:
    message = refused(signed, PublicKey(tmp_path / "no.pub")).message
    assert message == f"is not good: {tmp_path / 'no.pub'}: No such file or directory"


# --- damaged signatures ---------------------------------------------------------------------------


def _payload(value: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> None:
    payload = json.loads(base64.b64decode(value["dsseEnvelope"]["payload"]))
    change(payload)
    text = json.dumps(payload).encode()
    value["dsseEnvelope"]["payload"] = base64.b64encode(text).decode()


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no envelope": lambda v: v.pop("dsseEnvelope"),
    "no material": lambda v: v.pop("verificationMaterial"),
    "no media type": lambda v: v.pop("mediaType"),
    "another media type": lambda v: v.update(mediaType="text/plain"),
    "an unknown key": lambda v: v.update(dsse_envelope={}),
    "an envelope that is a list": lambda v: v.update(dsseEnvelope=[]),
    "no signer": lambda v: v["verificationMaterial"].pop("publicKey"),
    "two signers": lambda v: v["verificationMaterial"].update(certificate={"rawBytes": ""}),
    "no digest of the key": lambda v: v["verificationMaterial"]["publicKey"].pop("hint"),
    "no signatures": lambda v: v["dsseEnvelope"].update(signatures=[]),
    "signatures that are text": lambda v: v["dsseEnvelope"].update(signatures="x"),
    "a signature that is no base64": lambda v: v["dsseEnvelope"].update(
        signatures=[{"sig": "?", "keyid": ""}]
    ),
    "a short signature": lambda v: v["dsseEnvelope"].update(
        signatures=[{"sig": "AAAA", "keyid": ""}]
    ),
    "a payload that is no base64": lambda v: v["dsseEnvelope"].update(payload="?"),
    "a payload that is no JSON": lambda v: v["dsseEnvelope"].update(payload="AAAA"),
    "another payload type": lambda v: v["dsseEnvelope"].update(payloadType="text/plain"),
    "another predicate": lambda v: _payload(v, lambda p: p.update(predicateType="x")),
    "no predicate": lambda v: _payload(v, lambda p: p.pop("predicate")),
    "altered digests": lambda v: _payload(
        v, lambda p: p["predicate"]["resources"][0].update(digest="0" * 64)
    ),
    "a file left out": lambda v: _payload(
        v, lambda p: p["predicate"]["serialization"].update(ignore_paths=["decode.pt2"])
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_signature(signed: Path, pair: Pair, name: str) -> None:
    edit(signed, DAMAGES[name])
    assert isinstance(refused(signed, PublicKey(pair.public)), SignatureError)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"a": 1, "a": 2}', b"null"]
)
def test_a_signature_that_is_no_json_object(signed: Path, pair: Pair, content: bytes) -> None:
    (signed / SIGNATURE_NAME).write_bytes(content)
    assert isinstance(refused(signed, PublicKey(pair.public)), SignatureError)


def test_a_huge_signature_is_not_read(signed: Path, pair: Pair) -> None:
    with (signed / SIGNATURE_NAME).open("wb") as file:
        file.truncate(signature_file.MAX_SIGNATURE_BYTES + 1)
    assert "at most" in refused(signed, PublicKey(pair.public)).message


def test_every_cut_of_a_signature(signed: Path, pair: Pair) -> None:
    path = signed / SIGNATURE_NAME
    data = path.read_bytes()
    for end in range(0, len(data), 397):
        path.write_bytes(data[:end])
        assert isinstance(refused(signed, PublicKey(pair.public)), SignatureError)


def test_a_signer_who_left_files_out(tmp_path: Path, pair: Pair) -> None:
    from model_signing import hashing, signing

    folder = write_sample(tmp_path / "bundle")
    config = hashing.Config().set_ignored_paths(paths=["model.sig", "decode.pt2"])
    signer = signing.Config().use_elliptic_key_signer(private_key=pair.private)
    signer.set_hashing_config(config).sign(folder, folder / SIGNATURE_NAME)
    (folder / "decode.pt2").write_bytes(b"an Exported program")
    assert "it leaves out" in refused(folder, PublicKey(pair.public)).message
