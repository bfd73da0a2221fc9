"""Signatures: what they cover, whose they are, and every way in which one can be bad."""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts import signature_file
from llama_artifacts.bundle import open_bundle, put_file
from llama_artifacts.errors import (
    BuildError,
    CompatibilityError,
    IntegrityError,
    LlamaExportError,
    SignatureError,
)
from llama_artifacts.manifest import BLOCK_BYTES, FILE_NAME, SIGNATURE_NAME
from llama_artifacts.signing import (
    Authority,
    Certificate,
    Identity,
    PrivateKey,
    PublicKey,
    Sigstore,
    Verifier,
    open_signed,
    sign,
    signer_name,
)
from tests.bundles import CONTENTS, write_large, write_sample
from tests.keys import DAY, NOW, Pair, write_certificate, write_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def made(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_sample(tmp_path_factory.mktemp("made") / "bundle")
    sign(folder, PrivateKey(pair.private))
    return folder


@pytest.fixture
def signed(made: Path, tmp_path: Path) -> Path:
    """A signed bundle, to be spoiled."""
    return shutil.copytree(made, tmp_path / "bundle")


def refused(folder: Path, verifier: Verifier) -> LlamaExportError:
    with pytest.raises(LlamaExportError) as caught:
        open_signed(folder, verifier)
    assert str(caught.value).isprintable()
    assert caught.value.hint
    return caught.value


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / SIGNATURE_NAME
    value = json.loads(path.read_bytes())
    change(value)
    path.write_text(json.dumps(value))


# --- what is good ---------------------------------------------------------------------------------


def test_a_signature_covers_every_file(signed: Path, pair: Pair) -> None:
    bundle, signature = open_signed(signed, PublicKey(pair.public))
    assert bundle == open_bundle(signed)
    assert set(signature.digests) == {*CONTENTS, "manifest.json"}
    assert signer_name(signature).startswith("key sha256:")


def test_a_signed_bundle_can_be_moved_and_renamed(signed: Path, pair: Pair, tmp_path: Path) -> None:
    open_signed(signed.rename(tmp_path / "an other näme"), PublicKey(pair.public))


def test_signing_again_replaces_the_signature(signed: Path, tmp_path: Path) -> None:
    other = write_pair(tmp_path / "other")
    sign(signed, PrivateKey(other.private))
    open_signed(signed, PublicKey(other.public))


def test_an_encrypted_key(signed: Path, tmp_path: Path) -> None:
    other = write_pair(tmp_path / "other", password=b"open sesame")
    sign(signed, PrivateKey(other.private, b"open sesame"))
    open_signed(signed, PublicKey(other.public))


def test_a_certificate(signed: Path, tmp_path: Path) -> None:
    issued = write_certificate(tmp_path / "issued")
    sign(signed, Certificate(issued.private, issued.certificate))
    _, signature = open_signed(signed, Authority((issued.authority,)))
    assert signer_name(signature) == "certificate CN=a test signer"


def test_block_digests_of_other_bytes_are_not_signed(tmp_path: Path, pair: Pair) -> None:
    """Else one reader would take one file for the signed one, and the next another."""
    folder = write_large(tmp_path / "b", BLOCK_BYTES + 1)
    sign(folder, PrivateKey(pair.private))
    open_signed(folder, PublicKey(pair.public))
    value = json.loads((folder / FILE_NAME).read_bytes())
    value["files"]["large.bin"]["blocks"][1] = "0" * 64
    (folder / FILE_NAME).write_text(json.dumps(value))
    with pytest.raises(IntegrityError, match=r"large\.bin: damaged: bytes 64-65 MiB: sha256 "):
        sign(folder, PrivateKey(pair.private))


def test_git_files_are_no_exception(signed: Path, pair: Pair) -> None:
    (signed / ".gitattributes").write_text("*.pt2 filter=lfs")
    assert refused(signed, PublicKey(pair.public)).where == str(signed / ".gitattributes")


# --- what changed since ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CONTENTS, "manifest.json"])
def test_a_changed_file_of_the_same_size(signed: Path, pair: Pair, name: str) -> None:
    path = signed / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    error = refused(signed, PublicKey(pair.public))
    assert (error.where, error.message) == (str(path), "changed since it was signed")


def test_a_missing_file(signed: Path, pair: Pair) -> None:
    (signed / "decode.pt2").unlink()
    error = refused(signed, PublicKey(pair.public))
    assert str(error) == f"{signed / 'decode.pt2'}: missing, though it is signed"


@pytest.mark.parametrize("name", ["more.txt", ".hidden", "model.sig.old"])
def test_an_extra_file(signed: Path, pair: Pair, name: str) -> None:
    (signed / name).write_text("more")
    error = refused(signed, PublicKey(pair.public))
    assert str(error) == f"{signed / name}: was not there when it was signed"


def test_an_extra_folder(signed: Path, pair: Pair) -> None:
    (signed / "empty").mkdir()
    error = refused(signed, PublicKey(pair.public))
    assert isinstance(error, IntegrityError)
    assert "extra" in error.message


def test_a_pipe_does_not_hang(signed: Path, pair: Pair) -> None:
    (signed / "decode.pt2").unlink()
    os.mkfifo(signed / "decode.pt2")
    assert isinstance(refused(signed, PublicKey(pair.public)), SignatureError)


def test_what_is_recorded_later_ends_the_signature_and_the_error_says_so(
    signed: Path, pair: Pair
) -> None:
    put_file(signed, "samples.json", b"{}")
    error = refused(signed, PublicKey(pair.public))
    assert "verify --record" in (error.hint or "")
    sign(signed, PrivateKey(pair.private))
    open_signed(signed, PublicKey(pair.public))


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


# --- what is not signed ---------------------------------------------------------------------------


def unsigned(folder: Path, signer: Any) -> LlamaExportError:
    with pytest.raises(LlamaExportError) as caught:
        sign(folder, signer)
    assert not (folder / SIGNATURE_NAME).exists()
    assert str(caught.value).isprintable()
    return caught.value


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_sample(tmp_path / "bundle")


def test_a_damaged_bundle_is_not_signed(bundle: Path, pair: Pair) -> None:
    (bundle / "decode.pt2").write_bytes(CONTENTS["decode.pt2"].swapcase())
    error = unsigned(bundle, PrivateKey(pair.private))
    assert str(error).startswith(f"{bundle / 'decode.pt2'}: damaged")


def test_an_extra_file_is_not_signed(bundle: Path, pair: Pair) -> None:
    (bundle / "notes.txt").write_text("mine")
    assert "extra" in unsigned(bundle, PrivateKey(pair.private)).message


def test_a_password_that_is_missing_or_wrong(bundle: Path, tmp_path: Path) -> None:
    other = write_pair(tmp_path / "other", password=b"open sesame")
    assert "Password" in unsigned(bundle, PrivateKey(other.private)).message
    assert unsigned(bundle, PrivateKey(other.private, b"wrong")).message


def test_a_key_that_is_not_the_certificates(bundle: Path, pair: Pair, tmp_path: Path) -> None:
    issued = write_certificate(tmp_path / "issued")
    message = unsigned(bundle, Certificate(pair.private, issued.certificate)).message
    assert "does not match" in message


def test_a_folder_that_cannot_be_written(
    bundle: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(self: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(target))

    monkeypatch.setattr(Path, "replace", replace)
    assert isinstance(unsigned(bundle, PrivateKey(pair.private)), BuildError)


def test_sigstore_is_asked_as_it_was_chosen(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The services themselves are out of reach of the tests."""
    from model_signing import signing
    from sigstore.errors import TUFError

    asked: dict[str, Any] = {}

    def use(self: Any, **settings: Any) -> None:
        asked.update(settings)
        raise TUFError("Failed to refresh TUF metadata")

    monkeypatch.setattr(signing.Config, "use_sigstore_signer", use)
    error = unsigned(bundle, Sigstore("a token", uses_staging=True))
    assert error.message == "cannot be signed: Failed to refresh TUF metadata"
    assert asked == {
        "identity_token": "a token",
        "use_ambient_credentials": True,
        "use_staging": True,
    }


def test_an_identity_is_checked_as_it_was_named(
    signed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As above: only what Sigstore would be asked."""
    from model_signing import verifying
    from sigstore.errors import VerificationError

    asked: dict[str, Any] = {}

    def use(self: Any, **settings: Any) -> None:
        asked.update(settings)
        raise VerificationError("Certificate's SANs do not match me@example.org")

    monkeypatch.setattr(verifying.Config, "use_sigstore_verifier", use)
    edit(
        signed,
        lambda v: v.update(verificationMaterial={"certificate": {"rawBytes": "AAAA"}}),
    )
    error = refused(signed, Identity("me@example.org", "https://issuer"))
    assert error.message == "is not good: Certificate's SANs do not match me@example.org"
    assert asked == {
        "identity": "me@example.org",
        "oidc_issuer": "https://issuer",
        "use_staging": False,
    }


@pytest.mark.parametrize("module", ["model_signing", "model_signing.signing"])
def test_a_missing_library_names_the_extra(
    bundle: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    for name in [name for name in sys.modules if name.startswith(module)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    error = unsigned(bundle, PrivateKey(pair.private))
    assert isinstance(error, CompatibilityError)
    assert error.hint == "pip install 'llama-export[sign]'"
