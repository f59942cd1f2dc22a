"""`/playground`: the page with its scripts and styles, which are files of this package, and the fleet's state; `/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from google.protobuf.json_format import MessageToDict
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from gateway.api.http.dependencies import HttpDependencies
from gateway.api.http.entry import context_of
from gateway.auth.tenant import check_operator
from slipstream.rpc.server import Server
from slipstream.v1 import gateway_pb2

GRPC_PORT = b"GRPC_PORT"
"""Stands in the page for the port of the gateway's gRPC server."""
PAGE = Path(__file__).parent / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing runs but the page's own files, and no other page may frame it."""
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {"content-security-policy": POLICY, "referrer-policy": "no-referrer"}


def routes(parts: HttpDependencies) -> APIRouter:
    router = APIRouter(tags=["playground"])

    @router.get("/", include_in_schema=False)
    async def root(request: Request) -> Response:
        """A browser is led to the page. Others get 200: clouds' balancers check the health of `/` unless they are
        configured, and take a redirection for a fault."""
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/playground")
        return PlainTextResponse("Slipstream. /ready says whether it serves, /docs lists its routes.\n")

    @router.get("/playground/fleet")
    async def fleet(request: Request) -> dict[str, Any]:
        """A GetFleetResponse; where there are API keys, for an operator's key."""
        check_operator(context_of(request.scope).tenant)
        state = gateway_pb2.GetFleetResponse(
            workers=parts.router.describe_fleet(), sessions=parts.sessions.open_sessions
        )
        return MessageToDict(state, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)

    for file in sorted(PAGE.iterdir()):
        path = "/playground" if file.suffix == ".html" else f"/playground/{file.name}"
        router.add_api_route(path, _serving(file, parts.grpc), include_in_schema=False)
    return router


def _serving(file: Path, grpc: Server) -> Any:
    """A handler that answers with the file as it was when the gateway started. The page gets the port of `grpc`, which
    is open by then."""
    content, kind = file.read_bytes(), TYPES[file.suffix]

    async def serve() -> Response:
        port = grpc.address.rpartition(":")[2].encode()
        return Response(content.replace(GRPC_PORT, port), headers={"content-type": kind, **HEADERS})

    return serve
