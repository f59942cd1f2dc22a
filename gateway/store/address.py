"""The address of a Redis store: one server, a primary behind sentinels, or a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from slipstream.errors import InvalidArgument

SINGLE = ("redis", "rediss", "unix")
SENTINEL, CLUSTER = "+sentinel", "+cluster"
PORTS = {SENTINEL: 26379, CLUSTER: 6379}


@dataclass(frozen=True, slots=True)
class Address:
    """A single server has its `url` only, and no `hosts`."""

    url: str
    """redis://, rediss:// (TLS) or unix:// of one server: user, password, database and options hold for all."""
    hosts: tuple[tuple[str, int], ...] = ()
    """The sentinels, or the cluster's nodes to begin with."""
    primary: str = ""
    """The primary's name at the sentinels; empty for a cluster."""

    @property
    def cluster(self) -> bool:
        return bool(self.hosts) and not self.primary


def parse(text: str) -> Address:
    """Read `redis://HOST:PORT/DB`, `redis+sentinel://HOST:PORT,HOST:PORT/PRIMARY/DB` or
    `redis+cluster://HOST:PORT,HOST:PORT`; `rediss` for TLS; `USER:PASSWORD@` before the hosts, `?options` at the end.

    Raises InvalidArgument.
    """
    split = _split(text)
    scheme = split.scheme.partition("+")[0]
    kind = split.scheme.removeprefix(scheme)
    if split.scheme in SINGLE:
        return Address(text)
    if scheme not in ("redis", "rediss") or kind not in PORTS:
        raise refusal(f"{split.scheme!r} is no scheme of a store")
    user, at, names = split.netloc.rpartition("@")
    hosts = tuple(_host(name, PORTS[kind]) for name in names.split(","))
    primary, _, database = split.path.strip("/").partition("/")
    if (kind == SENTINEL) != bool(primary):
        raise refusal("a sentinel address names its primary after the hosts, a cluster has nothing there")
    if not (database or "0").isdecimal():
        raise refusal(f"{database!r} is no number of a database")
    query = f"?{split.query}" if split.query else ""
    return Address(f"{scheme}://{user}{at}localhost/{database or 0}{query}", hosts, primary)


def _split(text: str) -> SplitResult:
    try:
        split = urlsplit(text)
        if split.scheme in SINGLE:
            _ = split.port  # raises for what is none
    except ValueError:  # its text may quote a part of the password
        raise refusal("host or port cannot be read; a password's / @ : and # must be escaped") from None
    return split


def _host(name: str, port: int) -> tuple[str, int]:
    host, colon, number = name.rpartition(":")
    if not colon or name.endswith("]"):  # the colons of an IPv6 address
        host, number = name, str(port)
    if not host or not number.isdecimal() or int(number) > 65_535:
        raise refusal(f"{name!r} is no HOST:PORT")
    return host.strip("[]"), int(number)


def refusal(what: str) -> InvalidArgument:
    return InvalidArgument(
        f"GATEWAY_STORE: {what}; choose memory, redis://HOST:PORT/DB, redis+sentinel://HOST:PORT,.../PRIMARY/DB or "
        "redis+cluster://HOST:PORT,... (rediss for TLS)."
    )
