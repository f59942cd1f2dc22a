"""Routes for operators: `/health`, `/ping`, `/ready`, `/load`, `/version`, `/metrics`, and all routes at `/docs` and
`/openapi.json`."""

from __future__ import annotations

import asyncio
import html
import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from gateway.api.http.dependencies import HttpDependencies
from gateway.api.http.entry import context_of
from gateway.auth.tenant import check_operator
from slipstream.telemetry.metrics_server import metrics_page
from slipstream.version import running_version


def routes(parts: HttpDependencies) -> APIRouter:
    router = APIRouter(tags=["operations"])
    one_page, documents = asyncio.Lock(), _documents_once()

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

    @router.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        page, _ = await documents(request.app)
        return HTMLResponse(page)

    @router.get("/openapi.json", include_in_schema=False)
    async def schema(request: Request) -> Response:
        _, document = await documents(request.app)
        return Response(document, media_type="application/json")

    return router


def _documents_once() -> Callable[[FastAPI], Awaitable[tuple[bytes, bytes]]]:
    """A function that returns the page and the schema. They are made when they are first asked for, on a thread: that
    takes 0.2 s."""
    one_at_a_time = asyncio.Lock()
    made: list[tuple[bytes, bytes]] = []

    async def documents(app: FastAPI) -> tuple[bytes, bytes]:
        async with one_at_a_time:
            if not made:
                made.append(await asyncio.to_thread(_documents, app))
        return made[0]

    return documents


def _documents(app: FastAPI) -> tuple[bytes, bytes]:
    schema = app.openapi()
    return _page(schema).encode(), json.dumps(schema, ensure_ascii=False).encode()


def _page(schema: dict[str, Any]) -> str:
    """A page without scripts: nothing is fetched from elsewhere."""
    rows = "".join(
        f"<tr><td>{method.upper()}</td><td><code>{html.escape(path)}</code></td>"
        f"<td>{html.escape(operation.get('description', ''))}</td></tr>"
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Slipstream</title><h1>Slipstream</h1>'
        f'<p>The schema is at <a href="/openapi.json">/openapi.json</a>.</p><table>{rows}</table></html>'
    )
