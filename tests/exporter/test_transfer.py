"""Push and pull against a hub on this machine: whole or not at all, in one commit, resumed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from llama_artifacts.bundle import open_bundle
from llama_artifacts.errors import (
    BuildError,
    IntegrityError,
    LlamaExportError,
    ManifestError,
    SignatureError,
    TransferError,
)
from llama_artifacts.integrity import check_whole
from llama_artifacts.manifest import FILE_NAME, SIGNATURE_NAME
from llama_artifacts.signing import PrivateKey, PublicKey, sign
from llama_export.transfer import pull, push
from llama_runtime.downloads import Remote
from tests.bundles import CONTENTS, write_sample
from tests.hub_server import Hub, Repository, point_at, serving, wait_for_bytes
from tests.keys import write_pair

NAME = "me/tiny-bundle"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the library's own retries
    with serving() as hub:
        point_at(hub, monkeypatch)
        yield hub


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_sample(tmp_path / "a bundle")


def pushed(hub: Hub, bundle: Path) -> Repository:
    push(bundle, NAME)
    return hub.repositories[NAME]


def left_overs(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


# --- push -----------------------------------------------------------------------------------------


def test_a_push_is_one_commit_of_every_file(hub: Hub, bundle: Path) -> None:
    done = push(bundle, NAME, message="the first")
    repository = hub.repositories[NAME]
    assert repository.messages == ["initial commit", "the first"]
    assert set(hub.files(NAME)) == {*CONTENTS, FILE_NAME, ".gitattributes"}
    assert hub.files(NAME)["decode.pt2"] == CONTENTS["decode.pt2"]
    assert (done.repository, done.revision) == (NAME, repository.branches["main"])
    assert done.files == len(CONTENTS) + 1


def test_what_the_new_bundle_lacks_is_removed_and_the_rest_stays(hub: Hub, bundle: Path) -> None:
    repository = pushed(hub, bundle)
    others = {"old.onnx": b"old", SIGNATURE_NAME: b"old", "README.md": b"# Mine"}
    repository.commit("main", {**hub.files(NAME), **others}, "by hand")
    push(bundle, NAME)
    assert set(hub.files(NAME)) == {*CONTENTS, FILE_NAME, ".gitattributes", "README.md"}


def test_a_branch_and_a_private_repository(hub: Hub, bundle: Path) -> None:
    push(bundle, NAME, revision="candidate", is_private=True)
    assert hub.repositories[NAME].private
    assert FILE_NAME in hub.files(NAME, "candidate")
    assert FILE_NAME not in hub.files(NAME)


def test_private_refuses_a_public_repository(hub: Hub, bundle: Path) -> None:
    pushed(hub, bundle)
    with pytest.raises(TransferError, match="already and public"):
        push(bundle, NAME, is_private=True)
    assert len(hub.repositories[NAME].messages) == 2


def test_a_damaged_bundle_is_not_pushed(hub: Hub, bundle: Path) -> None:
    (bundle / "decode.pt2").write_bytes(CONTENTS["decode.pt2"].swapcase())
    with pytest.raises(IntegrityError, match="damaged"):
        push(bundle, NAME)
    assert not hub.repositories


def test_an_extra_file_is_not_pushed(hub: Hub, bundle: Path) -> None:
    (bundle / ".env").write_text("SECRET=1")
    with pytest.raises(IntegrityError, match="extra"):
        push(bundle, NAME)
    assert not hub.repositories


@pytest.mark.parametrize("name", ["tiny", "me/tiny/bundle", "me/..", "", "me/tiny@main", "-x/y"])
def test_a_name_that_is_no_repository(hub: Hub, bundle: Path, name: str) -> None:
    with pytest.raises(TransferError, match="expected owner/name"):
        push(bundle, name)


# --- pull -----------------------------------------------------------------------------------------


def test_what_was_pushed_comes_back(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    revision = push(bundle, NAME).revision
    done = pull(NAME)
    assert done.folder == Path("tiny-bundle")
    assert done.revision == revision
    assert open_bundle(tmp_path / "tiny-bundle").manifest == open_bundle(bundle).manifest
    check_whole(tmp_path / "tiny-bundle")
    assert left_overs(tmp_path) == []


def test_a_pull_takes_nothing_but_the_bundle(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    pushed(hub, bundle).commit("main", {**hub.files(NAME), "README.md": b"# Mine"}, "by hand")
    pull(NAME, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*CONTENTS, FILE_NAME}


@pytest.mark.parametrize("kind", ["branch", "commit"])
def test_a_revision(hub: Hub, bundle: Path, tmp_path: Path, kind: str) -> None:
    first = push(bundle, NAME, revision="candidate").revision
    push(write_sample(tmp_path / "other", name="other"), NAME)
    pull(f"{NAME}@{'candidate' if kind == 'branch' else first}", tmp_path / "out")
    assert open_bundle(tmp_path / "out").manifest.name == "tiny"


def test_a_connection_that_breaks_is_resumed(
    hub: Hub, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1)
    pushed(hub, bundle)
    size = len(CONTENTS["weights.safetensors"])
    hub.cuts["weights.safetensors"] = size - 10
    pull(NAME, tmp_path / "out")
    assert hub.ranges["weights.safetensors"] == ["", f"bytes={size - 10}-"]


def test_a_pull_that_failed_keeps_what_it_had(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    pushed(hub, bundle)
    hub.cuts["weights.safetensors"] = 10  # the library tries again by itself, then gives up
    with pytest.raises(TransferError, match="request failed"):
        pull(NAME, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    had = {name for name in CONTENTS if name in hub.ranges} - {"weights.safetensors"}
    hub.ranges.clear()
    hub.cuts.clear()
    pull(NAME, tmp_path / "out")
    check_whole(tmp_path / "out")
    assert had
    assert not had & set(hub.ranges)
    assert left_overs(tmp_path) == []


def test_a_file_damaged_on_the_way_is_refused_then_fetched_anew(
    hub: Hub, bundle: Path, tmp_path: Path
) -> None:
    pushed(hub, bundle)
    hub.damages.add("weights.safetensors")
    with pytest.raises(IntegrityError, match=r"weights\.safetensors: damaged"):
        pull(NAME, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    hub.damages.clear()
    hub.ranges.clear()
    pull(NAME, tmp_path / "out")
    assert "weights.safetensors" in hub.ranges
    assert "decode.pt2" not in hub.ranges


def test_a_pull_that_was_killed_goes_on_where_it_was(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = constants.DOWNLOAD_CHUNK_SIZE
    bundle = write_sample(tmp_path / "b", contents={**CONTENTS, "decode.pt2": bytes(2 * chunk)})
    hub.repositories[NAME] = repository = Repository()
    files = {path.name: path.read_bytes() for path in bundle.iterdir()}
    repository.commit("main", files, "first")
    hub.walls["decode.pt2"] = chunk + 1000
    hub.hangs.clear()
    command = [sys.executable, "-m", "llama_export", "pull", NAME, "-o", "out"]
    process = subprocess.Popen(command, env={**os.environ, "HF_ENDPOINT": hub.url}, cwd=tmp_path)
    part = tmp_path / ".out.pull" / f".{hashlib.sha256(files['decode.pt2']).hexdigest()}.part"
    wait_for_bytes(part, chunk)
    process.send_signal(signal.SIGKILL)
    process.wait()
    hub.walls.clear()
    hub.hangs.set()
    pull(NAME, tmp_path / "out")
    assert hub.ranges["decode.pt2"] == ["", f"bytes={chunk}-"]
    check_whole(tmp_path / "out")
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".out")] == []


def test_what_another_commit_left_is_not_taken(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    pushed(hub, bundle)
    hub.cuts["weights.safetensors"] = 10
    with pytest.raises(TransferError):
        pull(NAME, tmp_path / "out")
    hub.cuts.clear()
    hub.ranges.clear()
    contents = {**CONTENTS, "decode.pt2": b"another exported one"}
    push(write_sample(tmp_path / "second", contents=contents), NAME)
    pull(NAME, tmp_path / "out")
    check_whole(tmp_path / "out")
    assert (tmp_path / "out" / "decode.pt2").read_bytes() == contents["decode.pt2"]
    assert {"decode.pt2", "weights.safetensors"} <= set(hub.ranges)
    assert "decode.onnx" not in hub.ranges


def test_what_plain_http_does_not_send_is_left_to_the_library(
    hub: Hub, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed(hub, bundle)
    monkeypatch.setattr(Remote, "can_resume", False)
    pull(NAME, tmp_path / "out")
    check_whole(tmp_path / "out")


def test_a_file_that_the_hub_lacks(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    files = dict(pushed(hub, bundle).commits[hub.repositories[NAME].branches["main"]])
    del files["decode.pt2"]
    hub.repositories[NAME].commit("main", files, "by hand")
    with pytest.raises(IntegrityError, match=r"decode\.pt2: missing"):
        pull(NAME, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_repository_without_a_bundle(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[NAME] = repository = Repository()
    repository.commit("main", {"README.md": b""}, "first")
    with pytest.raises(TransferError, match=r"not a bundle: it has no `manifest\.json`"):
        pull(NAME, tmp_path / "out")
    assert left_overs(tmp_path) == []


def test_a_manifest_that_is_none(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[NAME] = repository = Repository()
    repository.commit("main", {FILE_NAME: b"[]"}, "first")
    with pytest.raises(ManifestError, match="expected a JSON object"):
        pull(NAME, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_such_repository_or_revision(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="no such repository"):
        pull("me/nothing", tmp_path / "out")
    pushed(hub, bundle)
    with pytest.raises(TransferError, match="no such revision"):
        pull(f"{NAME}@v9", tmp_path / "out")


def test_an_output_that_exists(hub: Hub, bundle: Path) -> None:
    pushed(hub, bundle)
    with pytest.raises(BuildError, match="the output exists"):
        pull(NAME, bundle)


def test_a_hub_that_is_not_there(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(TransferError) as caught:
        pull(NAME, tmp_path / "out")
    assert str(caught.value).isprintable()


# --- signatures travel ----------------------------------------------------------------------------


def test_a_signature_travels_and_can_be_required(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    pair, other = write_pair(tmp_path / "keys"), write_pair(tmp_path / "keys", "other")
    pushed(hub, bundle)
    with pytest.raises(SignatureError, match="not signed"):
        pull(NAME, tmp_path / "out", verifier=PublicKey(pair.public))
    sign(bundle, PrivateKey(pair.private))
    push(bundle, NAME)
    with pytest.raises(LlamaExportError, match="another key"):
        pull(NAME, tmp_path / "out", verifier=PublicKey(other.public))
    assert not (tmp_path / "out").exists()
    pull(NAME, tmp_path / "out", verifier=PublicKey(pair.public))
    assert (tmp_path / "out" / SIGNATURE_NAME).exists()


def test_a_swapped_file_with_a_fitting_manifest_needs_the_signature(
    hub: Hub, bundle: Path, tmp_path: Path
) -> None:
    pair = write_pair(tmp_path / "keys")
    sign(bundle, PrivateKey(pair.private))
    contents = {**CONTENTS, "decode.pt2": b"evil"}
    evil = write_sample(tmp_path / "evil", contents=contents)
    (evil / SIGNATURE_NAME).write_bytes((bundle / SIGNATURE_NAME).read_bytes())
    push(evil, NAME)
    pull(NAME, tmp_path / "unsigned")
    with pytest.raises(SignatureError, match="changed since it was signed"):
        pull(NAME, tmp_path / "out", verifier=PublicKey(pair.public))
    assert json.loads((evil / FILE_NAME).read_text())["name"] == "tiny"
