"""Elliptic keys and certificates, made on the spot."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

NOW = datetime.datetime.now(datetime.timezone.utc)
DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """The two PEM files of a key."""

    private: Path
    public: Path


def write_pair(folder: Path, name: str = "key", *, password: bytes | None = None) -> Pair:
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.pub")
    pair.private.write_bytes(_private(key, password))
    pair.public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return pair


@dataclass(frozen=True)
class Issued:
    """A key, its certificate, and the authority that issued it: PEM files."""

    private: Path
    certificate: Path
    authority: Path


def write_certificate(
    folder: Path,
    *,
    first: datetime.datetime = NOW - DAY,
    last: datetime.datetime = NOW + DAY,
    can_sign: bool = True,
) -> Issued:
    folder.mkdir(parents=True, exist_ok=True)
    root, leaf = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root_name, leaf_name = _name("a test authority"), _name("a test signer")
    span = (NOW - 100 * DAY, NOW + 100 * DAY)
    authority = _certificate(root_name, root_name, root, root, span, is_authority=True)
    certificate = _certificate(leaf_name, root_name, leaf, root, (first, last), can_sign=can_sign)
    issued = Issued(folder / "leaf.pem", folder / "leaf.crt", folder / "root.crt")
    issued.private.write_bytes(_private(leaf, None))
    issued.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    issued.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    return issued


def _private(key: ec.EllipticCurvePrivateKey, password: bytes | None) -> bytes:
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password is not None:
        encryption = serialization.BestAvailableEncryption(password)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    span: tuple[datetime.datetime, datetime.datetime],
    *,
    is_authority: bool = False,
    can_sign: bool = True,
) -> x509.Certificate:
    usage = x509.KeyUsage(
        digital_signature=can_sign,
        content_commitment=not can_sign,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(span[0])
        .not_valid_after(span[1])
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(signer, hashes.SHA256())
    )
