"""GatewayService over gRPC: each RPC becomes a call of the session registry with a RequestContext.

Nothing is decided here. The other direction too is only translation: events become messages of the stream, the
context's trailers become trailing metadata, and typed errors become statuses (`slipstream.rpc.status_interceptor`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import grpc

from gateway.auth.api_keys import ApiKeys
from gateway.auth.tenant import Tenant, check_operator
from gateway.request_context import RequestContext
from gateway.requests.texts import Texts, texts_of_large
from gateway.requests.validation import check_name
from gateway.routing.router import Router
from gateway.sessions.output_stream import Event
from gateway.sessions.registry import Send, SessionRegistry
from gateway.store.measured import MeasuredStore
from gateway.telemetry.experiment_samples import ExperimentSamples
from gateway.text.large_message import put_together
from gateway.text.tokenizer import Tokenizer
from slipstream.errors import DeadlineExceeded, NotFound
from slipstream.rpc.channel import MAX_MESSAGE_BYTES
from slipstream.rpc.reflection import ReflectionService
from slipstream.rpc.server import HEALTH, service_of
from slipstream.rpc.status_interceptor import Authorise, Context, Parse, parse_at_once
from slipstream.tenants import PerTenant
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc

FIELDS: dict[type[Event], str] = {
    gateway_pb2.Started: "started",
    gateway_pb2.Delta: "delta",
    gateway_pb2.Finished: "finished",
}
"""Fields of GenerateResponse and of ResumeResponse."""


SMALL_BYTES = 65_536
"""Requests up to this size are parsed on the event loop, whatever they hold: 2 ms for as many items as fit."""
MOST_RECEIVED = 32
"""Single requests of a tenant that are received at a time: 130 MB of the largest, twice that while they are copied."""
RECEIVE_S = 60.0
_GENERATE = "/slipstream.v1.GatewayService/Generate"
AnyContext: TypeAlias = "Context | AuthenticatedCall"
"""The latter on a gateway with keys: see `authenticating`."""


class GatewayService(gateway_pb2_grpc.GatewayServiceServicer):
    def __init__(
        self,
        sessions: SessionRegistry,
        router: Router,
        tokenizer: Tokenizer,
        samples: ExperimentSamples | None = None,
        store: MeasuredStore | None = None,
    ) -> None:
        """`samples`: where an experiment runs. `store`: whose state is listed."""
        self._store = store
        self._sessions = sessions
        self._router = router
        self._tokenizer = tokenizer
        self._samples = samples

    def register(self, server: grpc.aio.Server) -> None:
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(self, server)
        described = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"]
        ReflectionService([described], others=[HEALTH]).register(server)

    async def read(
        self, method: str, parse: Parse | None, request: bytes, context: AnyContext
    ) -> tuple[Any, AnyContext]:
        """Parses a request, a large one beside the event loop. Raises DecodeError, and what `TenantWork.run` raises."""
        work = self._tokenizer.work
        if method != _GENERATE or len(request) <= SMALL_BYTES or work is None:
            return await parse_at_once(method, parse, request, context)
        call, most = _authenticated(context), self._router.longest or MAX_MESSAGE_BYTES
        large = put_together(await work.run(call.request.tenant, "message", request, most_ids=most))
        return large.rest, replace(call, texts=texts_of_large(self._tokenizer, large))

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: AnyContext) -> None:
        # A client that disconnects cancels this call; `SessionRegistry._send_events` then stops the session.
        with _call(context) as call:
            sender = call.sender(gateway_pb2.GenerateResponse)
            await self._sessions.generate(request, call.request, sender, texts=call.texts)

    async def Resume(self, request: gateway_pb2.ResumeRequest, context: AnyContext) -> None:
        with _call(context) as call:
            await self._sessions.resume(request, call.request, call.sender(gateway_pb2.ResumeResponse))

    async def Rollback(self, request: gateway_pb2.RollbackRequest, context: AnyContext) -> gateway_pb2.RollbackResponse:
        return await self._sessions.roll_back(request, _tenant(context))

    async def Cancel(self, request: gateway_pb2.CancelRequest, context: AnyContext) -> gateway_pb2.CancelResponse:
        await self._sessions.cancel(request.session_id, _tenant(context))
        return gateway_pb2.CancelResponse()

    async def GetSession(
        self, request: gateway_pb2.GetSessionRequest, context: AnyContext
    ) -> gateway_pb2.GetSessionResponse:
        return await self._sessions.describe(request.session_id, _tenant(context))

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: AnyContext
    ) -> gateway_pb2.ListModelsResponse:
        listed = self._router.list_models()
        for model in listed.models:
            model.sampling_defaults.CopyFrom(self._sessions.sampling_defaults)
        if self._store is not None:
            listed.store.kind, listed.store.answers = self._store.kind, await self._store.answers()
        return listed

    async def Tokenize(
        self, request: gateway_pb2.TokenizeRequest, context: AnyContext
    ) -> gateway_pb2.TokenizeResponse | bytes:
        check_name("model", request.model)
        self._router.model(request.model)
        return await self._tokenizer.tokenize_response(request.text, _tenant(context))

    async def GetFleet(self, request: gateway_pb2.GetFleetRequest, context: AnyContext) -> gateway_pb2.GetFleetResponse:
        check_operator(_tenant(context))
        return gateway_pb2.GetFleetResponse(
            workers=self._router.describe_fleet(), sessions=self._sessions.open_sessions
        )

    async def GetExperiment(
        self, request: gateway_pb2.GetExperimentRequest, context: AnyContext
    ) -> gateway_pb2.GetExperimentResponse:
        check_operator(_tenant(context))
        if self._samples is None:
            raise NotFound("No experiment runs here; the operator sets GATEWAY_EXPERIMENT.", reason="NO_EXPERIMENT")
        return self._samples.results()


@dataclass(frozen=True, slots=True)
class AuthenticatedCall:
    """A call and whose it is: what the handlers of a gateway with keys are called with; without keys they make it."""

    context: Context
    request: RequestContext
    texts: Texts | None = None
    """Texts that were taken out of a large request."""

    def sender(self, response: Callable[..., Any]) -> Send:
        """Sends events as this message of the call's stream."""

        async def send(event: Event) -> None:
            await self.context.write(response(**{FIELDS[type(event)]: event}))

        return send


