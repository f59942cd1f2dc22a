"""The sessions of one gateway: those it runs, those of others that its clients follow, and those it takes up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from gateway.admission import Admission, Plan, RandomBits
from gateway.log import Scribe, SessionLog
from gateway.rounds import Ledger
from gateway.session import Session, Stage
from gateway.store import SessionStore
from gateway.store.record import Record, refusal
from gateway.story import Story
from gateway.tenant import Grant, asked_of, caller
from gateway.tokenizer import Tokenizer
from gateway.transcript import Transcript, number_only
from slipstream.errors import Aborted, Internal, OutOfRange, SlipstreamError, Unavailable
from slipstream.v1 import gateway_pb2, verifier_pb2

log = logging.getLogger(__name__)

MAX_ID_LENGTH = 64
POLL_S = 0.2
"""How often the log of a session that another gateway runs is read while somebody follows it here."""
ROLLED_BACK = "ROLLED_BACK"


@dataclass(frozen=True, slots=True)
class Chance:
    """Time and randomness, so that tests can choose them."""

    random_bits: RandomBits
    clock: Callable[[], float] = time.monotonic


@dataclass(slots=True, eq=False)
class Known:
    """A session that somebody here listens to."""

    story: Story
    owner: str
    """The API key that it belongs to."""
    params: bytes
    """What it was asked for: another record is another session, even if it begins like this one."""
    task: asyncio.Task[None] | None = None
    """That feeds the story."""
    session: Session | None = None
    """Where it runs here."""
    said: int = 0
    """Tokens that were there before it ran here."""
    stopping: bool = False

    @property
    def output_here(self) -> int:
        """Tokens that were said here."""
        return len(self.story.tokens) - self.said if self.session is not None else 0

    def stop(self) -> None:
        """The task ends soon, having let the session go. Once: what it does last must not be interrupted."""
        if self.task is not None and not self.stopping and not (self.session is not None and self.session.ending):
            self.stopping = True
            self.task.cancel()


class Sessions:
    """Every session here has at least one client; when the last one leaves, the session is let go."""

    def __init__(
        self, stage: Stage, tokenizer: Tokenizer, store: SessionStore, scribe: Scribe | None, chance: Chance
    ) -> None:
        self._stage = stage
        self._tokenizer = tokenizer
        self._store = store
        self._scribe = scribe
        self._chance = chance
        self._admission = Admission(stage.config, stage.router, tokenizer, chance.random_bits)
        self._known: dict[str, Known] = {}
        self._arriving = 0
        """Requests that may become a session."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Of those here that want to own a session: to the store all of them are one owner."""
        self._closing = False

    def running(self, name: str) -> Session | None:
        """One of the caller's."""
        known = self._own(name)
        return None if known is None else known.session

    async def begin(self, request: gateway_pb2.GenerateRequest) -> Story:
        """A new session, in the log and running. Raises what Admission and the store raise."""
        arrived_at = self._chance.clock()
        self._check_open()
        name = self._name()
        with self._arrival():
            plan = await self._admission.plan(request, self._count, name)
            grant = _admitted(plan, 0)
            try:
                record = Record(name, 1, plan.params(), len(plan.prompt), plan.prompt)
                log = self._log(record)
                await log.create()
                self._check_open()
            except BaseException:
                grant.end(0)
                raise
        known = self._tell(record, plan)
        self._start(record.id, known, self._run(record.id, known, plan, log, arrived_at), grant)
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
            plan = await self._admission.plan(_request(record), self._count, name)
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
        plan, edit = await self._admission.revise(_request(record), request)
        kept = record.prompt_length + request.output_tokens
        if request.branch:
            return await self._branch(plan, (*record.tokens[:kept], *edit)), 1
        if known := self._known.get(record.id):
            known.story.fail(_rolled_back(request.output_tokens))
        await self._let_go(record.id)
        # A caller that leaves in the middle must not leave half of it.
        return record.id, await asyncio.shield(asyncio.create_task(self._cut(record.id, kept, edit, plan.params())))

    async def _cut(self, name: str, kept: int, edit: Sequence[int], params: bytes) -> int:
        """The epoch under which nobody owns what is left."""
        async with self._turn(name):
            epoch = (await self._store.takeover(name, force=True)).epoch + 1
            await self._store.truncate(name, epoch, kept, params)
            await self._store.append(name, epoch, kept, edit)
            await self._store.release(name, epoch)
        return epoch

    async def cancel(self, name: str) -> None:
        """The session ends, wherever it runs. Nothing happens to one that has ended."""
        if session := self.running(name):
            session.cancel()
            return
        if not (await self.read(name)).outcome:
            await asyncio.shield(asyncio.create_task(self._cancel(name)))

    async def _cancel(self, name: str) -> None:
        async with self._turn(name):
            record = await self._store.takeover(name, force=True)
            if not record.outcome:
                finished = gateway_pb2.Finished(
                    reason=verifier_pb2.FINISH_REASON_CANCELLED, output_tokens=len(output_of(record))
                )
                record = replace(record, outcome=finished.SerializeToString())
            await self._store.finish(name, record.epoch, record.outcome)

    async def read(self, name: str) -> Record:
        """Raises NotFound for a session that never was, has expired, or is another's."""
        if not 1 <= len(name) <= MAX_ID_LENGTH:
            raise refusal("MISSING", name[:MAX_ID_LENGTH], 0, 0)
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
            known.story.fail(_suspended())
            known.stop()
        if tasks:
            await asyncio.wait(tasks, timeout=self._stage.config.store_grace_s + 1.0)

    def _check_open(self) -> None:
        if self._closing:
            raise _suspended()

    def _turn(self, name: str) -> asyncio.Lock:
        """To be held by whoever takes the session over, until it runs or is let go."""
        return self._turns.setdefault(name, asyncio.Lock())

    # How sessions run and are followed.

    async def _run(self, name: str, known: Known, plan: Plan, log: SessionLog, arrived_at: float) -> None:
        ledger = Ledger(self._chance.clock, arrived_at, plan.max_draft_tokens > 0, self._stage.router.predicts)
        known.said = len(known.story.tokens)
        known.session = Session(name, plan, self._stage, log, known.story, ledger)
        await known.session.run()

    async def _follow(self, record: Record, known: Known, plan: Plan, arrived_at: float) -> None:
        """Tells what the log says, until the session ends or nobody runs it: then it is taken up here."""
        epoch = record.epoch
        while _told(known, record, epoch):
            if not record.leased:
                with contextlib.suppress(Aborted):  # somebody else was faster
                    log = await self._take_up(record.id, known, epoch)
                    if log is not None:
                        await self._run(record.id, known, plan, log, arrived_at)
                    return
            epoch = record.epoch
            await asyncio.sleep(POLL_S)
            record = await self._latest(record, known)

    async def _take_up(self, name: str, known: Known, epoch: int) -> SessionLog | None:
        """The log of a session that is ours now; None where there is nothing to go on with."""
        async with self._turn(name):
            record = await self._store.takeover(name)
            log = self._log(record)
            try:
                if _told(known, replace(record, epoch=record.epoch - 1), epoch):  # a takeover raises it by one
                    # A store that failed over may have lost what it had acknowledged, and a client has seen.
                    await log.append(known.story.tokens[len(output_of(record)) :])
                    return log
            except BaseException:
                await log.release()
                raise
            await log.release()
            return None

    async def _latest(self, record: Record, known: Known) -> Record:
        """The record as it is now; what was told of it already is not read again."""
        told = record.tokens[: record.prompt_length] + tuple(known.story.tokens)
        tail = await self._store.read(record.id, len(told))
        if tail.epoch == record.epoch and tail.start == len(told):
            return replace(tail, tokens=told + tail.tokens, start=0)
        return await self._store.read(record.id)

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
            known.story.fail(_suspended())

        known.task = asyncio.create_task(feed())
        known.task.add_done_callback(gone)

    async def _let_go(self, name: str) -> None:
        """Whatever runs or follows the session here ends; its record stays as it is."""
        known = self._known.get(name)
        if known is not None and known.task is not None:
            known.stop()
            await asyncio.wait([known.task])

    def _tell(self, record: Record, plan: Plan) -> Known:
        started = gateway_pb2.Started(
            session_id=record.id, seed=plan.sampling.seed, prompt_token_ids=plan.prompt, model=plan.model.name
        )
        shown = number_only if plan.top_logprobs is None else self._tokenizer.shown
        story = Story(started, Transcript(self._tokenizer.detokenizer(), plan.stops, shown))
        known = self._known[record.id] = Known(story, plan.owner, record.params)
        story.deserted = known.stop
        return known

    def _log(self, record: Record) -> SessionLog:
        return SessionLog(self._store, record, scribe=self._scribe, grace_s=self._stage.config.store_grace_s)

    def _name(self) -> str:
        return f"{self._chance.random_bits(128):032x}"

    async def _branch(self, plan: Plan, tokens: tuple[int, ...]) -> str:
        record = Record(self._name(), 1, plan.params(), len(plan.prompt), tokens)
        await self._store.create(record)
        await self._store.release(record.id, 1)
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


