"""A remote drafter as a source of candidates: a link, and the sessions on it. Frames are checked and grafted on trees.

A drafter can be late, wrong, dead or hostile: one bad frame costs one session its drafter, and no step waits for it
longer than the wait policy allows.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

import grpc

from slipstream.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, SlipstreamError, Unavailable
from slipstream.rpc import proto_conversion
from slipstream.rpc.multiplexed_stream import MultiplexedStream
from slipstream.v1 import drafter_pb2, drafter_pb2_grpc, types_pb2
from verifier_svc.session import DraftedSession
from verifier_svc.sources.flow_control import AHEAD, BYTES, FrameRate, WorkAllowance, read_frame, work_of
from verifier_svc.sources.liveness import LivenessMonitor
from verifier_svc.sources.source import Attachment, SourceContext
from verifier_svc.wait_policy.arrival_times import ArrivalTimes

LEAST_NODES = 16
"""Nodes that a drafter may answer a command with, whatever its policy allows: frames of an older policy are late."""
MAX_REOPENS = 3
"""Times a session is opened again because its drafter missed a commit; a drafter that always does is no use."""


@dataclass(slots=True, eq=False)
class LinkedSession(Attachment):
    """One session on a remote drafter."""

    reopens: int = 0
    """Times the drafter reported that it missed a commit."""
    opened: float = 0.0
    """Monotonic seconds."""
    owed: float = -math.inf
    """Monotonic seconds since which the drafter owes the session a step, unless it gave a sign of life later."""
    reported: bool = False
    """Whether the gateway was informed that there is no link."""
    max_nodes: int = 0
    """Nodes that its latest policy allows; 0 while it is to pause."""
    known: int = 0
    """Committed tokens that the drafter has, or that are on their way to it."""
    allowance: WorkAllowance = field(default_factory=WorkAllowance)


class DrafterLink:
    """The link to one drafter and the sessions on it."""

    def __init__(self, address: str, context: SourceContext) -> None:
        self.address = address
        self.arrival_times = ArrivalTimes()
        self._context = context
        self._by_number: dict[int, LinkedSession] = {}
        self._by_session: dict[DraftedSession, LinkedSession] = {}
        self._allowance, self._rate = WorkAllowance(), FrameRate(context.clock())
        self._channel = context.dial(f"dns:///{address}")  # the scheme is explicit: `unix:1` would be a file
        self._liveness = LivenessMonitor(context.silence_s, context.clock, self._channel)
        stub = drafter_pb2_grpc.DrafterServiceStub(self._channel)
        self._link: MultiplexedStream[drafter_pb2.DraftCommand, drafter_pb2.DraftRequest, drafter_pb2.DraftResponse] = (
            MultiplexedStream(
                stub.Draft, lambda commands: drafter_pb2.DraftRequest(commands=commands), self, traffic=context.traffic
            )
        )

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._link.run())
                tasks.create_task(self._liveness.run(self._report_unreached, self._owed_since, self._detach_silent))
        finally:
            await self._channel.close()

    @property
    def idle(self) -> bool:
        """Whether no session has it."""
        return not self._by_session

    @property
    def serves(self) -> bool:
        """Whether steps take its candidates for any session; shadows' candidates are in no step."""
        return any(session.served for session in self._by_session)

    @property
    def up(self) -> bool:
        return self._link.up

    def open(self, session: DraftedSession, name: str) -> None:
        known = self._by_session.get(session)
        if known is None:
            self._open(session, name)
        elif known.name != name:
            known.name = name
            session.name_source(known.number, name)

    def close(self, session: DraftedSession) -> None:
        attachment = self._by_session.get(session)
        if attachment is not None:
            self._forget(attachment)
            self._send(attachment, close=drafter_pb2.DraftClose())

    def root_moved(self, session: DraftedSession) -> None:
        attachment = self._by_session.get(session)
        if attachment is not None:
            attachment.root_moved(self._context.clock(), awaited=self._expected(attachment))

    def committed(self, session: DraftedSession, base: int, token_ids: list[int]) -> None:
        attachment = self._by_session.get(session)
        # While it pauses, it is sent nothing: a message for each round would take time of cores that the target may
        # share. The first commit after a pause holds the tokens of all rounds in between.
        if attachment is None or not attachment.max_nodes:
            return
        if not session.tree.follows(attachment.number):
            self._expect_step(attachment)
        length, known = base + len(token_ids), attachment.known
        commit = drafter_pb2.DraftCommit(base_length=known, token_ids=session.tokens[known:length])
        attachment.known = length
        self._context.observer.drafter_informed(session, attachment.number, length, self._context.clock())
        self._context.annotator.annotate_commit(session, commit)
        self._send(attachment, commit=commit)

    def collect(self) -> None:
        """Frames are grafted when they arrive."""

    @property
    def once_a_round(self) -> bool:
        return False

    def step_held(self, session: DraftedSession) -> None:
        pass

    def awaited(self, session: DraftedSession) -> Attachment | None:
        attachment = self._by_session.get(session)
        return attachment if attachment is not None and self._expected(attachment) else None

    def policy_changed(self, session: DraftedSession) -> None:
        attachment = self._by_session.get(session)
        if attachment is not None:
            self._send(attachment, policy=self._policy(session))

    def quarantine(self, session: DraftedSession, error: SlipstreamError) -> None:
        attachment = self._by_session.get(session)
        if attachment is not None:
            self.close(session)
            self._detach(attachment, error)

    def dismiss(self) -> None:
        """Close all sessions: the link's place is given to another drafter."""
        for session in list(self._by_session):
            self.quarantine(session, ResourceExhausted("the verifier needs the link for another drafter."))

    # Called by the multiplexed stream.

    def connected(self) -> None:
        self._liveness.restarted()
        for session, attachment in list(self._by_session.items()):
            self._open(session, attachment.name)
            if (opened := self._by_session.get(session)) is not None:
                opened.report_working()

    def lost(self, error: SlipstreamError) -> None:
        self._liveness.restarted()
        for attachment in self._by_session.values():
            self._report_unlinked(attachment, error)

    def receive(self, frame: drafter_pb2.DraftResponse) -> None:
        self._liveness.note_progress()
        work = 1 + frame.ByteSize() // BYTES + len(frame.candidates) + len(frame.refusals)
        if not (self._rate.admit(self._context.clock()) and self._allowance.spend(work)):
            self._cut_off_flood()
            return
        news = False
        for candidates in frame.candidates:
            attachment = self._by_number.get(candidates.session)
            if attachment is not None and candidates.epoch == attachment.session.request.epoch:
                news = self._take(attachment, candidates) or news
                continue
            self._context.dropped["unknown_session"] += len(candidates.token_ids)  # late, or for no session
            if not self._allowance.spend(len(candidates.token_ids)):
                self._cut_off_flood()
                return
        for refusal in frame.refusals:
            refused = self._by_number.get(refusal.session)
            if refused is not None and refusal.epoch == refused.session.request.epoch:
                self._refused(refused, proto_conversion.failure_from_proto(refusal.failure))
                news = news or refused.session.served
        if news:  # an empty frame is no reason to plan a step
            self._context.candidates_arrived()

    def _take(self, attachment: LinkedSession, candidates: types_pb2.Candidates) -> bool:
        """Whether they changed anything that a step looks at."""
        try:
            return self._graft(attachment, candidates)
        except SlipstreamError as error:
            self.quarantine(attachment.session, error)
            return attachment.session.served

    def _graft(self, attachment: LinkedSession, candidates: types_pb2.Candidates) -> bool:
        """Raises InvalidArgument for what no correct drafter sends, FailedPrecondition for a base from the future,
        ResourceExhausted for more than the session's allowance."""
        session, vocabulary_size = attachment.session, self._context.target.vocabulary_size
        try:
            frame = read_frame(
                candidates,
                attachment.number,
                vocabulary_size,
                session.tree.limits,
                with_distributions=session.request.sampling.drawn,
            )
            if not attachment.allowance.spend(work_of(frame)):
                raise _flood("the drafter sends more candidates than a session can use.")
            added = self._context.graft(session, frame)
        except SlipstreamError:
            self._context.dropped["invalid"] += len(candidates.token_ids)
            raise
        if not added or not session.served:  # no step waits for a shadow
            return False
        attachment.candidates_came(self._context.clock())
        self._context.observer.candidates_received(session, attachment.number, candidates, self._context.clock())
        return True

    def _refused(self, attachment: LinkedSession, error: SlipstreamError) -> None:
        missed = error.code is grpc.StatusCode.OUT_OF_RANGE  # a commit: a new open brings the whole prefix
        if missed and attachment.reopens < MAX_REOPENS:
            self._open(attachment.session, attachment.name, attachment.reopens + 1)
            return
        self._forget(attachment)
        self._detach(attachment, error)

    def _cut_off_flood(self) -> None:
        """The drafter sends more than all its sessions together can use: all leave it, and the stream is closed."""
        for session in list(self._by_session):
            self.quarantine(session, _flood("the drafter floods its stream."))
        self._link.drop()

    # Called by the liveness monitor.

    def _detach_silent(self) -> None:
        for session in list(self._by_session):
            message = f"the drafter took no step for {self._context.silence_s:g} s although it was asked to."
            self.quarantine(session, DeadlineExceeded(message, reason="SILENT"))

    def _report_unreached(self) -> None:
        """A link that does not come up is reported like one that broke."""
        latest = self._context.clock() - self._context.silence_s
        for each in self._by_session.values():
            if not self._link.up and not each.reported and max(each.opened, self._liveness.resumed_at) <= latest:
                self._report_unlinked(each, Unavailable("the drafter cannot be reached from the verifier."))

    def _report_unlinked(self, attachment: LinkedSession, error: SlipstreamError) -> None:
        attachment.reported = True
        attachment.report_unlinked(error)

    def _open(self, session: DraftedSession, name: str, reopens: int = 0) -> None:
        self.close(session)
        number = next(self._context.numbers)
        now = self._context.clock()
        attachment = LinkedSession(session, self.arrival_times, name, number, now, reopens=reopens, opened=now)
        attachment.known = len(session.tokens)
        self._by_number[number] = self._by_session[session] = attachment
        session.name_source(number, name)
        request = self._open_request(session)
        self._context.observer.drafter_informed(session, number, len(session.tokens), now)
        self._context.annotator.annotate_open(session, name, request)
        self._send(attachment, open=request)
        self._expect_step(attachment)

    def _expected(self, attachment: LinkedSession) -> bool:
        """Whether candidates are to come: a drafter that may not send any is not late."""
        return self._link.up and attachment.max_nodes > 0 and len(attachment.session.tokens) < self._liveness.max_length

    def _expect_step(self, attachment: LinkedSession) -> None:
        """A live drafter takes a step for what it is sent now, unless it has nothing to do for the session."""
        if self._expected(attachment) and attachment.owed <= self._liveness.progress_at:
            attachment.owed = self._context.clock()

    def _owed_since(self) -> float:
        signed = self._liveness.progress_at
        return min((each.owed for each in self._by_session.values() if each.owed > signed), default=math.inf)

    def _forget(self, attachment: LinkedSession) -> None:
        del self._by_number[attachment.number], self._by_session[attachment.session]
        attachment.session.tree.forget(attachment.number)

    def _detach(self, attachment: LinkedSession, error: SlipstreamError) -> None:
        self._context.detach(attachment.session, self)
        attachment.report_given_up(error)

    def _send(
        self,
        attachment: LinkedSession,
        *,
        open: drafter_pb2.DraftOpen | None = None,
        commit: drafter_pb2.DraftCommit | None = None,
        policy: drafter_pb2.DraftPolicy | None = None,
        close: drafter_pb2.DraftClose | None = None,
    ) -> None:
        if not self._link.up:
            return  # `connected` opens every session again
        flow = policy or (open.policy if open is not None else None)
        if flow is not None:
            attachment.max_nodes = flow.max_nodes
            attachment.owed = attachment.owed if flow.max_nodes else -math.inf
        if close is None:
            nodes = max(LEAST_NODES, attachment.max_nodes)
            attachment.allowance.earn(nodes, with_distributions=attachment.session.request.sampling.drawn)
            self._allowance.earn(2 * nodes, 1 + len(self._by_session))
        number, epoch = attachment.number, attachment.session.request.epoch
        command = drafter_pb2.DraftCommand(
            session=number, epoch=epoch, open=open, commit=commit, policy=policy, close=close
        )
        try:
            self._link.send(command)
        except ResourceExhausted:  # it does not read: the stream is closed and opened again
            pass
        except InvalidArgument as error:  # the session is too large for any link; others' commands go on
            self.quarantine(attachment.session, error)

    def _open_request(self, session: DraftedSession) -> drafter_pb2.DraftOpen:
        return drafter_pb2.DraftOpen(
            key=types_pb2.SessionKey(id=session.request.id, epoch=session.request.epoch),
            prefix=types_pb2.Prefix(token_ids=session.tokens, prompt_length=session.request.prompt_length),
            sampling=proto_conversion.sampling_to_proto(session.request.sampling),
            target=self._context.target,
            policy=self._policy(session),
            max_length=session.request.max_length,
            prediction_token_ids=session.request.prediction,
            cache_salt=session.request.cache_salt,
            tenant=session.request.tenant,
            structured_output=proto_conversion.structure_to_proto(session.request.structure),
        )

    def _policy(self, session: DraftedSession) -> drafter_pb2.DraftPolicy:
        wanted = session.request.max_draft_tokens if self._context.wants(session) else 0
        return drafter_pb2.DraftPolicy(max_nodes=AHEAD * wanted, min_path_probability=self._context.threshold)


def _flood(message: str) -> ResourceExhausted:
    return ResourceExhausted(message, reason="FLOODING")
