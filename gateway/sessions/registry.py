"""The entry of the application: everything that a client may do with a session (generate, resume, roll back, cancel,
describe), whatever protocol the call came by. Each session that clients follow here has one task, which runs it
(`gateway.sessions.run`) or follows the log of the gateway that does, and fills one OutputStream; `generate` and
`resume` send that stream's events by a `send` callback. A new protocol calls those two with a RequestContext, as
`gateway.api.grpc_service` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from gateway.auth.tenant import Tenant, TokenReservation
from gateway.request_context import RequestContext
from gateway.requests.resolved_request import ResolvedRequest
from gateway.requests.texts import Texts
from gateway.requests.validation import RequestValidator, SessionCount
from gateway.routing.verifier_choice import prefix_hashes
from gateway.sessions.arithmetic_spans import Spans, chosen, cut, moves_of, same_request, spans_of, with_spans
from gateway.sessions.entry import SessionEntry, finish_stream
from gateway.sessions.observer import RequestObserver
from gateway.sessions.output_stream import Event, OutputStream, rolled_back, suspended
from gateway.sessions.ownership import SessionOwnership, finished_of, output_of, request_of, stored_request
from gateway.sessions.run import GatewayContext, SessionRun
from gateway.store.session_store import SessionRecord, SessionStore, store_error
from gateway.store.write_behind import WriteBehindQueue
from gateway.text.tokenizer import Tokenizer
from gateway.text.transcript import Transcript, number_only
from gateway.work.pieces import give_way
from slipstream.errors import FailedPrecondition, Internal, OutOfRange, SlipstreamError
from slipstream.rpc.proto_conversion import MAX_ID_CHARACTERS
from slipstream.v1 import gateway_pb2, types_pb2

log = logging.getLogger(__name__)
T = TypeVar("T")
Send = Callable[[Event], Awaitable[None]]
"""Sends one event to the client, and returns once the client may have the next one."""

FREE_EPOCHS = 16
"""Epochs of a session, of which every run has one, after which a client that resumes it pays for the whole text again.
"""
PIECE = 1024
"""Tokens of an output that are decoded at once where they come at once: 3 ms."""


class SessionRegistry:
    """Every session here has at least one client; when the last one leaves, the session is let go."""

    def __init__(
        self, context: GatewayContext, tokenizer: Tokenizer, store: SessionStore, write_behind: WriteBehindQueue | None
    ) -> None:
        self._context = context
        self._tokenizer = tokenizer
        self._ownership = SessionOwnership(store, write_behind, context.config.store_grace_s)
        self.sampling_defaults = context.sampling_defaults
        self._validator = RequestValidator(
            context.config, context.router, tokenizer, context.random_bits, context.sampling_defaults
        )
        self._entries: dict[str, SessionEntry] = {}
        self._arriving: Counter[str] = Counter()
        """Requests that may become sessions, by tenant's name."""
        self._clients = 0
        """Calls of `generate` and `resume` that have not ended."""
        self._closing = False

    # Calls of clients.

    async def generate(
        self,
        request: gateway_pb2.GenerateRequest,
        context: RequestContext,
        send: Send,
        *,
        texts: Texts | None = None,
    ) -> None:
        """Start a session and send its events. `texts`: what it is written from, where the request does not say that.
        Raises what RequestValidator and the store raise, and what ends the session."""
        with self._client(), self._context.observers.watch_request("generate", context) as observer:
            observer.generate_requested(request)
            with self._context.observers.admitting():
                stream = await self._start_session(request, context.tenant, texts)
            events = stream.follow(interval=request.stream_interval)
            await self._send_events(stream, events, observer, send)

    async def resume(self, request: gateway_pb2.ResumeRequest, context: RequestContext, send: Send) -> None:
        """Send what the client does not have yet. Raises NotFound, FailedPrecondition for a text of another vocabulary,
        what RequestValidator raises, and what ends the session."""
        with self._client(), self._context.observers.watch_request("resume", context) as observer:
            characters = request.characters if request.HasField("characters") else None
            revision = request.revision if request.HasField("revision") else None
            mixed = request.mixed_arithmetic if request.HasField("mixed_arithmetic") else None
            stream = await self._open_stream(request.session_id, context.tenant, revision, mixed)
            events = stream.follow(request.offset, characters, revision, request.stream_interval)
            await self._send_events(stream, events, observer, send)

    async def _send_events(
        self, stream: OutputStream, events: AsyncGenerator[Event, None], observer: RequestObserver, send: Send
    ) -> None:
        """Send events until they end or the client disconnects, which cancels this call. When the last client has gone
        its session is stopped, and waits in its record for `resume`."""
        try:
            # Sent instead of yielded: when a client leaves, its stream stops being followed at once.
            async with aclosing(events) as following:
                async for event in following:
                    if isinstance(event, gateway_pb2.Started):
                        await give_way(len(event.prompt_token_ids))
                    observer.event_sent(event)
                    await send(event)
        finally:
            entry = self._entries.get(stream.started.session_id)
            if entry is not None and entry.stream is stream and not stream.followed:
                entry.leave()

    async def _start_session(
        self, request: gateway_pb2.GenerateRequest, tenant: Tenant, texts: Texts | None
    ) -> OutputStream:
        """The stream of a new session, in the log and running. Raises what RequestValidator and the store raise."""
        arrived_at = self._context.clock()
        self._check_open()
        session_id = self._new_id()
        with self._arrival(tenant):
            self._validator.check_places(tenant, self._count(tenant))
            await self._reach_model(request.model)
            resolved = await self._validator.resolve(request, tenant, session_id, texts=texts)
            await give_way(len(resolved.prompt))
            reservation = await _reserve(tenant, resolved, 0)
            try:
                params = with_spans(resolved.params(), self._first_spans(resolved))
                record = SessionRecord(session_id, 1, params, len(resolved.prompt), resolved.prompt)
                log = self._ownership.open_log(record)
                await give_way(len(resolved.prompt))
                await log.create()
                await give_way(len(resolved.prompt))
                self._check_open()
            except BaseException:
                reservation.end(0)
                raise
        entry = self._add_entry(record, resolved)
        self._start_task(entry, entry.run_new_session(log, arrived_at), reservation)
        return entry.stream

    async def _open_stream(
        self, session_id: str, tenant: Tenant, revision: int | None = None, mixed: bool | None = None
    ) -> OutputStream:
        """The session's stream, whichever gateway runs it; one that ended needs nothing but its record. `revision`: of
        the text that the client has, if it sent that. `mixed`: as in ResumeRequest. Raises NotFound,
        FailedPrecondition for a text of another vocabulary, and what RequestValidator raises."""
        while entry := self._entry_of(session_id, tenant):
            if entry.life.left and entry.task is not None:
                await asyncio.wait([entry.task])
            elif await self._is_current(entry, tenant, revision):
                entry.choose_mixed(mixed)
                return entry.stream
        with self._arrival(tenant):
            record = await self.read_record(session_id, tenant)
            self._check_vocabulary(stored_request(record, tenant))
            if record.outcome:
                return await self._ended_stream(record)
            prompt = record.tokens[: record.prompt_length]
            self._validator.check_places(tenant, self._count(tenant))
            asked = request_of(record)
            await self._reach_model(asked.model)
            resolved = await self._validator.resolve(asked, tenant, session_id, prompt)
        again = self._ownership.may_take(record) and _charged_by_resume(record, record.epoch)
        reservation = await _reserve(tenant, resolved, len(output_of(record)), again=again)
        if self._closing or self._entry_of(session_id, tenant):  # or another client came first
            reservation.end(0)
            self._check_open()
            return await self._open_stream(session_id, tenant, revision, mixed)
        entry = self._add_entry(record, resolved)
        entry.mixed = mixed
        self._start_task(entry, entry.follow_log(record), reservation)
        return entry.stream

    async def _is_current(self, entry: SessionEntry, tenant: Tenant, revision: int | None) -> bool:
        """Return True if the entry's text is the session's: it may have been rolled back on another gateway, or
        the entry's last client may leave while the log is read. A client that has the entry's revision need not ask."""
        if revision == entry.stream.started.revision:
            return True
        record = await self.read_record(entry.id, tenant)
        if same_request(record.params, entry.params):
            return not entry.life.left
        entry.apply_record(record)
        await self._let_go(entry)
        return False

    async def roll_back(self, request: gateway_pb2.RollbackRequest, tenant: Tenant) -> gateway_pb2.RollbackResponse:
        """Cut and edit the session, or a branch of it, and leave it without an owner. Raises NotFound, OutOfRange,
        Aborted where another client changes it at the same time, and what RequestValidator raises for what is left."""
        record = await self.read_record(request.session_id, tenant)
        length = len(output_of(record))
        if request.output_tokens > length:
            raise OutOfRange(
                f"The session has {length} output tokens; keep at most those.",
                reason="NO_OFFSET",
                field="output_tokens",
                numbers={"output_tokens": length},
            )
        stored, prompt = stored_request(record, tenant), record.tokens[: record.prompt_length]
        self._check_vocabulary(stored)
        asked = request_of(record)
        await self._reach_model(asked.model)
        resolved, edit = await self._validator.revise(asked, stored, tenant, prompt, request)
        tokens = (*record.tokens[: record.prompt_length + request.output_tokens], *edit)
        # A branch is stored, and whatever output is left is computed again, unless `resume` will charge it.
        resumed_free = len(tokens) > record.prompt_length and not _charged_by_resume(record, record.epoch + 1)
        charged = len(tokens) if request.branch or resumed_free else 0
        shared = await tenant.charge(charged)
        try:
            if request.branch:
                spans = cut(spans_of(record.params), request.output_tokens, len(edit))
                params = with_spans(resolved.params(), spans)
                session_id, epoch = await self._create_branch(params, tokens, len(resolved.prompt)), 1
            else:
                cutting = self._cut(record, request.output_tokens, edit, resolved.params(), resolved.revision)
                session_id, epoch = record.id, await _uninterrupted(cutting)
        except SlipstreamError:
            tenant.give_back(charged, shared=shared)
            raise
        key = types_pb2.SessionKey(id=session_id, epoch=epoch)
        return gateway_pb2.RollbackResponse(key=key, output_tokens=request.output_tokens, revision=resolved.revision)

    async def _cut(self, record: SessionRecord, output: int, edit: Sequence[int], params: bytes, revision: int) -> int:
        async with self._ownership.lock(record.id):
            if entry := self._entries.get(record.id):
                entry.stream.fail(rolled_back(revision, output))
                await self._let_go(entry)
            return await self._ownership.cut(record, record.prompt_length + output, edit, params)

    def _first_spans(self, resolved: ResolvedRequest) -> Spans:
        """The arithmetic of the verifier that a new session will be opened on, unless that changes by then."""
        prefixes = prefix_hashes(resolved.prompt, resolved.salt)
        verifier = self._context.router.choose_verifier(resolved.model.name, (), prefixes)
        return chosen("" if verifier is None else verifier.arithmetic)

    async def _create_branch(self, params: bytes, tokens: tuple[int, ...], prompt_length: int) -> str:
        record = SessionRecord(self._new_id(), 1, params, prompt_length, tokens)
        await self._ownership.create_branch(record)
        return record.id

    async def cancel(self, session_id: str, tenant: Tenant) -> None:
        """End the session, wherever it runs; it has ended when this returns. Nothing happens to one that had."""
        if run := self.running(session_id, tenant):
            run.cancel()  # at once, whatever the store does
        await self.read_record(session_id, tenant)
        await _uninterrupted(self._cancel(session_id))

    async def _cancel(self, session_id: str) -> None:
        async with self._ownership.lock(session_id):
            entry = self._entries.get(session_id)
            if entry is not None and (run := entry.run):
                run.cancel()
                await run.ended.wait()
            await self._ownership.finish_cancelled(session_id)

    async def describe(self, session_id: str, tenant: Tenant) -> gateway_pb2.GetSessionResponse:
        """The session's record. Raises what `read_record` raises."""
        return self._described(await self.read_record(session_id, tenant), tenant)

    async def describe_response(self, session_id: str, tenant: Tenant) -> tuple[gateway_pb2.GetSessionResponse, bytes]:
        """The session's record, and what a gateway kept with it as a response. Raises what `read_record` raises."""
        record = await self.read_record(session_id, tenant)
        return self._described(record, tenant), stored_request(record, tenant).response

    def _described(self, record: SessionRecord, tenant: Tenant) -> gateway_pb2.GetSessionResponse:
        stored, request, finished = stored_request(record, tenant), request_of(record), finished_of(record)
        run = self.running(record.id, tenant)
        return gateway_pb2.GetSessionResponse(
            key=types_pb2.SessionKey(id=record.id, epoch=record.epoch),
            model=request.model,
            seed=request.sampling.seed,
            prompt_token_ids=record.tokens[: record.prompt_length],
            output_token_ids=output_of(record),
            finish_reason=finished.reason,
            statistics=run.stats.statistics() if run and not record.outcome else finished.statistics,
            annotation=request.annotation,
            arithmetics=[each for each in stored.arithmetics if each.arithmetic],
            revision=stored.revision,
        )

    async def read_events(self, session_id: str, tenant: Tenant) -> list[Event]:
        """All events of a session that ended. Raises FailedPrecondition for one that goes on, or has a text of another
        vocabulary, and what `read_record` raises."""
        record = await self.read_record(session_id, tenant)
        self._check_vocabulary(stored_request(record, tenant))
        if not record.outcome:
            raise FailedPrecondition("The session goes on; wait for its end, or cancel it.", reason="SESSION_RUNNING")
        return [event async for event in (await self._ended_stream(record)).follow()]

    async def events_so_far(self, session_id: str, tenant: Tenant) -> list[Event]:
        """The events of what a session has written: all that may be shown of one that goes on, without an end. Raises
        what `read_events` raises, but for a session that goes on."""
        record = await self.read_record(session_id, tenant)
        self._check_vocabulary(stored_request(record, tenant))
        if record.outcome:
            return [event async for event in (await self._ended_stream(record)).follow()]
        return (await self._replayed(record)).so_far()

    async def delete(self, session_id: str, tenant: Tenant) -> None:
        """End the session, wherever it runs, and remove its record. Raises what `cancel` raises."""
        await self.cancel(session_id, tenant)
        await self._ownership.store.delete(session_id)

    async def read_record(self, session_id: str, tenant: Tenant) -> SessionRecord:
        """The record, with everything that clients here received. Raises NotFound for a session that never was, has
        expired, or is another tenant's."""
        if not 1 <= len(session_id) <= MAX_ID_CHARACTERS:
            raise store_error("MISSING", session_id[:MAX_ID_CHARACTERS], 0, 0)
        await self._ownership.flush_writes(session_id)
        record = await self._ownership.store.read(session_id)
        stored_request(record, tenant)  # raises for another tenant's
        return record

    @property
    def open_sessions(self) -> int:
        """Number of sessions here."""
        return len(self._entries)

    def running(self, session_id: str, tenant: Tenant) -> SessionRun | None:
        """The run of one of the tenant's sessions, if it runs here."""
        entry = self._entry_of(session_id, tenant)
        return None if entry is None else entry.run

    # Calls of the process.

    async def keep_leases(self) -> None:
        """Renew the leases of all running sessions until cancelled, however long a session writes nothing."""
        while True:
            await asyncio.sleep(self._context.config.renewal_s)
            runs = [entry.run for entry in self._entries.values() if entry.run is not None]
            await asyncio.gather(*(run.renew_lease() for run in runs))

    @property
    def deserted(self) -> bool:
        """Whether no client generates or resumes here."""
        return not self._clients

    @property
    def stuck(self) -> bool:
        """Whether no session can go on: none has a verifier, and there is none."""
        decoding = any(entry.life.decoding for entry in self._entries.values())
        return not decoding and not self._context.router.ready

    async def close(self) -> None:
        """Let every session go, all at once, and take no others; other gateways may take them up."""
        self._closing = True
        self._context.router.changes.notify_all()
        tasks = [entry.task for entry in self._entries.values() if entry.task is not None]
        for entry in list(self._entries.values()):
            entry.stream.fail(suspended(self._context.config.alone))
            entry.leave()
        if tasks:
            await asyncio.wait(tasks, timeout=self._context.config.store_grace_s + 1.0)

    async def _reach_model(self, name: str) -> None:
        """A gateway that has just started has not reached its verifiers yet: wait for one of the model, as long as a
        session waits for another verifier."""
        router = self._context.router
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._context.config.rehoming_wait_s):
                while router.unreached(name) and not self._closing:
                    await router.changes.wait()
        self._check_open()

    def _check_open(self) -> None:
        if self._closing:
            raise suspended(self._context.config.alone)

    def _entry_of(self, session_id: str, tenant: Tenant) -> SessionEntry | None:
        entry = self._entries.get(session_id)
        return entry if entry is not None and entry.resolved.owner == tenant.name else None

    def _add_entry(self, record: SessionRecord, resolved: ResolvedRequest) -> SessionEntry:
        stream = self._new_stream(record)
        entry = SessionEntry(record.id, resolved, stream, self._context, self._ownership, record.params, record.epoch)
        self._entries[record.id] = entry
        return entry

    def _start_task(
        self, entry: SessionEntry, filling: Coroutine[Any, Any, None], reservation: TokenReservation
    ) -> None:
        async def fill_stream() -> None:
            try:
                await filling
            except SlipstreamError as error:
                entry.stream.fail(error)
            except Exception as error:
                log.error("a session failed", exc_info=error)
                entry.stream.fail(
                    Internal("an internal error happened; please report it with the time it happened at.")
                )

        def remove_entry(_: asyncio.Task[None]) -> None:
            filling.close()  # of a task that was cancelled before it began
            reservation.end(entry.tokens_here)
            if self._entries.get(entry.id) is entry:
                del self._entries[entry.id]
            entry.stream.fail(suspended())
            entry.task = None  # its exception has frames that have the entry: a ring of references

        entry.task = asyncio.create_task(fill_stream())
        entry.task.add_done_callback(remove_entry)

    async def _let_go(self, entry: SessionEntry) -> None:
        """End the entry's task; the session's record stays as it is."""
        entry.leave()
        if entry.task is not None:
            await asyncio.wait([entry.task])

    def _check_vocabulary(self, stored: gateway_pb2.StoredRequest) -> None:
        theirs, ours = stored.vocabulary_fingerprint, self._tokenizer.fingerprint
        if theirs not in ("", ours):
            raise FailedPrecondition(
                f"The session's text is of vocabulary {theirs} and this gateway's tokenizer has {ours}; resume it on a "
                "gateway of its model.",
                reason="VOCABULARY_MISMATCH",
            )

    async def _ended_stream(self, record: SessionRecord) -> OutputStream:
        stream = await self._replayed(record)
        finish_stream(stream, record)
        return stream

    async def _replayed(self, record: SessionRecord) -> OutputStream:
        """A stream of the record's output, without an end."""
        stream = self._new_stream(record)
        for start in range(record.prompt_length, len(record.tokens), PIECE):
            stream.append_tokens(record.tokens[start : start + PIECE])
            await asyncio.sleep(0)  # other sessions' tokens do not wait for all of a long text
        return stream

    def _new_stream(self, record: SessionRecord) -> OutputStream:
        request, stored = request_of(record), gateway_pb2.StoredRequest.FromString(record.params)
        started = gateway_pb2.Started(
            session_id=record.id,
            seed=request.sampling.seed,
            prompt_token_ids=record.tokens[: record.prompt_length],
            model=request.model,
            revision=stored.revision,
        )
        wanted = request.logprobs or request.HasField("prompt_logprobs")
        every = request.show_special_tokens
        shown = (self._tokenizer.shown_special if every else self._tokenizer.shown) if wanted else number_only
        before = started.prompt_token_ids if stored.follows_prompt else ()
        special = self._tokenizer.special_token_ids if every else frozenset(request.shown_special_token_ids)
        if not (every and request.include_stop):
            special = special.difference(request.stop_token_ids)
        left_out = () if request.include_stop else request.stop_token_ids
        detokenizer = self._tokenizer.detokenizer(before, special, left_out, as_text=every)
        transcript = Transcript(detokenizer, request.stop, shown, include_stop=request.include_stop)
        return OutputStream(started, transcript)

    def _new_id(self) -> str:
        return f"{self._context.random_bits(128):032x}"

    @contextlib.contextmanager
    def _client(self) -> Iterator[None]:
        self._clients += 1
        try:
            yield
        finally:
            self._clients -= 1

    @contextlib.contextmanager
    def _arrival(self, tenant: Tenant) -> Iterator[None]:
        self._arriving[tenant.name] += 1
        try:
            yield
        finally:
            self._arriving[tenant.name] -= 1
            if not self._arriving[tenant.name]:
                del self._arriving[tenant.name]

    def _count(self, tenant: Tenant) -> SessionCount:
        """As a request of this tenant finds it that is counted as arriving itself."""
        own = sum(entry.resolved.owner == tenant.name for entry in self._entries.values())
        arriving = self._arriving.total() - 1
        return SessionCount(len(self._entries) + arriving, own + self._arriving[tenant.name] - 1)


def _charged_by_resume(record: SessionRecord, epoch: int) -> bool:
    """Whether a session is charged for its text when it is taken up, which computes it again. Not at first: who is
    interrupted by a fault of the service pays nothing. Nor for moves to other verifiers, however many."""
    return epoch - moves_of(record.params) > FREE_EPOCHS


async def _reserve(
    tenant: Tenant, resolved: ResolvedRequest, generated: int, *, again: bool = False
) -> TokenReservation:
    """The tenant's tokens for what is left of a session. What was generated, or written by a rollback, was paid for,
    unless it is computed `again` at the tenant's expense."""
    prompt = len(resolved.prompt) + generated if again or not generated else 0
    return await tenant.admit(prompt, max(0, resolved.max_length - len(resolved.prompt) - generated))


async def _uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Do all of the work even if the caller is cancelled in the middle."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # there may be no caller left to see it
    return await asyncio.shield(task)
