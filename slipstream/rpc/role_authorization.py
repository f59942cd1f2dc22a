"""Which role may call what, told by its certificate. What is not in the table nobody may call."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.errors import PermissionDenied
from slipstream.rpc.server import HEALTH, AccessControl
from slipstream.rpc.status_interceptor import Authorise, Context
from slipstream.rpc.tls import Certificates, server_credentials

DRAFTER, VERIFIER, GATEWAY = "drafter", "verifier", "gateway"

CALLERS: Mapping[str, frozenset[str]] = {
    "slipstream.v1.VerifierService": frozenset({GATEWAY}),
    "slipstream.v1.DrafterService": frozenset({VERIFIER}),
    "slipstream.v1.WorkerService": frozenset({GATEWAY, VERIFIER}),
    HEALTH: frozenset({DRAFTER, VERIFIER, GATEWAY}),
}
"""The gateway's own service is not among them: its port is for clients, who have API keys (`gateway.auth.api_keys`)."""


def between_roles(certificates: Certificates | None) -> AccessControl:
    """Of a port that only other roles may use; open where no certificates are configured."""
    if certificates is None:
        return AccessControl()
    return AccessControl(server_credentials(certificates, ask_clients=True), by_role(certificates.domain))


def by_role(domain: str) -> Authorise:
    """Asks the certificate. A holder of several roles may do what any of them may."""

    def authorise(method: str, context: Context) -> None:
        allowed = CALLERS.get(service_of(method), frozenset())
        names = {name.decode(errors="replace") for name in context.auth_context().get("peer_dns", ())}
        if names.isdisjoint(f"{role}.{domain}" for role in allowed):
            wanted = " or ".join(f"{role}.{domain}" for role in sorted(allowed)) or "nobody"
            raise PermissionDenied(
                f"{method} is for {wanted}; the caller's certificate names {', '.join(sorted(names)) or 'no role'}.",
                reason="ROLE",
            )

    return authorise


def service_of(method: str) -> str:
    """`/package.Service/Method` -> `package.Service`."""
    return method.strip("/").partition("/")[0]
