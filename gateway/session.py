"""The life of a session, as one coroutine: open on a verifier, take rounds, log, show, and end for one good reason."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gateway.admission import Plan
from gateway.config import GatewayConfig
from gateway.crew import Crew
from gateway.log import SessionLog
from gateway.rounds import Ledger
from gateway.routing import Router
from gateway.seat import End, News, Seat
from gateway.transcript import Transcript
from gateway.verifiers import Verifier
from slipstream import wire
from slipstream.errors import ResourceExhausted, SlipstreamError, Unavailable
from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2
from slipstream.v1.verifier_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
    FinishReason,
)

Deliver = Callable[[gateway_pb2.GenerateResponse], Awaitable[None]]
"""Hands an event to the client and waits while the client is slow; so a slow client spends no more credit."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What all sessions share."""

    config: GatewayConfig
    router: Router


class Session:
    def __init__(
        self, name: str, plan: Plan, stage: Stage, log: SessionLog, transcript: Transcript, ledger: Ledger
    ) -> None:
        self.id = name
        self.owner = plan.owner
        self.ledger = ledger
        self._plan = plan
        self._router = stage.router
        self._config = stage.config
        self._log = log
        self._transcript = transcript
        self._crew = Crew(plan, stage.router)
        self._output: list[int] = []
        self._verifier: Verifier | None = None
        self._seat: Seat | None = None
        self._opened = False
        self._avoid: set[Verifier] = set()
        """Verifiers that failed this session or had no room for it: others come first."""
        self._cancelled = False

    @property
    def output_tokens(self) -> int:
        return len(self._output)

    def cancel(self) -> None:
        """End soon; KV on the verifier is free at once."""
        self._cancelled = True
        if self._seat is not None:
            self._seat.close()
            self._seat.end(End(FINISH_REASON_CANCELLED))
        self._router.changed()

    async def run(self, deliver: Deliver) -> None:
        """From the first write of the record to the last. Raises what the client must be told as a status."""
        await self._log.create()
        finished = gateway_pb2.Finished(reason=FINISH_REASON_ERROR)
        try:
            await deliver(self._started())
            reason = await self._decode(deliver)
            finished = await self._conclude(reason, deliver)
        except asyncio.CancelledError:  # the client is gone or out of time
            finished.reason = FINISH_REASON_CANCELLED
            raise
        finally:
            self._leave()
            self._crew.disband()
            await self._record(finished)
        await deliver(gateway_pb2.GenerateResponse(finished=finished))

    async def _decode(self, deliver: Deliver) -> FinishReason:
        """Take rounds, on one verifier after the other if need be, until there is a reason to end."""
        while not self._cancelled:
            seat = self._seat or await self._settle()
            if seat is None:
                continue
            news = await self._hear(seat)
            self._crew.learn(news)
            if self._crew.look(self._length, hurry=bool(news.events)):
                seat.attach(self._crew.addresses)
            await self._show(news.rounds, seat, deliver)
            if self._transcript.stop:
                return FINISH_REASON_STOP
            if news.end is not None and (reason := self._weigh(news.end)):
                return reason
        return FINISH_REASON_CANCELLED

    async def _settle(self) -> Seat | None:
        """A seat on the best verifier; waits for one, but not for ever. None when there is a reason to look again."""
        if self._opened:  # whatever the former verifier still says is of the past
            await self._log.raise_epoch()
            self.ledger.rehomed += 1
        self._opened = True
        try:
            async with asyncio.timeout(self._config.rehoming_wait_s):
                while (verifier := self._place()) is None:
                    await self._router.news()
                    if self._cancelled:
                        return None
        except TimeoutError as error:
            raise Unavailable("No verifier is ready for this model; retry.", reason="NO_VERIFIER") from error
        seat = verifier.seat()
        self._verifier, self._seat = verifier, seat
        self._crew.moved()
        self._crew.look(self._length, hurry=True)
        try:
            seat.open(self._opening())
        except SlipstreamError as error:
            seat.end(End(FINISH_REASON_ERROR, error))
        return seat

    def _place(self) -> Verifier | None:
        model = self._plan.model.name
        return self._router.place(model, self._avoid) or self._router.place(model)

    async def _hear(self, seat: Seat) -> News:
        """What the verifier says next. A verifier that takes no steps meanwhile is stuck, and given up."""
        while True:
            steps = self._verifier.steps if self._verifier else 0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.stall_s):
                    return await seat.take()
            if self._verifier is None or self._verifier.steps == steps:
                seat.end(End(FINISH_REASON_ERROR, Unavailable("The verifier is stuck.", reason="STUCK")))
            await self._log.append(())  # renews the lease

    async def _show(self, rounds: list[verifier_pb2.Round], seat: Seat, deliver: Deliver) -> None:
        """Log first, then show: what a client saw is never taken back by a fault."""
        for done in rounds:
            self.ledger.add(done)
        tokens = [token for done in rounds for token in done.token_ids]
        if not tokens:
            return
        await self._log.append(tokens)
        offset = len(self._output)
        self._output += tokens
        text = self._transcript.push(tokens)
        if self._transcript.stop:
            tokens = tokens[: max(0, self._transcript.carrying() - offset)]
        if tokens or text:
            await deliver(_delta(offset, tokens, text))
        seat.credit(len(self._output) - offset)

    def _weigh(self, end: End) -> FinishReason:
        """The reason to end, or UNSPECIFIED when the session is to be opened again. Raises what cannot be mended."""
        if end.error is None:
            return end.reason
        if reason := self._complete():  # only the news of the end was lost
            return reason
        if self._verifier is not None:
            self._avoid.add(self._verifier)
        self._leave()
        mendable = isinstance(end.error, (Unavailable, ResourceExhausted))
        if not mendable or self.ledger.rehomed >= self._config.rehomings:
            raise end.error
        if isinstance(end.error, ResourceExhausted) and not self._router.place(self._plan.model.name, self._avoid):
            raise end.error  # waiting in line is the client's choice
        return FINISH_REASON_UNSPECIFIED

    @property
    def _length(self) -> int:
        return len(self._plan.prompt) + len(self._output)

    def _complete(self) -> FinishReason:
        if self._output and self._output[-1] in self._plan.stop_token_ids:
            return FINISH_REASON_STOP
        if self._length >= self._plan.max_length:
            return FINISH_REASON_LENGTH
        return FINISH_REASON_UNSPECIFIED

    async def _conclude(self, reason: FinishReason, deliver: Deliver) -> gateway_pb2.Finished:
        """Show the text that was held back, and cut the record back to the tokens that carry the text."""
        text = self._transcript.finish()
        keep = self._transcript.carrying()
        if text:
            await deliver(_delta(min(keep, len(self._output)), [], text))
        if self._transcript.stop:
            reason = FINISH_REASON_STOP
        if keep < len(self._output):
            length = len(self._plan.prompt) + keep
            await self._log.truncate(length)
            if self._seat is not None:
                self._seat.roll_back(self._log.epoch, length)
        self.ledger.close()
        return gateway_pb2.Finished(
            reason=reason, stop=self._transcript.stop, output_tokens=keep, statistics=self.ledger.statistics()
        )

    def _leave(self) -> None:
        if self._seat is not None:
            self._seat.close()
        self._seat = self._verifier = None

    async def _record(self, finished: gateway_pb2.Finished) -> None:
        """The outcome, for whoever asks later. A store that refuses it changes nothing for the client."""
        self.ledger.close()
        if not finished.HasField("statistics"):
            finished.output_tokens = len(self._output)
            finished.statistics.CopyFrom(self.ledger.statistics())
        with contextlib.suppress(SlipstreamError):
            await self._log.finish(finished.SerializeToString())

    def _opening(self) -> verifier_pb2.DecodeOpen:
        plan = self._plan
        return verifier_pb2.DecodeOpen(
            key=types_pb2.SessionKey(id=self.id, epoch=self._log.epoch),
            prefix=types_pb2.Prefix(token_ids=[*plan.prompt, *self._output], prompt_length=len(plan.prompt)),
            sampling=wire.sampling_to_wire(plan.sampling),
            max_length=plan.max_length,
            stop_token_ids=plan.stop_token_ids,
            policy=verifier_pb2.DecodePolicy(max_draft_tokens=plan.max_draft_tokens),
            drafters=self._crew.addresses,
            credit=self._config.credit_tokens,
            prediction_token_ids=plan.prediction,
            cache_salt=plan.salt,
            workload=plan.workload,
            priority=plan.priority,
        )

    def _started(self) -> gateway_pb2.GenerateResponse:
        plan = self._plan
        return gateway_pb2.GenerateResponse(
            started=gateway_pb2.Started(
                session_id=self.id, seed=plan.sampling.seed, prompt_token_ids=plan.prompt, model=plan.model.name
            )
        )


def _delta(offset: int, tokens: list[int], text: str) -> gateway_pb2.GenerateResponse:
    return gateway_pb2.GenerateResponse(delta=gateway_pb2.Delta(offset=offset, token_ids=tokens, text=text))
