"""Routes for operators: `/health`, `/ping`, `/ready`, `/load`, `/version` and `/metrics`."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from gateway.api.http.dependencies import HttpDependencies
from gateway.api.http.entry import context_of
from gateway.auth.tenant import check_operator
from slipstream.telemetry.metrics_server import metrics_page
from slipstream.version import running_version


def routes(parts: HttpDependencies) -> APIRouter:
    router = APIRouter(tags=["operations"])
    one_page = asyncio.Lock()

    @router.get("/health")
    async def health() -> dict[str, str]:
        """The process answers; needs no key."""
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> JSONResponse:
        """200 while a verifier can serve, once the session store has answered, else 503; needs no key."""
        serves = parts.router.ready and parts.store.answered.is_set()
        return JSONResponse({"ready": serves}, 200 if serves else 503)

    @router.get("/ping")
    @router.post("/ping", include_in_schema=False)
    async def ping() -> dict[str, str]:
        """The process answers, as managed platforms ask; needs no key."""
        return {"status": "ok"}

    @router.get("/load")
    async def load(request: Request) -> dict[str, int]:
        """Sessions that run on this gateway; where there are API keys, for an operator's key."""
        check_operator(context_of(request.scope).tenant)
        return {"server_load": parts.sessions.open_sessions}

    @router.get("/version")
    async def version() -> dict[str, str]:
        """The version of this gateway."""
        return {"version": running_version()}

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """The gateway's metrics for Prometheus; where there are API keys, for an operator's key."""
        context = context_of(request.scope)
        check_operator(context.tenant)
        async with one_page:
            parts.metrics.read()
            kind, page = await asyncio.to_thread(metrics_page, parts.metrics, context.header("accept"))
        return Response(page, headers={"content-type": kind})

    return router
