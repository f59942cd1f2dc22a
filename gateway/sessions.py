"""The sessions of one gateway: those it runs, those of others that its clients follow, and those it takes up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.admission import Admission, RandomBits
from gateway.claims import Claims
from gateway.known import Known
from gateway.log import Scribe, SessionLog
from gateway.outcome import output_of, rolled_back, suspended
from gateway.plan import Plan
from gateway.rounds import Ledger
from gateway.session import Session, Stage
from gateway.store import SessionStore
from gateway.store.record import Record, refusal
from gateway.story import Story
from gateway.tenant import Grant, asked_of, caller, request_of
from gateway.tokenizer import Tokenizer
from gateway.transcript import Transcript, number_only
from slipstream.errors import Aborted, Internal, OutOfRange, SlipstreamError
from slipstream.v1 import gateway_pb2

log = logging.getLogger(__name__)

MAX_ID_LENGTH = 64
POLL_S = 0.2
"""How often the log of a session that another gateway runs is read while somebody follows it here."""


@dataclass(frozen=True, slots=True)
class Chance:
    """Time and randomness, so that tests can choose them."""

    random_bits: RandomBits
    clock: Callable[[], float] = time.monotonic


class Sessions:
    """Every session here has at least one client; when the last one leaves, the session is let go."""

    def __init__(
        self, stage: Stage, tokenizer: Tokenizer, store: SessionStore, scribe: Scribe | None, chance: Chance
    ) -> None:
        self._stage = stage
        self._tokenizer = tokenizer
        self._store = store
        self._claims = Claims(store, scribe, stage.config.store_grace_s)
        self._chance = chance
        self._admission = Admission(stage.config, stage.router, tokenizer, chance.random_bits)
        self._known: dict[str, Known] = {}
        self._arriving = 0
        """Requests that may become a session."""
        self._closing = False

    def running(self, name: str) -> Session | None:
        """One of the caller's."""
        known = self._own(name)
        return None if known is None else known.session

    async def begin(self, request: gateway_pb2.GenerateRequest) -> Story:
        """A new session, in the log and running. Raises what Admission and the store raise."""
        arrived_at = self._chance.clock()
        self._check_open()
        with self._arrival():
            plan = await self._admission.plan(request, self._count)
            grant = _admitted(plan, 0)
            try:
                record = Record(self._name(), 1, plan.params(), len(plan.prompt), plan.prompt)
                log = self._claims.log(record)
                await log.create()
                self._check_open()
            except BaseException:
                grant.end(0)
                raise
        known = self._tell(record, plan)
        self._start(record.id, known, self._begin(record.id, known, plan, log, arrived_at), grant)
        return known.story

    async def resume(self, name: str) -> Story:
        """The session's story, whoever runs it. Raises NotFound, and what Admission raises."""
        while known := self._own(name):
            if not known.stopping or known.task is None:
                return known.story
            await asyncio.wait([known.task])
        arrived_at = self._chance.clock()
        with self._arrival():
            record = await self.read(name)
            plan = await self._admission.plan(request_of(record), self._count)
        self._check_open()
        if known := self._own(name):  # another client came first
            return known.story
        grant = _admitted(plan, plan.max_length if record.outcome else len(output_of(record)))
        known = self._tell(record, plan)
        self._start(name, known, self._follow(record, known, plan, arrived_at), grant)
        return known.story

    async def roll_back(self, request: gateway_pb2.RollbackRequest) -> tuple[str, int]:
        """The name and epoch of the session, cut and edited as asked. Raises NotFound, OutOfRange and what Admission
        raises for what is left."""
        record = await self.read(request.session_id)
        said = len(output_of(record))
        if request.output_tokens > said:
            raise OutOfRange(f"The session has {said} output tokens; keep at most those.", reason="NO_OFFSET")
        plan, edit = await self._admission.revise(request_of(record), request)
        if request.branch:
            kept = record.prompt_length + request.output_tokens
            return await self._branch(plan, (*record.tokens[:kept], *edit)), 1
        # A caller that leaves in the middle must not leave half of it.
        cutting = asyncio.create_task(self._cut(record, request.output_tokens, edit, plan.params()))
        return record.id, await asyncio.shield(cutting)

    async def _cut(self, record: Record, output: int, edit: Sequence[int], params: bytes) -> int:
        async with self._claims.turn(record.id):
            if known := self._known.get(record.id):
                known.story.fail(rolled_back(output))
                await self._let_go(known)
            return await self._claims.cut(record, record.prompt_length + output, edit, params)

    async def cancel(self, name: str) -> None:
        """The session has ended, wherever it ran. Nothing happens to one that had."""
        if session := self.running(name):
            session.cancel()  # at once, whatever the store does
        await self.read(name)
        await asyncio.shield(asyncio.create_task(self._cancel(name)))

    async def _cancel(self, name: str) -> None:
        async with self._claims.turn(name):
            known = self._known.get(name)
            if known is not None and (session := known.session):
                session.cancel()
                await session.ended.wait()
            await self._claims.cancel(name)

    async def read(self, name: str) -> Record:
        """With all that was shown here. Raises NotFound for a session that never was, has expired, or is another's."""
        if not 1 <= len(name) <= MAX_ID_LENGTH:
            raise refusal("MISSING", name[:MAX_ID_LENGTH], 0, 0)
        await self._claims.written(name)
        record = await self._store.read(name)
        asked_of(record)
        return record

    def _own(self, name: str) -> Known | None:
        """What is known of one of the caller's sessions."""
        known = self._known.get(name)
        return known if known is not None and known.owner == caller().name else None

    async def keep_leases(self) -> None:
        """Until cancelled: however long a session waits, nobody may think its owner dead."""
        while True:
            await asyncio.sleep(self._stage.config.lease_s / 3)
            sessions = [known.session for known in self._known.values() if known.session is not None]
            await asyncio.gather(*(session.renew() for session in sessions))

    async def close(self) -> None:
        """Lets every session go, all at once, and takes no others; other gateways may take them up."""
        self._closing = True
        tasks = [known.task for known in self._known.values() if known.task is not None]
        for known in list(self._known.values()):
            known.story.fail(suspended())
            known.stop()
        if tasks:
            await asyncio.wait(tasks, timeout=self._stage.config.store_grace_s + 1.0)

    def _check_open(self) -> None:
        if self._closing:
            raise suspended()

    # How sessions run and are followed.

    async def _begin(self, name: str, known: Known, plan: Plan, log: SessionLog, arrived_at: float) -> None:
        try:
            await self._run(name, known, plan, log, arrived_at)
        except Aborted:  # somebody rolled it back, cancelled it or took it up
            await self._follow(await self._latest(name, known, plan), known, plan, arrived_at)

    async def _run(self, name: str, known: Known, plan: Plan, log: SessionLog, arrived_at: float) -> None:
        ledger = Ledger(self._chance.clock, arrived_at, plan.max_draft_tokens > 0, self._stage.router.predicts)
        await known.run(Session(name, plan, self._stage, log, known.story, ledger), log)

    async def _follow(self, record: Record, known: Known, plan: Plan, arrived_at: float) -> None:
        """Tells what the log says, until the session ends or nobody runs it: then it is taken up here."""
        while known.hear(record) and not known.stopping:
            if not record.leased:
                with contextlib.suppress(Aborted):  # somebody else was faster, or took it later
                    log = await self._take_up(record.id, known)
                    if log is not None:
                        await self._run(record.id, known, plan, log, arrived_at)
                    return
            await asyncio.sleep(POLL_S)
            record = await self._latest(record.id, known, plan)

    async def _take_up(self, name: str, known: Known) -> SessionLog | None:
        """The log of a session that is ours now; None where there is nothing to go on with."""
        async with self._claims.turn(name):
            record = await self._claims.take(name)
            log = self._claims.log(record)
            try:
                if known.hear(record):
                    # A store that failed over may have lost what it had acknowledged, and a client has seen.
                    await log.append(known.story.tokens[len(output_of(record)) :])
                    return log
            except BaseException:
                await log.release()
                raise
            await log.release()
            return None

    async def _latest(self, name: str, known: Known, plan: Plan) -> Record:
        """The record as it is now; what was told of it already is not read again."""
        told = (*plan.prompt, *known.story.tokens)
        tail = await self._store.read(name, len(told))
        if tail.epoch == known.epoch and tail.start == len(told):
            return replace(tail, tokens=told + tail.tokens, start=0)
        return await self._store.read(name)

    def _start(self, name: str, known: Known, feeding: Coroutine[Any, Any, None], grant: Grant) -> None:
        async def feed() -> None:
            try:
                await feeding
            except SlipstreamError as error:
                known.story.fail(error)
            except Exception as error:
                log.error("a session failed", exc_info=error)
                known.story.fail(Internal("an internal error happened; please report it with the time it happened at."))

        def gone(_: asyncio.Task[None]) -> None:
            feeding.close()  # of a task that was cancelled before it began
            grant.end(known.output_here)
            if self._known.get(name) is known:
                del self._known[name]
            known.story.fail(suspended())

        known.task = asyncio.create_task(feed())
        known.task.add_done_callback(gone)

    async def _let_go(self, known: Known) -> None:
        """Whatever runs or follows the session here ends; its record stays as it is."""
        known.stop()
        if known.task is not None:
            await asyncio.wait([known.task])

    def _tell(self, record: Record, plan: Plan) -> Known:
        started = gateway_pb2.Started(
            session_id=record.id,
            seed=plan.sampling.seed,
            prompt_token_ids=plan.prompt,
            model=plan.model.name,
            revision=asked_of(record).revision,
        )
        shown = number_only if plan.top_logprobs is None else self._tokenizer.shown
        story = Story(started, Transcript(self._tokenizer.detokenizer(), plan.stops, shown))
        known = self._known[record.id] = Known(story, plan.owner, record.params, record.epoch)
        story.deserted = known.stop
        return known

    def _name(self) -> str:
        return f"{self._chance.random_bits(128):032x}"

    async def _branch(self, plan: Plan, tokens: tuple[int, ...]) -> str:
        record = Record(self._name(), 1, plan.params(), len(plan.prompt), tokens)
        await self._claims.branch(record)
        return record.id

    @contextlib.contextmanager
    def _arrival(self) -> Iterator[None]:
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    @property
    def _count(self) -> int:
        """Sessions here, and other requests that may become one."""
        return len(self._known) + self._arriving - 1


def _admitted(plan: Plan, said: int) -> Grant:
    """The caller's room for what is left of a session. What was said was paid for."""
    prompt = 0 if said else len(plan.prompt)
    return caller().admit(prompt, max(0, plan.max_length - len(plan.prompt) - said))
