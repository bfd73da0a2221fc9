"""`llama-export serve`: an HTTP server with OpenAI's API over a bundle."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from llama_artifacts.extras import needs
from llama_runtime.cli import output, ranks, signals
from llama_runtime.cli.options import (
    Command,
    LoadOptions,
    bundle_argument,
    checked_text,
    device_option,
    format_option,
    native_option,
    option,
    signature_option,
    take,
    threads_option,
    timeout_option,
    weights_dir_option,
)

if TYPE_CHECKING:
    from fastapi import FastAPI

    from llama_runtime import LoadedBundle
    from llama_runtime.cli.ranks import Ranks
    from llama_runtime.server.worker import Worker

KEY_VARIABLE = "LLAMA_EXPORT_API_KEY"
ASK = (
    "curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json'"
    ' -d \'{"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Hello!"}]}\''
)
EXAMPLES = (
    ("On this machine alone:", "llama-export serve serving"),
    (
        "Ask it:",
        ASK,
    ),
    (
        "For other machines, with a key:",
        f"{KEY_VARIABLE}=... llama-export serve serving --host 0.0.0.0",
    ),
    (
        "Two processes, each with half of the weights, for a bundle built with --shards 2:",
        "torchrun --standalone --nproc-per-node 2 -m llama_runtime serve sharded",
    ),
)
SERVER, BATCH = "Server", "Batch"
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class ServerOptions:
    """The options of the group `Server`."""

    host: str
    further_hosts: tuple[str, ...]
    port: int
    api_key: str | None
    max_queue: int
    max_body: int
    grace: int


@click.command(cls=Command, examples=EXAMPLES)
@bundle_argument
@option(
    "--host",
    group=SERVER,
    default="127.0.0.1",
    metavar="HOST",
    help="The address to listen on; 0.0.0.0 lets other machines in.",
)
@option(
    "--allow-host",
    "further_hosts",
    group=SERVER,
    multiple=True,
    metavar="NAME",
    show_default="names of this machine where only it gets in, else any",
    help="A name by which clients may call, too, such as that of a proxy; repeat it for several.",
)
@option(
    "--port",
    group=SERVER,
    type=click.IntRange(0, 65535),
    default=8000,
    metavar="PORT",
    help="The port; 0 takes a free one.",
)
@option(
    "--api-key",
    group=SERVER,
    callback=checked_text,
    envvar=KEY_VARIABLE,
    metavar="KEY",
    show_default="no key",
    help=f"Ask for this key. Others may see a command's options: better set {KEY_VARIABLE}.",
)
@option(
    "--max-queue",
    group=SERVER,
    type=click.IntRange(min=0),
    default=256,
    metavar="N",
    help="Requests that may wait for a row; more are answered with 429.",
)
@option(
    "--max-body",
    group=SERVER,
    type=click.IntRange(1, 1024),
    default=8,
    metavar="MIB",
    help="The largest request, in MiB; more are answered with 413.",
)
@option(
    "--grace",
    group=SERVER,
    type=click.IntRange(min=0),
    default=30,
    metavar="SECONDS",
    help="How long open requests may go on after SIGTERM or Ctrl-C; then they fail.",
)
@option(
    "--rows",
    group=BATCH,
    type=click.IntRange(min=1),
    metavar="N",
    show_default="the most that the programs take",
    help="Requests that run at the same time.",
)
@option(
    "--pool-pages",
    "pages",
    group=BATCH,
    type=click.IntRange(min=1),
    metavar="N",
    show_default="enough for every row, up to 2 GiB",
    help="Pages of the pool, which all requests share, page 0 aside.",
)
@option(
    "--token-budget",
    group=BATCH,
    type=click.IntRange(min=1),
    default=512,
    metavar="N",
    help="Tokens of prompts in one step: fewer keep the steps short, more read prompts faster.",
)
@option(
    "--prefix-cache/--no-prefix-cache",
    "has_prefix_cache",
    group=BATCH,
    default=True,
    help="Keep pages for prompts that begin alike.",
)
@format_option
@device_option
@threads_option
@native_option
@timeout_option
@weights_dir_option
@signature_option
def command(**values: Any) -> None:
    """Serve a bundle over HTTP, with the API of OpenAI.

    BUNDLE is the folder that `llama-export build` wrote, with the paged programs
    (`--entry serving`).

    /v1/completions, /v1/chat/completions and /v1/models do what OpenAI's clients expect, with
    streams; what is not supported is refused. / is a page to watch and to chat, /health and
    /metrics (Prometheus) are for machines. The first SIGTERM or Ctrl-C lets open requests finish,
    a second Ctrl-C drops them.

    A bundle built with `--shards N` is served by N processes, which torchrun starts; see the
    examples. It cuts them off 30 seconds after a signal, unless its --shutdown-timeout says more.

    Needs `pip install 'llama-export[serve]'`.
    """
    server, loading = take(ServerOptions, values), take(LoadOptions, values)
    if server.api_key == "":
        raise click.UsageError("expected a key after `--api-key`, got none")
    with needs("serve"):
        from llama_runtime.server.run import Address, bind

    with ranks.joined(loading.device, loading.timeout) as group, contextlib.ExitStack() as held:
        sock = None
        if not ranks.is_follower():  # before anything is loaded, since the port may be in use
            sock = held.enter_context(contextlib.closing(bind(Address(server.host, server.port))))
        with output.waiting("loading"):
            loaded = group.load(loading.bundle, **loading.settings())
            if loaded is None or sock is None:
                return
            app, worker = _make_app(loaded, sock, server, values)
        _tell_who_gets_in(sock, server)
        _serve(app, worker, sock, grace_s=server.grace, name=loaded.manifest.name, group=group)


def _make_app(
    loaded: LoadedBundle, sock: socket.socket, server: ServerOptions, batch: dict[str, Any]
) -> tuple[FastAPI, Worker]:
    from llama_runtime.engine import Engine
    from llama_runtime.server.app import Limits
    from llama_runtime.server.hosts import allowed_hosts
    from llama_runtime.server.run import make_app, num_rows

    engine = Engine(loaded, **batch)
    limits = Limits(
        num_rows(loaded, batch["rows"]),
        server.max_queue,
        server.max_body * MEBIBYTE,
        server.api_key,
        allowed_hosts(sock, server.host, server.further_hosts),
    )
    return make_app(loaded, engine, limits)


def _tell_who_gets_in(sock: socket.socket, server: ServerOptions) -> None:
    from llama_runtime.server.hosts import is_loopback

    if server.api_key is None and not is_loopback(sock):
        output.tell(f"note: {server.host} is open to other machines, and no --api-key is asked for")


def _serve(
    app: FastAPI, worker: Worker, sock: socket.socket, *, grace_s: int, name: str, group: Ranks
) -> None:
    """Runs the server to its end; what failed first in the group is raised."""
    from llama_runtime.server.run import run, url

    text = f"serving {name} at {url(sock)}"
    with signals.left_to_command():
        run(
            app,
            worker,
            sock,
            grace_s=grace_s,
            at_start=lambda: output.tell(text),
            fault=group.fault,
        )
    if (fault := group.fault()) is not None:
        raise fault
