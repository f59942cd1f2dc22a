"""GatewayService: the public face of sessions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from gateway.admission import Admission, Plan, RandomBits, check_name
from gateway.log import Scribe, SessionLog
from gateway.rounds import Ledger
from gateway.session import Session, Stage
from gateway.store import SessionStore
from gateway.store.record import Record, refusal
from gateway.tenant import asked_of, caller
from gateway.tokenizer import Tokenizer
from gateway.transcript import Transcript
from slipstream.errors import Unavailable
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2

Context = grpc.aio.ServicerContext[Any, Any]
MAX_ID_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Chance:
    """Time and randomness, so that tests can choose them."""

    random_bits: RandomBits
    clock: Callable[[], float] = time.monotonic


class GatewayService(gateway_pb2_grpc.GatewayServiceServicer):
    def __init__(
        self, stage: Stage, tokenizer: Tokenizer, store: SessionStore, scribe: Scribe | None, chance: Chance
    ) -> None:
        self._stage = stage
        self._tokenizer = tokenizer
        self._store = store
        self._scribe = scribe
        self._chance = chance
        self._admission = Admission(stage.config, stage.router, tokenizer, chance.random_bits)
        self._sessions: dict[str, Session] = {}
        self._requests = 0
        """Sessions and requests that may become one."""

    def register(self, server: grpc.aio.Server) -> None:
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(self, server)

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: Context) -> None:
        """Writes by itself instead of yielding: when the client leaves, the session hears of it where it waits."""
        arrived_at = self._chance.clock()
        self._requests += 1
        try:
            plan = await self._admission.plan(request, self._requests - 1)
            grant = caller().admit(len(plan.prompt), plan.max_length - len(plan.prompt))
            session = self._session(plan, arrived_at)
            self._sessions[session.id] = session
            try:
                await session.run(context.write)
            finally:
                grant.end(session.output_tokens)
                del self._sessions[session.id]
        finally:
            self._requests -= 1

    async def Cancel(self, request: gateway_pb2.CancelRequest, context: Context) -> gateway_pb2.CancelResponse:
        session = self._sessions.get(request.session_id)
        if session is not None and session.owner == caller().name:
            session.cancel()
            return gateway_pb2.CancelResponse()
        record = await self._read(request.session_id)
        if not record.outcome:
            raise Unavailable("Another gateway runs this session; retry there.", reason="OTHER_GATEWAY")
        return gateway_pb2.CancelResponse()

    async def GetSession(
        self, request: gateway_pb2.GetSessionRequest, context: Context
    ) -> gateway_pb2.GetSessionResponse:
        record = await self._read(request.session_id)
        asked = asked_of(record)
        finished = gateway_pb2.Finished.FromString(record.outcome)
        running = self._sessions.get(record.id)
        return gateway_pb2.GetSessionResponse(
            key=types_pb2.SessionKey(id=record.id, epoch=record.epoch),
            model=asked.model,
            seed=asked.sampling.seed,
            prompt_token_ids=record.tokens[: record.prompt_length],
            output_token_ids=record.tokens[record.prompt_length :],
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

    def _session(self, plan: Plan, arrived_at: float) -> Session:
        name = f"{self._chance.random_bits(128):032x}"
        record = Record(name, 1, plan.params(), len(plan.prompt), plan.prompt)
        log = SessionLog(self._store, record, scribe=self._scribe, grace_s=self._stage.config.store_grace_s)
        transcript = Transcript(self._tokenizer.detokenizer(), plan.stops)
        ledger = Ledger(self._chance.clock, arrived_at, plan.max_draft_tokens > 0, self._stage.router.predicts)
        return Session(name, plan, self._stage, log, transcript, ledger)

    async def _read(self, session: str) -> Record:
        if not 1 <= len(session) <= MAX_ID_LENGTH:
            raise refusal("MISSING", session[:MAX_ID_LENGTH], 0, 0)
        record = await self._store.read(session)
        asked_of(record)  # raises where it is another's
        return record
