"""`/playground`: the page with its scripts and styles, which are files of this package, and the fleet's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from gateway.api.http.parts import HttpParts
from gateway.auth.tenant import check_operator

PAGE = Path(__file__).parent / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing runs but the page's own files, and nobody may frame it."""
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {"content-security-policy": POLICY, "referrer-policy": "no-referrer"}


def routes(parts: HttpParts) -> APIRouter:
    router = APIRouter(tags=["playground"])

    @router.get("/playground/fleet")
    async def fleet() -> dict[str, Any]:
        """Verifiers, drafters and sessions; where there are API keys, for an operator's key."""
        check_operator()
        return fleet_state(parts)

    for file in sorted(PAGE.iterdir()):
        path = "/playground" if file.suffix == ".html" else f"/playground/{file.name}"
        router.add_api_route(path, _serving(file), include_in_schema=False)
    return router


def _serving(file: Path) -> Any:
    """A handler that answers with the file as it is now."""
    content, kind = file.read_bytes(), TYPES[file.suffix]

    async def serve() -> Response:
        return Response(content, headers={"content-type": kind, **HEADERS})

    return serve


def fleet_state(parts: HttpParts) -> dict[str, Any]:
    """The workers as the gateway knows them."""
    router = parts.router
    verifiers = [
        {
            "address": verifier.address,
            "model": verifier.model.name if verifier.model else "",
            "ready": verifier.ready,
            "draining": verifier.load.draining,
            "sessions": verifier.sessions,
            "waiting": verifier.load.waiting,
            "kv_blocks_total": verifier.load.kv_blocks_total,
            "kv_blocks_free": verifier.load.kv_blocks_free,
            "preemptions": verifier.load.preemptions,
        }
        for verifier in router.verifiers
    ]
    now = router.clock()
    drafters = [
        {
            "name": drafter.pool,
            "address": drafter.address,
            "method": drafter.method,
            "present": drafter.present,
            "draining": drafter.draining,
            "sessions": drafter.sessions,
            "breaker": drafter.breaker.state(now).name.lower(),
        }
        for drafter in router.drafters
    ]
    return {"sessions": parts.sessions.count, "ready": router.ready, "verifiers": verifiers, "drafters": drafters}
