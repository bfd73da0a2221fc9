"""Signatures of bundles, through OpenSSF model-signing: made, and held against the files.

A signature lies in the bundle as `model.sig` and covers every other file, `manifest.json` among
them, by SHA-256 of its whole content. The folder's own name and place are not signed.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llama_artifacts import manifest_file, signature_file
from llama_artifacts.bundle import Bundle, check_digest, check_names, open_bundle, put_signature
from llama_artifacts.digests import sha256
from llama_artifacts.errors import IntegrityError, LlamaExportError, SignatureError
from llama_artifacts.extras import needs
from llama_artifacts.manifest import FILE_NAME, SIGNATURE_NAME
from llama_artifacts.signature_file import DAMAGED_HINT, Kind, SignatureFile
from llama_artifacts.strict_json import printable

_SHOWN: dict[Kind, str] = {
    "key": "a key",
    "certificate": "a certificate",
    "sigstore": "a Sigstore identity",
}
SIGN_HINT = "check the key, its password and certificate; Sigstore needs a network and a login"
VERIFY_HINT = (
    "is it the right key, certificate or identity? If so, get the bundle again from its signer"
)
CHANGED_HINT = (
    "`verify --record` and other commands that write into a bundle end its signature: sign it again"
    " after them; if none did, get the bundle again"
)


class Signer(Protocol):
    """What signs. `configure` takes model-signing's `signing.Config` and returns it."""

    def configure(self, config: Any) -> Any: ...


class Verifier(Protocol):
    """What a signature must come from; `configure` takes model-signing's `verifying.Config`."""

    @property
    def kind(self) -> Kind: ...

    def configure(self, config: Any) -> Any: ...


@dataclass(frozen=True)
class PrivateKey:
    """Signs with a PEM file's elliptic key (P-256, P-384 or P-521)."""

    path: Path
    password: bytes | None = None

    def configure(self, config: Any) -> Any:
        return config.use_elliptic_key_signer(private_key=self.path, password=self.password)


@dataclass(frozen=True)
class Certificate:
    """Signs with an unencrypted key whose certificate travels along, with those that issued it."""

    private_key: Path
    certificate: Path
    chain: tuple[Path, ...] = ()

    def configure(self, config: Any) -> Any:
        return config.use_certificate_signer(
            private_key=self.private_key,
            signing_certificate=self.certificate,
            # An empty chain is refused; the certificate once more says the same.
            certificate_chain=self.chain or (self.certificate,),
        )


@dataclass(frozen=True)
class Sigstore:
    """Signs as an OpenID Connect identity, through Sigstore's services on the network.

    Without a token, that of the CI job is taken, or else a browser asks.
    """

    identity_token: str | None = None
    uses_staging: bool = False

    def configure(self, config: Any) -> Any:
        return config.use_sigstore_signer(
            identity_token=self.identity_token,
            use_ambient_credentials=True,
            use_staging=self.uses_staging,
        )


@dataclass(frozen=True)
class PublicKey:
    """A signature must be by the private half of this PEM file's key."""

    path: Path
    kind: Kind = "key"

    def configure(self, config: Any) -> Any:
        return config.use_elliptic_key_verifier(public_key=self.path)


@dataclass(frozen=True)
class Authority:
    """A signature must be by a certificate that these PEM certificates vouch for."""

    certificates: tuple[Path, ...]
    kind: Kind = "certificate"

    def configure(self, config: Any) -> Any:
        return config.use_certificate_verifier(certificate_chain=self.certificates)


@dataclass(frozen=True)
class Identity:
    """A signature must be by this identity, as this OpenID Connect issuer vouched for it."""

    identity: str
    issuer: str
    uses_staging: bool = False
    kind: Kind = "sigstore"

    def configure(self, config: Any) -> Any:
        return config.use_sigstore_verifier(
            identity=self.identity, oidc_issuer=self.issuer, use_staging=self.uses_staging
        )


