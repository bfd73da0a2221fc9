"""`verify --signature`: whose signature is expected, and what is shown of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from llama_artifacts.signing import (
    Authority,
    Identity,
    PublicKey,
    Verifier,
    open_signed,
    signer_name,
)
from llama_export.cli import output
from llama_export.cli.options import F, option

SIGNATURE = "Signature"
EXAMPLE = "llama-export verify smollm2-135m --signature --public-key key.pub"
_FILE = click.Path(path_type=Path)


def options(command: F) -> F:
    """The options that say whose signature is expected."""
    decorators: tuple[Callable[[F], F], ...] = (
        option(
            "--signature",
            "is_signature",
            group=SIGNATURE,
            is_flag=True,
            show_default=False,
            help="Check the signature in the bundle, and that every file is as it was signed;"
            " needs one of the ways below to know the signer.",
        ),
        option(
            "--public-key",
            "--key",
            "public_key",
            group=SIGNATURE,
            type=_FILE,
            metavar="PEM",
            show_default="none",
            help="The signer's public key.",
        ),
        option(
            "--certificate-chain",
            "certificates",
            group=SIGNATURE,
            type=_FILE,
            multiple=True,
            metavar="PEM",
            show_default="none",
            help="Certificates that must vouch for the signer's; repeat it for several files.",
        ),
        option(
            "--identity",
            group=SIGNATURE,
            metavar="WHO",
            show_default="none",
            help="The signer's e-mail address or workflow, as Sigstore knows it (needs a network).",
        ),
        option(
            "--identity-provider",
            group=SIGNATURE,
            metavar="URL",
            show_default="none",
            help="Who vouches for --identity, such as https://token.actions.githubusercontent.com.",
        ),
        option(
            "--staging",
            "uses_staging",
            group=SIGNATURE,
            is_flag=True,
            show_default=False,
            help="Ask Sigstore's staging services instead, for tries.",
        ),
    )
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


def verifier(
    *,
    is_signature: bool,
    public_key: Path | None,
    certificates: tuple[Path, ...],
    identity: str | None,
    identity_provider: str | None,
    uses_staging: bool,
) -> Verifier | None:
    """Whose signature is expected; None without `--signature`.

    Raises:
        UsageError: none or several ways to know the signer, or one without `--signature`.
    """
    ways: list[Verifier] = []
    if public_key is not None:
        ways.append(PublicKey(public_key))
    if certificates:
        ways.append(Authority(certificates))
    if identity is not None and identity_provider is not None:
        ways.append(Identity(identity, identity_provider, uses_staging))
    if (identity is None) != (identity_provider is None):
        raise click.UsageError("`--identity` and `--identity-provider` need each other")
    if uses_staging and identity is None:
        raise click.UsageError("`--staging` needs `--identity`")
    if ways and not is_signature:
        raise click.UsageError("a signer is named: expected `--signature`, too")
    if not is_signature:
        return None
    if len(ways) != 1:
        raise click.UsageError(
            "expected one of `--public-key`, `--certificate-chain` and `--identity`,"
            f" got {len(ways) or 'none'}"
        )
    return ways[0]


def check(bundle: Path, verifier: Verifier, *, is_more: bool, as_json: bool) -> None:
    """Checks the signature and shows who signed what.

    Raises:
        UsageError: more is to be checked, too; those are two commands.
    """
    if is_more:
        raise click.UsageError("`--signature` is checked alone: run `verify` again for the rest")
    _, signature = open_signed(bundle, verifier)
    result: dict[str, Any] = {
        "bundle": str(bundle),
        "passed": True,
        "signature": {
            "kind": signature.kind,
            "signer": signer_name(signature),
            "files": len(signature.digests),
        },
    }
    if as_json:
        output.write_json(result)
        return
    rows = (
        ("signed by", signer_name(signature)),
        ("files", f"{len(signature.digests)}, each as it was signed"),
    )
    output.write_table(rows)
