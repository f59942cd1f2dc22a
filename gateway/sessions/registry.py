"""The sessions of one gateway: those it runs, those of others that its clients follow, and those it takes up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gateway.auth.tenant import TokenReservation, asked_of, caller, request_of
from gateway.requests.resolved_request import ResolvedRequest
from gateway.requests.validation import RandomBits, RequestValidator
from gateway.sessions.context import GatewayContext
from gateway.sessions.entry import SessionEntry
from gateway.sessions.outcome import output_of, rolled_back, suspended
from gateway.sessions.output_source import OutputSource
from gateway.sessions.output_stream import OutputStream
from gateway.sessions.ownership import SessionOwnership
from gateway.sessions.run import SessionRun
from gateway.store.session_log import WriteBehindQueue
from gateway.store.session_store import SessionRecord, SessionStore, store_error
from gateway.text.tokenizer import Tokenizer
from gateway.text.transcript import Transcript, number_only
from slipstream.errors import FailedPrecondition, Internal, OutOfRange, SlipstreamError
from slipstream.rpc.proto_conversion import MAX_ID_CHARACTERS
from slipstream.v1 import gateway_pb2, types_pb2

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ClockAndRandomness:
    """Time and randomness, so that tests can choose them."""

    random_bits: RandomBits
    clock: Callable[[], float] = time.monotonic


class SessionRegistry:
    """Every session here has at least one client; when the last one leaves, the session is let go."""

    def __init__(
        self,
        stage: GatewayContext,
        tokenizer: Tokenizer,
        store: SessionStore,
        scribe: WriteBehindQueue | None,
        chance: ClockAndRandomness,
    ) -> None:
        self._stage = stage
        self._tokenizer = tokenizer
        self._claims = SessionOwnership(store, scribe, stage.config.store_grace_s)
        self._chance = chance
        experiment = stage.trial.experiment if stage.trial else None
        self._admission = RequestValidator(stage.config, stage.router, tokenizer, chance.random_bits, experiment)
        self._known: dict[str, SessionEntry] = {}
        self._arriving = 0
        """Requests that may become a session."""
        self._closing = False

    def running(self, name: str) -> SessionRun | None:
        """One of the caller's."""
        known = self._own(name)
        return None if known is None else known.session

    async def begin(self, request: gateway_pb2.GenerateRequest) -> OutputStream:
        """A new session, in the log and running. Raises what Admission and the store raise."""
        arrived_at = self._chance.clock()
        self._check_open()
        name = self._name()
        with self._arrival():
            plan = await self._admission.plan(request, self._count, name)
            grant = _admitted(plan, 0)
            try:
                record = SessionRecord(name, 1, plan.params(), len(plan.prompt), plan.prompt)
                log = self._claims.log(record)
                await log.create()
                self._check_open()
            except BaseException:
                grant.end(0)
                raise
        known = self._tell(record)
        self._start(record.id, known, self._feed(record.id, known, plan, arrived_at).begin(log), grant)
        return known.story

    async def resume(self, name: str, revision: int | None = None) -> OutputStream:
        """The session's story, whoever runs it; one that ended needs nothing but its record. `revision`: of the text
        that the client has, if it says so. Raises NotFound, FailedPrecondition for a text of another vocabulary, and
        what Admission raises."""
        while known := self._own(name):
            if known.stopping and known.task is not None:
                await asyncio.wait([known.task])
            elif await self._current(known, name, revision):
                return known.story
        arrived_at = self._chance.clock()
        with self._arrival():
            record = await self.read(name)
            asked = self._again(record)
            if record.outcome:
                known = self._heard(record)
                known.hear(record)
                return known.story
            plan = await self._admission.plan(asked, self._count, name, again=True)
        self._check_open()
        if self._own(name):  # another client came first
            return await self.resume(name, revision)
        grant = _admitted(plan, len(output_of(record)))
        known = self._tell(record)
        self._start(name, known, self._feed(name, known, plan, arrived_at).follow(record), grant)
        return known.story

    async def _current(self, known: SessionEntry, name: str, revision: int | None) -> bool:
        """Whether what is known is what the session says now: somebody may have rolled it back on another gateway, and
        nobody here has heard of it; or its last client leaves while the log is read. A client that has the same text as
        those here need not ask."""
        if revision == known.story.started.revision:
            return True
        record = await self.read(name)
        if record.params == known.params:
            return not known.stopping
        known.hear(record)
        await self._let_go(known)
        return False

    async def roll_back(self, request: gateway_pb2.RollbackRequest) -> gateway_pb2.RollbackResponse:
        """The session, cut and edited as asked, is nobody's now. Raises NotFound, OutOfRange, Aborted where somebody
        else changes it at the same time, and what Admission raises for what is left."""
        record = await self.read(request.session_id)
        said = len(output_of(record))
        if request.output_tokens > said:
            raise OutOfRange(f"The session has {said} output tokens; keep at most those.", reason="NO_OFFSET")
        plan, edit = await self._admission.revise(self._again(record), request)
        if request.branch:
            kept = record.prompt_length + request.output_tokens
            name, epoch = await self._branch(plan, (*record.tokens[:kept], *edit)), 1
        else:
            name, epoch = record.id, await _whole(self._cut(record, request.output_tokens, edit, plan.params()))
        key = types_pb2.SessionKey(id=name, epoch=epoch)
        return gateway_pb2.RollbackResponse(key=key, output_tokens=request.output_tokens, revision=plan.revision)

    async def _cut(self, record: SessionRecord, output: int, edit: Sequence[int], params: bytes) -> int:
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
        await _whole(self._cancel(name))

    async def _cancel(self, name: str) -> None:
        async with self._claims.turn(name):
            known = self._known.get(name)
            if known is not None and (session := known.session):
                session.cancel()
                await session.ended.wait()
            await self._claims.cancel(name)

    async def read(self, name: str) -> SessionRecord:
        """With all that was shown here. Raises NotFound for a session that never was, has expired, or is another's."""
        if not 1 <= len(name) <= MAX_ID_CHARACTERS:
            raise store_error("MISSING", name[:MAX_ID_CHARACTERS], 0, 0)
        await self._claims.written(name)
        record = await self._claims.store.read(name)
        asked_of(record)
        return record

    def _own(self, name: str) -> SessionEntry | None:
        """What is known of one of the caller's sessions."""
        known = self._known.get(name)
        return known if known is not None and known.owner == caller().name else None

    async def keep_leases(self) -> None:
        """Until cancelled: however long a session waits, nobody may think its owner dead."""
        while True:
            await asyncio.sleep(self._stage.config.renewal_s)
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

    def _feed(self, name: str, known: SessionEntry, plan: ResolvedRequest, arrived_at: float) -> OutputSource:
        return OutputSource(name, known, plan, self._stage, self._claims, self._chance.clock, arrived_at)

    def _start(
        self, name: str, known: SessionEntry, feeding: Coroutine[Any, Any, None], grant: TokenReservation
    ) -> None:
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

    async def _let_go(self, known: SessionEntry) -> None:
        """Whatever runs or follows the session here ends; its record stays as it is."""
        known.stop()
        if known.task is not None:
            await asyncio.wait([known.task])

    def _again(self, record: SessionRecord) -> gateway_pb2.GenerateRequest:
        """That would ask for the session again."""
        asked, mine = request_of(record), self._tokenizer.fingerprint
        if asked.vocabulary_fingerprint not in ("", mine):  # empty: of a record that is older than the field
            raise FailedPrecondition(
                f"The session's text is of vocabulary {asked.vocabulary_fingerprint} and this gateway's tokenizer has "
                f"{mine}; resume it on a gateway of its model.",
                reason="VOCABULARY_MISMATCH",
            )
        return asked

    def _tell(self, record: SessionRecord) -> SessionEntry:
        """What is to be told of a session that goes on, to all its clients."""
        known = self._known[record.id] = self._heard(record)
        known.story.deserted = known.stop
        return known

    def _heard(self, record: SessionRecord) -> SessionEntry:
        asked = asked_of(record)
        started = gateway_pb2.Started(
            session_id=record.id,
            seed=asked.sampling.seed,
            prompt_token_ids=record.tokens[: record.prompt_length],
            model=asked.model,
            revision=asked.revision,
        )
        shown = self._tokenizer.shown if asked.logprobs else number_only
        story = OutputStream(started, Transcript(self._tokenizer.detokenizer(), asked.stop, shown))
        return SessionEntry(story, asked.owner, record.params, record.epoch)

    def _name(self) -> str:
        return f"{self._chance.random_bits(128):032x}"

    async def _branch(self, plan: ResolvedRequest, tokens: tuple[int, ...]) -> str:
        record = SessionRecord(self._name(), 1, plan.params(), len(plan.prompt), tokens)
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


async def _whole(work: Coroutine[Any, Any, T]) -> T:
    """A caller that leaves in the middle must not leave half of it."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may be there to hear of it
    return await asyncio.shield(task)


def _admitted(plan: ResolvedRequest, said: int) -> TokenReservation:
    """The caller's room for what is left of a session. What was said was paid for."""
    prompt = 0 if said else len(plan.prompt)
    return caller().admit(prompt, max(0, plan.max_length - len(plan.prompt) - said))