def output_of(record: Record) -> tuple[int, ...]:
    """The tokens that carry the session's text: of one that ended, none behind a stop string."""
    output = record.tokens[record.prompt_length :]
    return output[: gateway_pb2.Finished.FromString(record.outcome).output_tokens] if record.outcome else output


def _request(record: Record) -> gateway_pb2.GenerateRequest:
    """That would ask for the session again."""
    request = asked_of(record)
    request.prompt_token_ids.token_ids.extend(record.tokens[: record.prompt_length])
    return request


def _rolled_back(output_tokens: int) -> Aborted:
    return Aborted(f"The session was rolled back to {output_tokens} output tokens; resume there.", reason=ROLLED_BACK)


def _suspended() -> Unavailable:
    return Unavailable("The gateway let the session go; resume it.", reason="SUSPENDED")


def _told(known: Known, record: Record, epoch: int) -> bool:
    """Tells the story what the record has more; whether the session goes on. A log that is shorter than what was told
    has lost it, or was rolled back: then its epoch is a later one than `epoch`."""
    story, output = known.story, list(record.tokens[record.prompt_length :])
    both = min(len(output), len(story.tokens))
    shorter = both < len(story.tokens) and record.epoch > epoch
    if output[:both] != story.tokens[:both] or shorter or record.params != known.params:
        story.fail(_rolled_back(both))
        return False
    story.tell(output[both:])
    if record.outcome:
        story.conclude()
        finished = gateway_pb2.Finished.FromString(record.outcome)
        finished.output_tokens = min(finished.output_tokens, story.transcript.carrying())
        story.finish(finished)
    return not record.outcome
