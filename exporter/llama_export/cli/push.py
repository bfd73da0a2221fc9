"""`llama-export push`: a bundle to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

import click

from llama_artifacts.codec import encode
from llama_artifacts.summary import show_bytes
from llama_export.cli import output
from llama_export.cli.options import (
    Command,
    bundle_argument,
    checked_text,
    json_option,
    option,
)

EXAMPLES = (
    ("To a repository of yours:", "llama-export push smollm2-135m me/smollm2-135m-bundle"),
    (
        "A private one, on a branch:",
        "llama-export push smollm2-135m me/smollm2-135m-bundle --private --revision candidate",
    ),
)


@click.command(cls=Command, examples=EXAMPLES)
@bundle_argument
@click.argument("repository", metavar="OWNER/NAME")
@option(
    "--revision",
    callback=checked_text,
    metavar="BRANCH",
    show_default="the main branch",
    help="The branch to commit to; it is made if it is not there.",
)
@option(
    "--private",
    "is_private",
    is_flag=True,
    show_default=False,
    help="Make the repository private; refuse one that is there and public.",
)
@option(
    "--message",
    callback=checked_text,
    metavar="TEXT",
    show_default="the bundle's name",
    help="The message of the commit.",
)
@json_option
def command(
    *,
    bundle: Path,
    repository: str,
    revision: str | None,
    is_private: bool,
    message: str | None,
    as_json: bool,
) -> None:
    """Put a bundle on the Hugging Face hub.

    BUNDLE is the folder that `llama-export build` wrote; OWNER/NAME a model repository, which is
    made if it is not there.

    Every file is hashed first: a bundle that is damaged, or holds files that its manifest does not
    list, is refused. All of it comes in one commit, with the signature if there is one.

    Log in with `hf auth login` or set HF_TOKEN; HF_ENDPOINT names another hub.
    """
    from llama_export.transfer import push

    with output.waiting("pushing"):
        done = push(bundle, repository, revision=revision, is_private=is_private, message=message)
    if as_json:
        output.write_json(encode({**vars(done), "folder": str(done.folder)}))
        return
    rows = (
        ("pushed", f"{done.repository}@{done.revision}"),
        ("files", f"{done.files}, {show_bytes(done.bytes)}"),
    )
    output.write_table(rows)
