"""A Hugging Face hub in memory: as much of its HTTP API as bundles need, on a local port."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

Files = dict[str, bytes]


@dataclass
class Repository:
    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Files] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: Files, message: str) -> str:
        text = repr((len(self.commits), sorted((name, _oid(data)) for name, data in files.items())))
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        self.messages.append(message)
        return sha

    def find(self, revision: str) -> str | None:
        sha = self.branches.get(revision, revision)
        return sha if sha in self.commits else None


@dataclass
class Hub:
    """What the hub holds, and how it misbehaves.

    Attributes:
        url: its endpoint.
        repositories: by `owner/name`.
        cuts: files each transfer of which ends after so many bytes.
        walls: files of which nothing beyond so many bytes arrives; there the connection ends,
            or where it `hangs`, stays silent.
        hangs: until when a transfer at its wall is silent; set: it ends at once.
        damages: files that arrive with their last byte changed.
        ignores_ranges: whole files are sent whatever was asked for.
        redirect: another hub's endpoint, which has the files' bytes; "": this one has.
        ranges: what was asked for of each file, in order: the `Range` header or "".
        tokens: the Authorization header of each such request.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    cuts: dict[str, int] = field(default_factory=dict)
    walls: dict[str, int] = field(default_factory=dict)
    hangs: threading.Event = field(default_factory=threading.Event)
    damages: set[str] = field(default_factory=set)
    ignores_ranges: bool = False
    redirect: str = ""
    ranges: dict[str, list[str]] = field(default_factory=dict)
    tokens: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hangs.set()

    def files(self, name: str, branch: str = "main") -> Files:
        repository = self.repositories[name]
        return repository.commits[repository.branches[branch]]


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub on a free port, until the block ends."""
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            hub.hangs.set()
            server.shutdown()
            thread.join()


def point_at(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes huggingface_hub in this process talk to that hub, as HF_ENDPOINT does in a new one."""
    path = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + path)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)


def wait_for_bytes(path: Path, num_bytes: int) -> None:
    """Until a file that another process writes has so many bytes."""
    end = time.monotonic() + 60
    while not path.exists() or path.stat().st_size < num_bytes:
        assert time.monotonic() < end, f"{path} did not grow to {num_bytes} bytes"
        threading.Event().wait(0.02)  # time.sleep may be patched


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._info(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            self._tree(match[1], match[2])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(match[1], match[2], match[3])
        else:
            self._json({"error": f"no route {path}"}, 404)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._json({"warnings": [], "errors": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/branch/(.+)", path):
            repository = self.hub.repositories[match[1]]
            repository.branches.setdefault(match[2], repository.branches["main"])
            self._json({})
        elif match := re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/(.+)", path):
            files = json.loads(body)["files"]
            modes = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in files
            ]
            self._json({"files": modes})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            self._commit(match[1], match[2], body)
        else:
            self._json({"error": f"no route {path}"}, 404)

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        if name in self.hub.repositories:
            self._json({"error": "it exists", "url": f"{self.hub.url}/{name}"}, 409)
            return
        is_private = wanted.get("private") or wanted.get("visibility") == "private"
        repository = Repository(private=bool(is_private))
        repository.commit("main", {".gitattributes": b""}, "initial commit")
        self.hub.repositories[name] = repository
        self._json({"url": f"{self.hub.url}/{name}", "name": name})

    def _info(self, name: str, revision: str) -> None:
        repository = self.hub.repositories.get(name)
        sha = repository.find(revision) if repository else None
        if repository is None or sha is None:
            self._not_found(has_repository=repository is not None)
            return
        siblings = [{"rfilename": path} for path in sorted(repository.commits[sha])]
        value = {"id": name, "sha": sha, "private": repository.private, "siblings": siblings}
        self._json({**value, "tags": [], "downloads": 0, "likes": 0})

    def _tree(self, name: str, revision: str) -> None:
        repository = self.hub.repositories[name]
        sha = repository.find(revision)
        assert sha is not None
        self._json(
            [
                {"type": "file", "path": path, "size": len(data), "oid": _oid(data)}
                for path, data in sorted(repository.commits[sha].items())
            ]
        )

    def _file(self, name: str, revision: str, path: str) -> None:
        repository = self.hub.repositories[name]
        sha = repository.find(revision)
        data = repository.commits[sha or ""][path]
        start = 0
        if self.command == "GET":
            asked = self.headers.get("Range", "")
            self.hub.ranges.setdefault(path, []).append(asked)
            self.hub.tokens.append(self.headers.get("Authorization"))
            if asked and not self.hub.ignores_ranges:
                start = int(asked.removeprefix("bytes=").rstrip("-"))
        etag = _oid(data)
        if path in self.hub.damages:
            data = data[:-1] + bytes([data[-1] ^ 1])
        self.send_response(302 if self.hub.redirect else 206 if start else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", sha or "")
        self.send_header("Accept-Ranges", "bytes")
        if self.hub.redirect:
            self.send_header("X-Linked-Size", str(len(data)))
            self.send_header("Location", f"{self.hub.redirect}{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            self._send(path, data, start)

    def _send(self, path: str, data: bytes, start: int) -> None:
        sent = data[start:]
        if path in self.hub.cuts:
            sent = sent[: self.hub.cuts[path]]
            self.close_connection = True
        if path in self.hub.walls:
            sent = data[start : self.hub.walls[path]]
            self.close_connection = True
        self.wfile.write(sent)
        if path in self.hub.walls:
            self.hub.hangs.wait(60)

    def _commit(self, name: str, branch: str, body: bytes) -> None:
        repository = self.hub.repositories[name]
        files, message = dict(repository.commits[repository.branches[branch]]), ""
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        sha = repository.commit(branch, files, message)
        url = f"{self.hub.url}/{name}/commit/{sha}"
        self._json({"success": True, "commitOid": sha, "commitUrl": url})

    def _not_found(self, *, has_repository: bool) -> None:
        code = "RevisionNotFound" if has_repository else "RepoNotFound"
        self._json({"error": code}, 404, {"X-Error-Code": code})

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for key, text in (headers or {}).items():
            self.send_header(key, text)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _oid(data: bytes) -> str:
    """What git calls a file of these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
