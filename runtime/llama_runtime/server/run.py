"""Starts the server over a loaded bundle, and ends it without losing a request unanswered."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from llama_artifacts.errors import InputError
from llama_runtime.engine import Engine
from llama_runtime.loader import LoadedBundle, load
from llama_runtime.server.app import Limits, create_app
from llama_runtime.server.hosts import host_names
from llama_runtime.server.jobs import Served
from llama_runtime.server.worker import Worker

PAGED = ("prefill_paged", "decode_paged", "step_paged")
_AFTER_GRACE_SECONDS = 5.0  # for the answers that say so to leave the machine


@dataclass(frozen=True)
class Address:
    """Where to listen: a name or address of this machine, and a port (0 takes a free one)."""

    host: str
    port: int


def num_rows(bundle: LoadedBundle, rows: int | None) -> int:
    """How many requests the engine runs at the same time: what was asked for, or all that it can."""
    if rows is not None:
        return rows
    names = [name for name in PAGED if name in bundle.manifest.entries()]
    return min(bundle.entry(name).signature.dim("Rows").max for name in names)


def make_app(bundle: LoadedBundle, engine: Engine, limits: Limits) -> tuple[FastAPI, Worker]:
    """The application over an engine, which belongs to its worker from then on.

    Raises:
        TokenizerError, IntegrityError: the bundle's tokenizer cannot be read.
    """
    manifest = bundle.manifest
    served = Served(
        name=manifest.name,
        tokenizer=None if manifest.tokenizer is None else bundle.tokenizer,
        vocab_size=manifest.model.vocab_size,
        stop_tokens=frozenset(manifest.stop_tokens),
        capacity=manifest.max_seq,
        created=int(time.time()),
    )
    worker = Worker(engine, max_open=limits.num_rows + limits.max_queue)
    return create_app(served, worker, limits), worker


def open_app(
    folder: str,
    *,
    device: str = "cpu",
    threads: int | None = None,
    rows: int | None = None,
    pages: int | None = None,
    token_budget: int = 512,
    max_queue: int = 256,
    max_body_bytes: int = 8 * 2**20,
    api_key: str | None = None,
    hosts: str | Sequence[str] | None = None,
) -> FastAPI:
    """The application over a bundle's folder, for servers other than this one (`serve_ray`).

    With `hosts`, calls by other names are refused, which those of a server on 127.0.0.1 should be.

    Raises:
        LlamaExportError: the bundle cannot be loaded or served.
    """
    loaded = load(folder, device=device, threads=threads)
    engine = Engine(loaded, rows=rows, pages=pages, token_budget=token_budget)
    names = None if hosts is None else host_names([hosts] if isinstance(hosts, str) else hosts)
    limits = Limits(num_rows(loaded, rows), max_queue, max_body_bytes, api_key, names)
    return make_app(loaded, engine, limits)[0]


def bind(address: Address) -> socket.socket:
    """A socket at the address; connections are refused until `run` listens.

    Raises:
        InputError: the address is not one of this machine's, or is in use.
    """
    place = f"{address.host}:{address.port}"
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(found[0], found[1])
    except OSError as cause:
        raise _cannot_listen(place, cause) from cause
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(found[4])
    except OSError as cause:
        sock.close()
        raise _cannot_listen(place, cause) from cause
    return sock


def _cannot_listen(place: str, cause: OSError) -> InputError:
    message = f"cannot listen: {cause.strerror or cause}"
    return InputError(message, where=place, hint="choose another --host or --port")


def url(sock: socket.socket) -> str:
    """The address of such a socket for a browser on this machine."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(
    app: FastAPI,
    worker: Worker,
    sock: socket.socket,
    *,
    grace_s: float,
    at_start: Callable[[], None] = lambda: None,
    fault: Callable[[], Exception | None] = lambda: None,
) -> None:
    """Serves until a signal (SIGINT, SIGTERM) ends it; a second SIGINT drops what is open.

    Args:
        app: the application.
        worker: its worker.
        sock: one of `bind`.
        grace_s: seconds that open requests get to end by themselves, after which they fail.
        at_start: called when requests are accepted.
        fault: asked now and then; where there is one, open requests fail with it, and serving ends.
    """
    Server(app, worker, grace_s=grace_s, at_start=at_start, fault=fault).run(sockets=[sock])


class Server(uvicorn.Server):
    """Uvicorn, which at its end lets requests finish for a while, and then fails them."""

    def __init__(
        self,
        app: FastAPI,
        worker: Worker,
        *,
        grace_s: float,
        at_start: Callable[[], None],
        fault: Callable[[], Exception | None] = lambda: None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="on",
                timeout_graceful_shutdown=int(grace_s + _AFTER_GRACE_SECONDS),
            )
        )
        self._worker = worker
        self._grace_s = grace_s
        self._at_start = at_start
        self._fault = fault

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._at_start()

    async def on_tick(self, counter: int) -> bool:
        is_ending = await super().on_tick(counter)
        if (fault := self._fault()) is not None:
            self._worker.fail_all(str(fault))
            return True
        return is_ending

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._worker.refuse_new()
        end = asyncio.get_running_loop().call_later(self._grace_s, self._worker.fail_all)
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()
