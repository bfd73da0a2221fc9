"""`llama-export serve`: an HTTP server with OpenAI's API over a bundle."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import click

from llama_artifacts.extras import needs
from llama_artifacts.manifest import FORMATS, Format
from llama_runtime.cli import output, ranks, signals
from llama_runtime.cli.options import (
    Command,
    bundle_argument,
    checked_text,
    option,
    weights_dir_option,
)

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
SERVER, BATCH, PROGRAM = "Server", "Batch", "Program"
MEBIBYTE = 1 << 20


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
    "--pages",
    group=BATCH,
    type=click.IntRange(min=1),
    metavar="N",
    show_default="enough for every row, up to 2 GiB",
    help="Pages of the pool, which all requests share.",
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
@option(
    "--format",
    group=PROGRAM,
    type=click.Choice(FORMATS),
    show_default="the best that fits this machine",
    help="The format to run.",
)
@option(
    "--device",
    group=PROGRAM,
    default="cpu",
    metavar="DEVICE",
    help="`cpu`, `cuda`, or one GPU such as `cuda:1`.",
)
@option(
    "--threads",
    group=PROGRAM,
    type=click.IntRange(min=1),
    metavar="N",
    show_default="one per core",
    help="CPU threads.",
)
@option(
    "--no-native",
    group=PROGRAM,
    is_flag=True,
    show_default=False,
    help="Refuse compiled programs (aoti): they are code, and run with your rights.",
)
@ranks.timeout_option(group=PROGRAM)
@weights_dir_option
@option(
    "--require-signature",
    group=PROGRAM,
    type=click.Path(path_type=Path),
    metavar="KEY",
    show_default="unsigned bundles run, too",
    help="Refuse a bundle that is not signed by this public key (a PEM file), or that changed since.",
)
def command(
    *,
    bundle: Path,
    host: str,
    further_hosts: tuple[str, ...],
    port: int,
    api_key: str | None,
    max_queue: int,
    max_body: int,
    grace: int,
    rows: int | None,
    format: Format | None,
    device: str,
    threads: int | None,
    no_native: bool,
    weights_dir: Path | None,
    require_signature: Path | None,
    timeout: float,
    **batch: Any,
) -> None:
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
    if api_key == "":
        raise click.UsageError("expected a key after `--api-key`, got none")
    with needs("serve"):
        from llama_runtime.server.app import Limits
        from llama_runtime.server.hosts import allowed_hosts, is_loopback
        from llama_runtime.server.run import Address, bind, make_app, num_rows, run, url

    with ranks.joined(device, timeout) as group, contextlib.ExitStack() as held:
        # Before anything is loaded, since the port may be in use.
        sock = (
            None
            if ranks.is_follower()
            else held.enter_context(contextlib.closing(bind(Address(host, port))))
        )
        with output.waiting("loading"):
            loaded = group.load(
                bundle,
                device=device,
                format=format,
                threads=threads,
                allow_native=not no_native,
                weights_dir=weights_dir,
                require_signature=require_signature,
            )
            if loaded is None or sock is None:
                return
            from llama_runtime.engine import Engine

            engine = Engine(loaded, rows=rows, **batch)
            hosts = allowed_hosts(sock, host, further_hosts)
            limits = Limits(num_rows(loaded, rows), max_queue, max_body * MEBIBYTE, api_key, hosts)
            app, worker = make_app(loaded, engine, limits)
        if api_key is None and not is_loopback(sock):
            output.tell(f"note: {host} is open to other machines, and no --api-key is asked for")
        text = f"serving {loaded.manifest.name} at {url(sock)}"
        with signals.left_to_command():
            run(
                app,
                worker,
                sock,
                grace_s=grace,
                at_start=lambda: output.tell(text),
                fault=group.fault,
            )
        if (fault := group.fault()) is not None:
            raise fault
