"""One drafter as the verifier sees it: a link, and the sessions on it. Frames are checked and grafted on trees.

A drafter can be late, wrong, dead or hostile: one bad frame costs one session its drafter, and no step ever waits for
it longer than the waiting rule says.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING

import grpc

from slipstream.errors import DeadlineExceeded, ResourceExhausted, SlipstreamError, Unavailable
from slipstream.rpc import proto_conversion
from slipstream.rpc.multiplexed_stream import MultiplexedStream
from slipstream.v1 import drafter_pb2, drafter_pb2_grpc, types_pb2
from verifier_svc.session import Session
from verifier_svc.sources.attachment import Attachment
from verifier_svc.sources.flow_control import AHEAD, BYTES, FrameRate, WorkAllowance
from verifier_svc.sources.frame_reader import read
from verifier_svc.sources.liveness import LivenessMonitor
from verifier_svc.wait_policy.arrival_times import ArrivalTimes

if TYPE_CHECKING:
    from verifier_svc.sources.drafter_pool import DrafterPool

LEAST_NODES = 16
"""What a drafter is believed to be able to answer with, whatever its policy says: frames of an older one are late."""
MAX_REOPENS = 3
"""How often a session is opened again because its drafter missed a commit; a drafter that always does is no use."""


class DrafterLink:
    """The link to one drafter and the sessions on it."""

    def __init__(self, address: str, pool: DrafterPool) -> None:
        self.address = address
        self.pace = ArrivalTimes()
        self._pool = pool
        self._attached: dict[int, Attachment] = {}
        self._by_session: dict[Session, Attachment] = {}
        self._allowance, self._rate = WorkAllowance(), FrameRate(pool.clock())
        self._channel = pool.dial(f"dns:///{address}")  # said outright: `unix:1` would be a file
        self._vigil = LivenessMonitor(pool.silence_s, pool.clock, self._channel)
        stub = drafter_pb2_grpc.DrafterServiceStub(self._channel)
        self._link: MultiplexedStream[drafter_pb2.DraftCommand, drafter_pb2.DraftRequest, drafter_pb2.DraftResponse] = (
            MultiplexedStream(
                stub.Draft, lambda commands: drafter_pb2.DraftRequest(commands=commands), self, traffic=pool.traffic
            )
        )

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._link.run())
                tasks.create_task(self._vigil.run(self._unreached, self._owed, self._silent))
        finally:
            await self._channel.close()

    @property
    def idle(self) -> bool:
        return not self._by_session

    @property
    def serves(self) -> bool:
        """Whether any session's steps take its candidates."""
        return any(session.served for session in self._by_session)

    @property
    def up(self) -> bool:
        return self._link.up

    def attachment(self, session: Session) -> Attachment | None:
        return self._by_session.get(session)

    def attach(self, session: Session, name: str) -> None:
        """Draft for the session from now on, under the name that its gateway gives to this drafter."""
        known = self._by_session.get(session)
        if known is None:
            self._open(session, name)
        elif known.name != name:
            known.name = name
            session.name_source(known.number, name)

    def reopen(self, session: Session) -> None:
        """Start again on the session's present prefix."""
        self._open(session, self._by_session[session].name)

    def moved(self, session: Session) -> None:
        """The session's root moved; the drafter will be told."""
        attachment = self._by_session.get(session)
        if attachment is not None:
            attachment.asked(self._pool.clock(), answering=self.awaited(attachment))

    def awaited(self, attachment: Attachment) -> bool:
        """Whether candidates are to come: a drafter that may not send any is not late."""
        return self._link.up and attachment.nodes > 0 and len(attachment.session.tokens) < self._vigil.max_length

    def commit(self, session: Session, base: int, token_ids: list[int]) -> None:
        """Tells the drafter what was committed."""
        attachment = self._by_session.get(session)
        if attachment is None:
            return
        if not session.tree.follows(attachment.number):
            self._expect(attachment)
        if session.trace is not None:
            session.trace.told(attachment.number, base + len(token_ids), self._pool.clock())
        self._send(attachment, commit=drafter_pb2.DraftCommit(base_length=base, token_ids=token_ids))

    def policy(self, session: Session) -> None:
        """The session's max_draft_tokens changed."""
        attachment = self._by_session.get(session)
        if attachment is not None:
            self._send(attachment, policy=self._policy(session))

    def close(self, session: Session) -> None:
        """Stop drafting for a session; what only this drafter guessed leaves its tree."""
        attachment = self._by_session.get(session)
        if attachment is not None:
            self._forget(attachment)
            self._send(attachment, close=drafter_pb2.DraftClose())

    def quarantine(self, session: Session, error: SlipstreamError) -> None:
        """What else this drafter sends for the session is not looked at, until the gateway attaches it again."""
        attachment = self._by_session[session]
        self.close(session)
        self._give_up(attachment, error)

    def dismiss(self) -> None:
        """Its link is given to another drafter."""
        for session in list(self._by_session):
            self.quarantine(session, ResourceExhausted("the verifier needs the link for another drafter."))

    # What the link reports.

    def connected(self) -> None:
        self._vigil.restarted()
        for session in list(self._by_session):
            self.reopen(session)
            self._by_session[session].attached()

    def lost(self, error: SlipstreamError) -> None:
        self._vigil.restarted()
        for attachment in self._by_session.values():
            attachment.unlinked(error)

    def receive(self, frame: drafter_pb2.DraftResponse) -> None:
        self._vigil.note_progress()
        work = 1 + frame.ByteSize() // BYTES + len(frame.candidates) + len(frame.refusals)
        if not (self._rate.admit(self._pool.clock()) and self._allowance.spend(work)):
            self._flooded()
            return
        news = False
        for candidates in frame.candidates:
            attachment = self._attached.get(candidates.session)
            if attachment is not None and candidates.epoch == attachment.session.epoch:
                news = self._take(attachment, candidates) or news
                continue
            self._pool.dropped["nobody"] += len(candidates.token_ids)  # late, or for nobody
            if not self._allowance.spend(len(candidates.token_ids)):
                self._flooded()
                return
        for refusal in frame.refusals:
            refused = self._attached.get(refusal.session)
            if refused is not None and refusal.epoch == refused.session.epoch:
                self._refused(refused, proto_conversion.failure_from_wire(refusal.failure))
                news = news or refused.session.served
        if news:  # a frame that says nothing is no reason to plan a step
            self._pool.arrived()

    def _take(self, attachment: Attachment, candidates: types_pb2.Candidates) -> bool:
        """Whether they changed anything that a step looks at."""
        try:
            news = self._graft(attachment, candidates)
            if not attachment.allowance.spend(1 + len(candidates.token_ids)):
                raise _flood("the drafter sends more candidates than a session can use.")
            return news
        except SlipstreamError as error:
            if error.reason == error.code.name:
                error.reason = "PROTOCOL"
            self.quarantine(attachment.session, error)
            return attachment.session.served

    def _graft(self, attachment: Attachment, candidates: types_pb2.Candidates) -> bool:
        """Raises InvalidArgument for what no correct drafter sends, FailedPrecondition for a base from the future."""
        tree = attachment.session.tree
        try:
            grafted = tree.graft(read(candidates, attachment.number, self._pool.vocabulary_size, tree.limits))
        except SlipstreamError:
            self._pool.dropped["invalid"] += len(candidates.token_ids)
            raise
        if grafted.dropped and attachment.session.served:
            self._pool.dropped.update(grafted.dropped)
        if not grafted.added or not attachment.session.served:  # nobody waits for a shadow
            return False
        attachment.arrived(self._pool.clock())
        if attachment.session.trace is not None:
            attachment.session.trace.arrived(attachment.number, candidates, self._pool.clock())
        return True

    def _refused(self, attachment: Attachment, error: SlipstreamError) -> None:
        missed = error.code is grpc.StatusCode.OUT_OF_RANGE  # a commit: the prefix says all
        if missed and attachment.reopens < MAX_REOPENS:
            self._open(attachment.session, attachment.name, attachment.reopens + 1)
            return
        self._forget(attachment)
        self._give_up(attachment, error)

    def _flooded(self) -> None:
        """It sends more than all its sessions together can use: none keeps it, and the stream is broken off."""
        for session in list(self._by_session):
            self.quarantine(session, _flood("the drafter floods its stream."))
        self._link.drop()

    # What the vigil reports.

    def _silent(self) -> None:
        for session in list(self._by_session):
            message = f"the drafter took no step for {self._pool.silence_s:g} s although it was asked to."
            self.quarantine(session, DeadlineExceeded(message, reason="SILENT"))

    def _unreached(self) -> None:
        """A link that does not come up is told of as one that broke."""
        latest = self._pool.clock() - self._pool.silence_s
        for attachment in self._by_session.values():
            if not self._link.up and not attachment.told and max(attachment.opened, self._vigil.resumed_at) <= latest:
                attachment.unlinked(Unavailable("the drafter cannot be reached from the verifier."))

    def _open(self, session: Session, name: str, reopens: int = 0) -> None:
        self.close(session)
        number = self._pool.next_number()
        now = self._pool.clock()
        attachment = Attachment(session, self.pace, name, number, now, reopens=reopens, opened=now)
        self._attached[number] = self._by_session[session] = attachment
        session.name_source(number, name)
        if session.trace is not None:
            session.trace.told(number, len(session.tokens), now)
        self._send(attachment, open=self._open_request(session))
        self._expect(attachment)

    def _expect(self, attachment: Attachment) -> None:
        """A live drafter takes a step for what it is told now, unless it has nothing to do for the session."""
        if self.awaited(attachment) and attachment.owed <= self._vigil.progress_at:
            attachment.owed = self._pool.clock()

    def _owed(self) -> float:
        signed = self._vigil.progress_at
        return min((each.owed for each in self._by_session.values() if each.owed > signed), default=math.inf)

    def _forget(self, attachment: Attachment) -> None:
        del self._attached[attachment.number], self._by_session[attachment.session]
        attachment.session.tree.forget(attachment.number)

    def _give_up(self, attachment: Attachment, error: SlipstreamError) -> None:
        self._pool.gave_up(attachment.session, self)
        attachment.given_up(error)

    def _send(
        self,
        attachment: Attachment,
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
            attachment.nodes = flow.max_nodes
            attachment.owed = attachment.owed if flow.max_nodes else -math.inf
        if close is None:
            nodes = max(LEAST_NODES, attachment.nodes)
            attachment.allowance.earn(nodes)
            self._allowance.earn(2 * nodes, 1 + len(self._by_session))
        number, epoch = attachment.number, attachment.session.epoch
        with contextlib.suppress(ResourceExhausted):  # it does not read: the link breaks the stream and dials again
            self._link.send(
                drafter_pb2.DraftCommand(
                    session=number, epoch=epoch, open=open, commit=commit, policy=policy, close=close
                )
            )

    def _open_request(self, session: Session) -> drafter_pb2.DraftOpen:
        return drafter_pb2.DraftOpen(
            key=types_pb2.SessionKey(id=session.id, epoch=session.epoch),
            prefix=types_pb2.Prefix(token_ids=session.tokens, prompt_length=session.prompt_length),
            sampling=proto_conversion.sampling_to_wire(session.sampling),
            target=self._pool.target,
            policy=self._policy(session),
            max_length=session.max_length,
            prediction_token_ids=session.prediction,
            cache_salt=session.cache_salt,
            structured_output=proto_conversion.structure_to_wire(session.structure),
            trace=None if session.trace is None else session.trace.trace.context(self._by_session[session].name),
        )

    def _policy(self, session: Session) -> drafter_pb2.DraftPolicy:
        wanted = session.max_draft_tokens if self._pool.wanted else 0
        return drafter_pb2.DraftPolicy(max_nodes=AHEAD * wanted, min_path_probability=self._pool.threshold)


def _flood(message: str) -> ResourceExhausted:
    return ResourceExhausted(message, reason="FLOODING")
