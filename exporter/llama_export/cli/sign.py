"""`llama-export sign`: puts a signature into a bundle."""

from __future__ import annotations

from pathlib import Path

import click

from llama_artifacts.errors import SignatureError
from llama_artifacts.signing import Certificate, PrivateKey, Signer, Sigstore, sign, signer_name
from llama_export.cli import output
from llama_export.cli.options import Command, bundle_argument, json_option, option

EXAMPLES = (
    ("A pair of keys:", "openssl ecparam -name prime256v1 -genkey -noout -out key.pem"),
    ("Its public half, for those who check:", "openssl ec -in key.pem -pubout -out key.pub"),
    ("Sign with it:", "llama-export sign smollm2-135m --private-key key.pem"),
    ("In a CI job with an identity, without a key:", "llama-export sign smollm2-135m --sigstore"),
    ("Check it:", "llama-export verify smollm2-135m --signature --public-key key.pub"),
)
KEY, SIGSTORE = "With a key", "With an identity"
_FILE = click.Path(path_type=Path)


@click.command(cls=Command, examples=EXAMPLES)
@bundle_argument
@option(
    "--private-key",
    "--key",
    "private_key",
    group=KEY,
    type=_FILE,
    metavar="PEM",
    show_default="none",
    help="An elliptic key: P-256, P-384 or P-521.",
)
@option(
    "--password-file",
    group=KEY,
    type=_FILE,
    metavar="FILE",
    show_default="the key is not encrypted",
    help="A file whose first line is the key's password.",
)
@option(
    "--certificate",
    group=KEY,
    type=_FILE,
    metavar="PEM",
    show_default="none",
    help="The key's certificate, which then travels in the signature.",
)
@option(
    "--certificate-chain",
    "chain",
    group=KEY,
    type=_FILE,
    multiple=True,
    metavar="PEM",
    show_default="none",
    help="Certificates between that one and an authority; repeat it for several files.",
)
@option(
    "--sigstore",
    "uses_sigstore",
    group=SIGSTORE,
    is_flag=True,
    show_default=False,
    help="Sign through Sigstore: as the CI job's identity, else as whoever logs in with a browser.",
)
@option(
    "--identity-token",
    group=SIGSTORE,
    envvar="LLAMA_EXPORT_IDENTITY_TOKEN",
    metavar="TOKEN",
    show_default="$LLAMA_EXPORT_IDENTITY_TOKEN",
    help="An OpenID Connect token to sign with.",
)
@option(
    "--staging",
    "uses_staging",
    group=SIGSTORE,
    is_flag=True,
    show_default=False,
    help="Use Sigstore's staging services, for tries.",
)
@json_option
def command(
    *,
    bundle: Path,
    private_key: Path | None,
    password_file: Path | None,
    certificate: Path | None,
    chain: tuple[Path, ...],
    uses_sigstore: bool,
    identity_token: str | None,
    uses_staging: bool,
    as_json: bool,
) -> None:
    """Sign a bundle.

    BUNDLE is the folder that `llama-export build` wrote.

    The signature goes into the bundle as model.sig, in the format of OpenSSF model-signing, and
    covers every other file. It ends when a file changes: also by `verify --record`. Signing again
    replaces it. A bundle that is damaged, or holds files that its manifest does not list, is not
    signed.

    Needs `pip install 'llama-export[sign]'`.
    """
    if (private_key is None) != uses_sigstore:
        raise click.UsageError("expected one of `--private-key` and `--sigstore`")
    if uses_sigstore:
        if certificate is not None or password_file is not None or chain:
            raise click.UsageError("certificates and passwords need `--private-key`")
        signer: Signer = Sigstore(identity_token, uses_staging)
    else:
        assert private_key is not None
        if uses_staging:
            raise click.UsageError("`--staging` needs `--sigstore`")
        signer = _key_signer(private_key, password_file, certificate, chain)
    with output.waiting("hashing"):
        made = sign(bundle, signer)
    if as_json:
        output.write_json(
            {
                "bundle": str(bundle),
                "signature": str(made.path),
                "kind": made.kind,
                "signer": signer_name(made),
                "files": len(made.digests),
            }
        )
        return
    rows = (
        ("signature", str(made.path)),
        ("signed by", signer_name(made)),
        ("files", f"{len(made.digests)}"),
    )
    output.write_table(rows)


def _key_signer(
    key: Path, password_file: Path | None, certificate: Path | None, chain: tuple[Path, ...]
) -> Signer:
    if certificate is None:
        if chain:
            raise click.UsageError("`--certificate-chain` needs `--certificate`")
        return PrivateKey(key, None if password_file is None else _password(password_file))
    if password_file is not None:
        raise click.UsageError("with `--certificate` the key must not be encrypted")
    return Certificate(key, certificate, chain)


def _password(path: Path) -> bytes:
    try:
        return path.read_bytes().split(b"\n")[0].removesuffix(b"\r")
    except OSError as cause:
        raise SignatureError(f"cannot be read: {cause.strerror}", where=path) from cause