def sign(folder: Path, signer: Signer) -> SignatureFile:
    """Signs a bundle that is whole; an older signature is replaced.

    Raises:
        ManifestError, CompatibilityError: no bundle; or model-signing is not installed.
        IntegrityError: a file is missing, damaged or extra: it would be signed as if it belonged.
        SignatureError: the key or certificate cannot be used, or Sigstore refuses.
        BuildError: the folder cannot be written.
    """
    bundle = open_bundle(folder)
    check_names(bundle)
    with (
        tempfile.TemporaryDirectory() as scratch,
        _known_failures(folder, "cannot be signed", hint=SIGN_HINT),
    ):
        path = Path(scratch) / SIGNATURE_NAME
        config = signer.configure(_module("signing").Config())
        config.set_hashing_config(_hashing()).sign(folder, path)
        made = signature_file.read(path)
    for name, file in bundle.manifest.files.items():
        if made.digests.get(name) != file.sha256:
            message = "damaged: it has another digest than the manifest says"
            raise IntegrityError(message, where=bundle.path(name))
        if file.blocks:  # or a reader that compares these would take other bytes for signed ones
            check_digest(bundle, name)
    put_signature(folder, made.data)
    return signature_file.read(folder / SIGNATURE_NAME)


def open_signed(folder: Path, verifier: Verifier) -> tuple[Bundle, SignatureFile]:
    """Opens a bundle whose signature is good, every file of which is as it was signed.

    What holds afterwards: the manifest is the signed one, for it is parsed from the bytes that
    were hashed. Files are opened again by name when they are used. A runtime hashes a program
    again just before it loads it; weights are mapped without that. Whoever can write into the
    folder after the check can therefore change weights, so keep it from others.

    Raises:
        SignatureError: no signature, a damaged one, one by somebody else, by a certificate that is
            not valid today, or of other files than those that are here.
        ManifestError, IntegrityError, CompatibilityError: as `open_bundle`; or model-signing is
            not installed.
    """
    signature = signature_file.read(folder / SIGNATURE_NAME)
    if signature.kind != verifier.kind:
        expected, got = _SHOWN[verifier.kind], _SHOWN[signature.kind]
        message = f"expected a signature by {expected}, got one by {got}"
        raise SignatureError(message, where=signature.path, hint=VERIFY_HINT)
    with (
        tempfile.TemporaryDirectory() as scratch,
        _known_failures(signature.path, "is not good", hint=VERIFY_HINT),
    ):
        path = Path(scratch) / SIGNATURE_NAME
        path.write_bytes(signature.data)  # what was read above, not what is there by now
        config = verifier.configure(_module("verifying").Config())
        with _mismatch_named(folder, signature):
            config.set_hashing_config(_hashing()).verify(folder, path)
    if signature.kind == "certificate":
        _check_dates(signature)
    return _open(folder, signature), signature


def _open(folder: Path, signature: SignatureFile) -> Bundle:
    """The bundle by its signed manifest, which lists what was signed and nothing else."""
    bundle = open_bundle(folder)
    check_names(bundle)
    path = bundle.path(FILE_NAME)
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != signature.digests.get(FILE_NAME):
        raise SignatureError("changed since it was signed", where=path, hint=CHANGED_HINT)
    manifest = manifest_file.from_json(data, where=path)
    signed = {name: digest for name, digest in signature.digests.items() if name != FILE_NAME}
    listed = {name: file.sha256 for name, file in manifest.files.items()}
    if manifest != bundle.manifest or signed != listed:
        message = "the signature and the manifest do not list the same files"
        raise SignatureError(message, where=signature.path, hint=DAMAGED_HINT)
    return Bundle(folder, manifest)