def authenticating(keys: ApiKeys) -> Authorise:
    """Finds the tenant of every RPC by its API key, but for health checks, whose senders have none."""

    async def authenticate(method: str, context: Context) -> AnyContext:
        if service_of(method) == HEALTH:
            return context
        request = as_request_context(context)
        return AuthenticatedCall(context, replace(request, tenant=await keys.authenticate(request)))

    return authenticate


class ReceivedRequests:
    """Bounds by tenant what single requests hold while they come in: MOST_RECEIVED of them are received at a time, each
    within RECEIVE_S. Without keys there are no tenants, and no bound."""

    def __init__(self) -> None:
        self._places = PerTenant(lambda: asyncio.Semaphore(MOST_RECEIVED))

    @asynccontextmanager
    async def __call__(self, context: AnyContext) -> AsyncIterator[None]:
        """Raises DeadlineExceeded for a request that has not come, or had no place, in time."""
        if not isinstance(context, AuthenticatedCall):
            yield
            return
        try:
            async with asyncio.timeout(RECEIVE_S), self._places[context.request.tenant.name]:
                yield
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the request did not come within {RECEIVE_S:g} s; send fewer large ones at a time.",
                reason="REQUEST_TIMEOUT",
            ) from error


def as_request_context(context: Context) -> RequestContext:
    metadata = context.invocation_metadata() or ()
    headers = [(key, value) for key, value in metadata if isinstance(value, str)]
    return RequestContext(headers, context.peer())


def _authenticated(context: AnyContext) -> AuthenticatedCall:
    """The call itself; on a gateway without keys it is that of OPEN."""
    if isinstance(context, AuthenticatedCall):
        return context
    return AuthenticatedCall(context, as_request_context(context))


def _tenant(context: AnyContext) -> Tenant:
    return _authenticated(context).request.tenant


@contextmanager
def _call(context: AnyContext) -> Iterator[AuthenticatedCall]:
    """The call; at its end what came into its trailers is sent."""
    call = _authenticated(context)
    try:
        yield call
    finally:
        if call.request.trailers:
            call.context.set_trailing_metadata(tuple(call.request.trailers.items()))
