"""A certificate authority for tests: keys and certificates made on the spot, in the folders that roles read."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Authority:
    def __init__(self, name: str = "test CA") -> None:
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        basic = x509.BasicConstraints(ca=True, path_length=None)
        builder = self._builder(self._name, self._key, DAY).add_extension(basic, critical=True)
        self.pem = builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM)

    def issue(self, folder: Path, *names: str, lasts: datetime.timedelta = DAY) -> Path:
        """Writes tls.crt, tls.key and ca.crt for a holder of these DNS names, one after the other."""
        folder.mkdir(exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a worker")])
        alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
        builder = self._builder(subject, key, lasts).add_extension(alternatives, critical=False)
        (folder / "tls.crt").write_bytes(builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM))
        (folder / "tls.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        (folder / "ca.crt").write_bytes(self.pem)
        return folder

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, lasts: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
        return builder.not_valid_before(now - 2 * DAY).not_valid_after(now + lasts)