def signer_name(signature: SignatureFile) -> str:
    """Who signed, for people: a certificate's subject; of a key, the digest of its PEM text."""
    if signature.key_digest is not None:
        return f"key sha256:{printable(signature.key_digest)}"
    with needs("sign"):
        x509 = importlib.import_module("cryptography.x509")
    subject = x509.load_der_x509_certificate(signature.certificates[0]).subject
    return f"{signature.kind} {printable(subject.rfc4514_string())}".rstrip()


def _module(name: str) -> Any:
    with needs("sign"):
        return importlib.import_module(f"model_signing.{name}")


def _hashing() -> Any:
    """Every file by its content, also behind a link, as in the hub's cache; git's files as well."""
    config = _module("hashing").Config().set_allow_symlinks(True)
    return config.set_ignored_paths(paths=[SIGNATURE_NAME], ignore_git_paths=False)


@contextmanager
def _mismatch_named(folder: Path, signature: SignatureFile) -> Iterator[None]:
    """The first file that differs, in place of the library's list of digests."""
    try:
        yield
    except ValueError as cause:
        if not str(cause).startswith("Signature mismatch"):
            raise
        raise _difference(folder, signature.digests) from cause


def _difference(folder: Path, digests: Mapping[str, str]) -> SignatureError:
    names = {path.name for path in folder.iterdir()} - {SIGNATURE_NAME}
    tests: tuple[tuple[str, Callable[[str], bool]], ...] = (
        ("was not there when it was signed", lambda name: name not in digests),
        ("missing, though it is signed", lambda name: name not in names),
        ("changed since it was signed", lambda name: sha256(folder / name) != digests[name]),
    )
    for message, is_so in tests:
        for name in sorted(names | set(digests)):
            if is_so(name):
                return SignatureError(message, where=folder / name, hint=CHANGED_HINT)
    return SignatureError("changed while it was checked", where=folder, hint="check it again")


def _check_dates(signature: SignatureFile) -> None:
    """Refuses certificates that are not valid today.

    model-signing holds the chain against the first day of the signer's certificate, and without a
    trusted time stamp nobody knows when a signature was made.
    """
    x509 = importlib.import_module("cryptography.x509")
    now = datetime.datetime.now(datetime.timezone.utc)
    for data in signature.certificates:
        certificate = x509.load_der_x509_certificate(data)
        first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if not first <= now <= last:
            raise SignatureError(
                f"expected a certificate that is valid today, got one from {first:%Y-%m-%d} to"
                f" {last:%Y-%m-%d}",
                where=signature.path,
                hint="have the bundle signed again with a valid certificate",
            )


@contextmanager
def _known_failures(where: Path, what: str, *, hint: str) -> Iterator[None]:
    """One line for what model-signing and the libraries below it raise.

    They have no base class in common, and raise plain errors for keys and signatures of the wrong
    form; what is here of ours passes unchanged.
    """
    _module("signing")
    crypto = importlib.import_module("cryptography.exceptions")
    openssl = importlib.import_module("OpenSSL.crypto")
    sigstore = importlib.import_module("sigstore.errors")
    oidc = importlib.import_module("sigstore.oidc")
    try:
        yield
    except LlamaExportError:
        raise
    except (
        *(sigstore.Error, oidc.IssuerError, oidc.ExpiredIdentity),
        *(openssl.X509StoreContextError, openssl.Error),
        *(crypto.InvalidSignature, crypto.UnsupportedAlgorithm),
        *(OSError, ValueError, TypeError, KeyError, IndexError, AttributeError),
    ) as cause:
        is_foreign = isinstance(cause, crypto.InvalidSignature) or "Key mismatch" in str(cause)
        reason = "by another key than expected, or altered" if is_foreign else _reason(cause)
        raise SignatureError(f"{what}: {reason}", where=where, hint=hint) from cause


def _reason(cause: BaseException) -> str:
    if isinstance(cause, OSError) and cause.filename is not None:
        return printable(f"{cause.filename}: {cause.strerror}")
    text = " ".join(str(cause).split())
    return printable(text) if text else type(cause).__name__
