"""GatewayService: the public face of sessions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import grpc

from gateway.auth.tenant import asked_of, check_operator
from gateway.requests.validation import check_name
from gateway.sessions.context import GatewayContext
from gateway.sessions.outcome import finished_of, output_of
from gateway.sessions.output_stream import Event
from gateway.sessions.registry import SessionRegistry
from gateway.telemetry.tracing import RequestTrace, traced
from gateway.text.tokenizer import Tokenizer
from slipstream.errors import NotFound
from slipstream.telemetry import spans
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2

Context = grpc.aio.ServicerContext[Any, Any]
FIELDS: dict[type[Event], str] = {
    gateway_pb2.Started: "started",
    gateway_pb2.Delta: "delta",
    gateway_pb2.Finished: "finished",
}
"""Of GenerateResponse and of ResumeResponse."""


class GatewayService(gateway_pb2_grpc.GatewayServiceServicer):
    def __init__(self, stage: GatewayContext, tokenizer: Tokenizer, sessions: SessionRegistry) -> None:
        self._stage = stage
        self._tokenizer = tokenizer
        self._sessions = sessions

    def register(self, server: grpc.aio.Server) -> None:
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(self, server)

    # Streams are written instead of yielded: when a client leaves, its story hears of it at once.

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: Context) -> None:
        with traced(self._stage.tracing, spans.GENERATE, context) as trace:
            if trace is not None:
                trace.asks(request)
            with self._stage.meters.admitting():
                story = await self._sessions.begin(request)
            await _tell(story.follow(), context, gateway_pb2.GenerateResponse, trace)

    async def Resume(self, request: gateway_pb2.ResumeRequest, context: Context) -> None:
        with traced(self._stage.tracing, spans.RESUME, context) as trace:
            characters = request.characters if request.HasField("characters") else None
            revision = request.revision if request.HasField("revision") else None
            story = await self._sessions.resume(request.session_id, revision)
            said = story.follow(request.offset, characters, revision)
            await _tell(said, context, gateway_pb2.ResumeResponse, trace)

    async def Rollback(self, request: gateway_pb2.RollbackRequest, context: Context) -> gateway_pb2.RollbackResponse:
        return await self._sessions.roll_back(request)

    async def Cancel(self, request: gateway_pb2.CancelRequest, context: Context) -> gateway_pb2.CancelResponse:
        await self._sessions.cancel(request.session_id)
        return gateway_pb2.CancelResponse()

    async def GetSession(
        self, request: gateway_pb2.GetSessionRequest, context: Context
    ) -> gateway_pb2.GetSessionResponse:
        record = await self._sessions.read(request.session_id)
        asked = asked_of(record)
        finished = finished_of(record)
        running = self._sessions.running(record.id)
        return gateway_pb2.GetSessionResponse(
            key=types_pb2.SessionKey(id=record.id, epoch=record.epoch),
            model=asked.model,
            seed=asked.sampling.seed,
            prompt_token_ids=record.tokens[: record.prompt_length],
            output_token_ids=output_of(record),
            finish_reason=finished.reason,
            statistics=running.ledger.statistics() if running and not record.outcome else finished.statistics,
        )

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: Context
    ) -> gateway_pb2.ListModelsResponse:
        return self._stage.router.served()

    async def Tokenize(self, request: gateway_pb2.TokenizeRequest, context: Context) -> gateway_pb2.TokenizeResponse:
        check_name(request.model)
        self._stage.router.model(request.model)
        return gateway_pb2.TokenizeResponse(token_ids=await self._tokenizer.encode(request.text))

    async def GetExperiment(
        self, request: gateway_pb2.GetExperimentRequest, context: Context
    ) -> gateway_pb2.GetExperimentResponse:
        check_operator()
        if self._stage.trial is None:
            raise NotFound("No experiment runs here; the operator sets GATEWAY_EXPERIMENT.", reason="NO_EXPERIMENT")
        return self._stage.trial.told()


async def _tell(
    said: AsyncGenerator[Event, None], context: Context, response: Callable[..., Any], trace: RequestTrace | None
) -> None:
    async with aclosing(said) as events:
        async for event in events:
            if trace is not None:
                trace.saw(event)
            await context.write(response(**{FIELDS[type(event)]: event}))
