"""One call of a client, as the application code of a gateway sees it, whatever protocol the call came by.

The protocol's own code (`gateway.api`) builds a RequestContext and sends its trailers. Imports `auth`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.auth.tenant import OPEN, Tenant


@dataclass(frozen=True, slots=True)
class RequestContext:
    headers: Sequence[tuple[str, str]] = ()
    """Names in lower case, and values; binary metadata is left out."""
    peer: str = ""
    """Address of the client, in the form that gRPC writes it: `ipv4:HOST:PORT` or `ipv6:[HOST]:PORT`."""
    tenant: Tenant = OPEN
    """Whose call it is."""
    http_method: str = ""
    """Empty, as `http_route` is, for calls that do not come by HTTP."""
    http_route: str = ""
    """The path of its route, with the names of its parameters: `/v1/responses/{name}`."""
    trailers: dict[str, str] = field(default_factory=dict)
    """Metadata that is sent after the answer or the error: filled in while the request is served."""

    def header(self, name: str) -> str:
        """The value of a header that was sent exactly once; empty for none and for several."""
        found = [value for key, value in self.headers if key == name]
        return found[0] if len(found) == 1 else ""
