"""The commands that ship a bundle, as a user meets them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_artifacts.integrity import check_whole
from tests.bundles import CONTENTS, write_sample
from tests.cli.running import invoke
from tests.hub_server import Hub, point_at, serving
from tests.keys import Pair, write_certificate, write_pair


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_sample(tmp_path / "bundle")


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return write_pair(tmp_path / "keys")


def failed(*args: object, status: int = 1) -> str:
    """The one error line of a command that must fail."""
    result = invoke(*args)
    assert result.exit_code == status, result.output
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Traceback" not in result.stderr
    return errors[0]


# --- sign, verify --signature ---------------------------------------------------------------------


def test_sign_and_check(bundle: Path, pair: Pair) -> None:
    result = invoke("sign", bundle, "--private-key", pair.private)
    assert result.exit_code == 0
    assert "signed by  key sha256:" in result.stdout
    result = invoke("verify", bundle, "--signature", "--public-key", pair.public)
    assert result.exit_code == 0
    assert f"{len(CONTENTS) + 1}, each as it was signed" in result.stdout


def test_sign_and_check_as_json(bundle: Path, pair: Pair) -> None:
    signed = json.loads(invoke("sign", bundle, "--key", pair.private, "--json").stdout)
    result = invoke("verify", bundle, "--signature", "--key", pair.public, "--json")
    checked = json.loads(result.stdout)
    assert checked["passed"] is True
    assert checked["signature"]["signer"] == signed["signer"]
    assert checked["signature"]["files"] == signed["files"] == len(CONTENTS) + 1


def test_an_encrypted_key(bundle: Path, tmp_path: Path) -> None:
    pair = write_pair(tmp_path / "keys", password=b"open sesame")
    (tmp_path / "password").write_bytes(b"open sesame\r\n")
    words = ("sign", bundle, "--key", pair.private)
    assert "cannot be signed" in failed(*words)
    assert invoke(*words, "--password-file", tmp_path / "password").exit_code == 0
    assert "no such" in failed(*words, "--password-file", tmp_path / "none").lower()


def test_a_certificate(bundle: Path, tmp_path: Path) -> None:
    issued = write_certificate(tmp_path / "keys")
    words = ("--key", issued.private, "--certificate", issued.certificate)
    assert invoke("sign", bundle, *words, "--certificate-chain", issued.authority).exit_code == 0
    result = invoke("verify", bundle, "--signature", "--certificate-chain", issued.authority)
    assert result.exit_code == 0
    assert "CN=a test signer" in result.stdout


def test_a_changed_bundle_is_one_line_and_as_json_too(bundle: Path, pair: Pair) -> None:
    invoke("sign", bundle, "--key", pair.private)
    (bundle / "decode.pt2").write_bytes(CONTENTS["decode.pt2"].swapcase())
    words = ("verify", bundle, "--signature", "--public-key", pair.public)
    assert failed(*words) == f"error: {bundle / 'decode.pt2'}: changed since it was signed"
    found = json.loads(invoke(*words, "--json").stdout)
    assert found["error"]["kind"] == "SignatureError"


def test_no_signature_is_one_line(bundle: Path, pair: Pair) -> None:
    error = failed("verify", bundle, "--signature", "--public-key", pair.public)
    assert "the bundle is not signed" in error


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--key k --sigstore",
        "--sigstore --certificate c",
        "--sigstore --password-file p",
        "--key k --certificate-chain c",
        "--key k --certificate c --password-file p",
        "--key k --staging",
    ],
)
def test_wrong_usage_of_sign(bundle: Path, words: str) -> None:
    failed("sign", bundle, *words.split(), status=2)


@pytest.mark.parametrize(
    "words",
    [
        "--signature",
        "--public-key k",
        "--signature --public-key k --certificate-chain c",
        "--signature --identity me",
        "--signature --identity-provider https://issuer",
        "--signature --public-key k --staging",
        "--signature --public-key k --law parity",
        "--signature --public-key k --record",
    ],
)
def test_wrong_usage_of_verify(bundle: Path, words: str) -> None:
    failed("verify", bundle, *words.split(), status=2)


# --- sbom, export-config --------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["sbom", "export-config"])
def test_a_document_to_stdout_or_a_file(bundle: Path, tmp_path: Path, command: str) -> None:
    text = invoke(command, bundle).stdout
    json.loads(text)
    path = tmp_path / "document.json"
    path.write_text("old")
    assert invoke(command, bundle, "-o", path).exit_code == 0
    assert path.read_text() == text
    assert sorted(tmp_path.iterdir()) == [bundle, path]


@pytest.mark.parametrize("command", ["sbom", "export-config"])
def test_a_document_does_not_become_an_extra_file(
    bundle: Path, tmp_path: Path, command: str
) -> None:
    (tmp_path / "link").symlink_to(bundle)
    error = failed(command, bundle, "-o", tmp_path / "link" / "document.json")
    assert "a bundle holds its own files only" in error
    check_whole(bundle)


def test_a_document_into_no_folder(bundle: Path, tmp_path: Path) -> None:
    error = failed("sbom", bundle, "-o", tmp_path / "none" / "document.json")
    assert "cannot be written" in error


# --- push, pull -----------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    with serving() as hub:
        point_at(hub, monkeypatch)
        yield hub


def test_there_and_back(hub: Hub, bundle: Path, pair: Pair) -> None:
    invoke("sign", bundle, "--key", pair.private)
    words = ("--private", "--revision", "candidate", "--message", "a try")
    pushed = json.loads(invoke("push", bundle, "me/tiny", *words, "--json").stdout)
    assert hub.repositories["me/tiny"].messages[-1] == "a try"
    assert pushed["revision"] == hub.repositories["me/tiny"].branches["candidate"]
    name = f"me/tiny@{pushed['revision']}"
    result = invoke("pull", name, "-o", "out", "--require-signature", pair.public)
    assert result.exit_code == 0
    assert f"pulled  {name}" in result.stdout
    assert {path.name for path in Path("out").iterdir()} == {path.name for path in bundle.iterdir()}


def test_a_failed_pull_is_one_line(hub: Hub, bundle: Path, pair: Pair) -> None:
    assert "no such repository" in failed("pull", "me/nothing")
    invoke("push", bundle, "me/tiny")
    words = ("pull", "me/tiny", "--require-signature", pair.public)
    assert "the bundle is not signed" in failed(*words)
    assert not Path("tiny").exists()


def test_a_failed_push_is_one_line(hub: Hub, bundle: Path) -> None:
    shutil.copy(bundle / "decode.pt2", bundle / "copy.pt2")
    assert "extra" in failed("push", bundle, "me/tiny")
    assert "expected owner/name" in failed("push", bundle, "tiny")
