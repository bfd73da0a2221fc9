"""Signatures: what they cover, what ends them, and what is not signed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

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
    open_signed,
    sign,
    signer_name,
)
from tests.artifacts.signatures import edit, refused
from tests.bundles import CONTENTS, write_large, write_sample
from tests.keys import Pair, write_certificate, write_pair

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
