"""`llama-export pull`: a bundle from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

import click

from llama_artifacts.codec import encode
from llama_artifacts.signing import PublicKey
from llama_artifacts.summary import show_bytes
from llama_export.cli import output
from llama_export.cli.options import Command, json_option, option

EXAMPLES = (
    ("The newest:", "llama-export pull me/smollm2-135m-bundle"),
    (
        "One commit, signed by a key:",
        "llama-export pull me/smollm2-135m-bundle@3f2a1b0 -o bundle --require-signature key.pub",
    ),
)


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("repository", metavar="OWNER/NAME[@REVISION]")
@option(
    "--output",
    "-o",
    "target",
    type=click.Path(path_type=Path),
    metavar="DIR",
    show_default="the repository's name, here",
    help="The folder to write; it must not exist yet.",
)
@option(
    "--require-signature",
    "key",
    type=click.Path(path_type=Path),
    metavar="KEY",
    show_default="unsigned bundles are taken, too",
    help="Refuse a bundle that is not signed by this public key (a PEM file).",
)
@json_option
def command(*, repository: str, target: Path | None, key: Path | None, as_json: bool) -> None:
    """Get a bundle from the Hugging Face hub.

    OWNER/NAME is a model repository that `llama-export push` filled; REVISION a branch, a tag or a
    commit.

    Every file is fetched from one commit and hashed before the folder appears. A connection that
    breaks is resumed; a pull that was stopped goes on where it was when it is run again.

    Log in with `hf auth login` or set HF_TOKEN; HF_ENDPOINT names another hub.
    """
    from llama_export.transfer import pull

    with output.waiting("pulling"):
        done = pull(repository, target, verifier=None if key is None else PublicKey(key))
    if as_json:
        output.write_json(encode({**vars(done), "folder": str(done.folder)}))
        return
    rows = (
        ("folder", f"{done.folder}"),
        ("pulled", f"{done.repository}@{done.revision}"),
        ("files", f"{done.files}, {show_bytes(done.bytes)}"),
    )
    output.write_table(rows)
