"""GatewayService over gRPC: each RPC becomes a call of the session registry with a RequestContext.

Nothing is decided here. The other direction too is only translation: events become messages of the stream, the
context's trailers become trailing metadata, and typed errors become statuses (`slipstream.rpc.status_interceptor`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from gateway.auth.api_keys import ApiKeys
from gateway.auth.tenant import check_operator
from gateway.request_context import RequestContext
from gateway.requests.validation import check_name
from gateway.routing.router import Router
from gateway.sessions.output_stream import Event
from gateway.sessions.registry import Send, SessionRegistry
from gateway.telemetry.trial import Trial
from gateway.text.tokenizer import Tokenizer
from slipstream.errors import NotFound
from slipstream.rpc.reflection import ReflectionService
from slipstream.rpc.server import HEALTH, service_of
from slipstream.rpc.status_interceptor import Authorise, Context
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc

FIELDS: dict[type[Event], str] = {
    gateway_pb2.Started: "started",
    gateway_pb2.Delta: "delta",
    gateway_pb2.Finished: "finished",
}
"""Fields of GenerateResponse and of ResumeResponse."""


class GatewayService(gateway_pb2_grpc.GatewayServiceServicer):
    def __init__(
        self, sessions: SessionRegistry, router: Router, tokenizer: Tokenizer, trial: Trial | None = None
    ) -> None:
        """`trial`: where an experiment runs."""
        self._sessions = sessions
        self._router = router
        self._tokenizer = tokenizer
        self._trial = trial

    def register(self, server: grpc.aio.Server) -> None:
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(self, server)
        described = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"]
        ReflectionService([described], others=[HEALTH]).register(server)

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: Context) -> None:
        # A client that disconnects cancels this call; `SessionRegistry._send_events` then stops the session.
        with _request_context(context) as called:
            await self._sessions.generate(request, called, _sender(context, gateway_pb2.GenerateResponse))

    async def Resume(self, request: gateway_pb2.ResumeRequest, context: Context) -> None:
        with _request_context(context) as called:
            await self._sessions.resume(request, called, _sender(context, gateway_pb2.ResumeResponse))

    async def Rollback(self, request: gateway_pb2.RollbackRequest, context: Context) -> gateway_pb2.RollbackResponse:
        return await self._sessions.roll_back(request)

    async def Cancel(self, request: gateway_pb2.CancelRequest, context: Context) -> gateway_pb2.CancelResponse:
        await self._sessions.cancel(request.session_id)
        return gateway_pb2.CancelResponse()

    async def GetSession(
        self, request: gateway_pb2.GetSessionRequest, context: Context
    ) -> gateway_pb2.GetSessionResponse:
        return await self._sessions.describe(request.session_id)

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: Context
    ) -> gateway_pb2.ListModelsResponse:
        return self._router.list_models()

    async def Tokenize(self, request: gateway_pb2.TokenizeRequest, context: Context) -> gateway_pb2.TokenizeResponse:
        check_name(request.model)
        self._router.model(request.model)
        return gateway_pb2.TokenizeResponse(token_ids=await self._tokenizer.encode(request.text))

    async def GetFleet(self, request: gateway_pb2.GetFleetRequest, context: Context) -> gateway_pb2.GetFleetResponse:
        check_operator()
        return gateway_pb2.GetFleetResponse(
            workers=self._router.describe_fleet(), sessions=self._sessions.open_sessions
        )

    async def GetExperiment(
        self, request: gateway_pb2.GetExperimentRequest, context: Context
    ) -> gateway_pb2.GetExperimentResponse:
        check_operator()
        if self._trial is None:
            raise NotFound("No experiment runs here; the operator sets GATEWAY_EXPERIMENT.", reason="NO_EXPERIMENT")
        return self._trial.results()


def authenticating(keys: ApiKeys) -> Authorise:
    """Names the caller of every RPC by its API key, but for health checks, whose senders have none."""

    async def authenticate(method: str, context: Context) -> None:
        if service_of(method) != HEALTH:
            await keys.authenticate(as_request_context(context))

    return authenticate


def as_request_context(context: Context) -> RequestContext:
    metadata = context.invocation_metadata() or ()
    headers = [(key, value) for key, value in metadata if isinstance(value, str)]
    return RequestContext(headers, context.peer())


@contextmanager
def _request_context(context: Context) -> Iterator[RequestContext]:
    called = as_request_context(context)
    try:
        yield called
    finally:
        if called.trailers:
            context.set_trailing_metadata(tuple(called.trailers.items()))


def _sender(context: Context, response: Callable[..., Any]) -> Send:
    async def send(event: Event) -> None:
        await context.write(response(**{FIELDS[type(event)]: event}))

    return send
