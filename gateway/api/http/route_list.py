"""The list of all routes: `/docs` for people, `/openapi.json` for programs."""

from __future__ import annotations

import asyncio
import html
import json
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import HTMLResponse, Response

from gateway.api.http.dependencies import HttpDependencies


def routes(_: HttpDependencies) -> APIRouter:
    router = APIRouter()
    documents = _Documents()

    @router.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        return HTMLResponse((await documents.of(request.app))[0])

    @router.get("/openapi.json", include_in_schema=False)
    async def schema(request: Request) -> Response:
        return Response((await documents.of(request.app))[1], media_type="application/json")

    return router


class _Documents:
    """Page and schema, made when they are first asked for, on a thread: that takes 0.2 s."""

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        self._made: tuple[bytes, bytes] | None = None

    async def of(self, app: FastAPI) -> tuple[bytes, bytes]:
        async with self._one_at_a_time:
            if self._made is None:
                self._made = await asyncio.to_thread(_make, app)
            return self._made


def _make(app: FastAPI) -> tuple[bytes, bytes]:
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
