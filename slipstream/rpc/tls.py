"""TLS between the roles: certificates from a folder, read again when they change.

A certificate names the roles that its holder may play, as DNS names ROLE.DOMAIN such as `gateway.slipstream`. The
dialling end demands the name of the role that it wants to reach, whatever its host; the serving end looks up in
`slipstream.rpc.server.ALLOWED_ROLES` which roles may call what. The folder is what Kubernetes makes of a secret of
cert-manager: tls.crt, tls.key, ca.crt.
"""

from __future__ import annotations

import logging
import ssl
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from slipstream.config import from_env
from slipstream.errors import InvalidArgument
from slipstream.telemetry.log_once import LogOnce

log = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """The TLS settings of every role (`SLIPSTREAM_TLS_*`)."""

    folder: str = ""
    """Holds tls.crt, tls.key and ca.crt; empty: plaintext, for one machine or a network that is trusted."""
    domain: str = "slipstream"
    """Suffix behind the role in the names of certificates: deployments that share a CA differ in it."""


@dataclass(frozen=True, slots=True)
class Material:
    """PEM, as it was in the files at one moment."""

    key: bytes
    chain: bytes
    authorities: bytes
    """CA certificates that may sign the peer's certificate; empty where peers need none."""


class Certificates:
    """The certificates in one folder. The constructor raises InvalidArgument if it cannot be used; later, the last good
    state stays."""

    def __init__(self, folder: str, *, domain: str = "", authorities: bool = True) -> None:
        self.domain = domain
        names = ("tls.crt", "tls.key", "ca.crt") if authorities else ("tls.crt", "tls.key")
        self._files = tuple(Path(folder) / name for name in names)
        self._complaint = LogOnce(log, logging.WARNING)
        self._lock = threading.Lock()  # gRPC calls `current` on threads of its own
        try:
            self._stamp = self._stamped()
            self._material = self._read()
        except (OSError, ValueError) as error:
            wanted = ", ".join(names)
            raise InvalidArgument(f"the TLS folder {folder} cannot be used: {error}; it must hold {wanted}.") from error

    def current(self) -> Material:
        """The present files: one object for as long as they are unchanged. Never raises."""
        folder = self._files[0].parent
        with self._lock:
            try:
                stamp = self._stamped()
                if stamp != self._stamp:
                    material = self._read()
                    if self._stamped() == stamp:  # else they are being replaced just now: next time
                        self._stamp, self._material = stamp, material
                        log.info("the certificates in %s changed and are in use", folder)
                self._complaint.log_recovery(f"the certificates in {folder} can be read again")
            except (OSError, ValueError) as error:
                self._complaint.log_problem(f"the certificates in {folder} cannot be read, the former stay: {error}")
            return self._material

    def server_context(self) -> ssl.SSLContext:
        """A context of Python's own TLS with the present material, for servers of other protocols than gRPC."""
        material = self.current()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        with tempfile.NamedTemporaryFile() as file:  # it reads files only; readable for this process alone
            file.write(material.key + b"\n" + material.chain)
            file.flush()
            context.load_cert_chain(file.name, password=_no_password)
        return context

    def _stamped(self) -> Stamp:
        found = (path.stat() for path in self._files)
        return tuple((status.st_mtime_ns, status.st_ino, status.st_size) for status in found)

    def _read(self) -> Material:
        """Raises OSError (SSLError is one) for files that are missing, no PEM, or do not belong together."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._files[0], self._files[1], password=_no_password)
        if len(self._files) > 2:
            context.load_verify_locations(self._files[2])
        chain, key, *authorities = (path.read_bytes() for path in self._files)
        return Material(key, chain, b"".join(authorities))


def certificates_from_env(environ: Mapping[str, str] | None = None) -> Certificates | None:
    """The certificates that SLIPSTREAM_TLS_* names; None where no folder is set. Raises InvalidArgument."""
    config = from_env(TlsConfig, "SLIPSTREAM_TLS_", environ)
    return Certificates(config.folder, domain=config.domain) if config.folder else None


def server_credentials(certificates: Certificates, *, ask_clients: bool) -> grpc.ServerCredentials:
    """Every handshake uses the files as they are then. `ask_clients`: a client without a certificate is refused."""
    used = certificates.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        present = certificates.current()
        if present is used:
            return None  # unchanged: gRPC keeps what it has
        used = present
        return _configuration(present)

    first = _configuration(used)
    return grpc.dynamic_ssl_server_credentials(first, fetch, ask_clients)  # type: ignore[arg-type]  # None is allowed


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(material.authorities, material.key, material.chain)


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.chain)], material.authorities or None)


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one without a password")
