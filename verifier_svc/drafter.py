"""One drafter as the verifier sees it: a link, and the sessions on it. Frames are checked and grafted on trees.

A drafter can be late, wrong, dead or hostile: one bad frame costs one session its drafter, and no step ever waits for
it longer than the waiting rule says.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from slipstream import proposal, wire
from slipstream.client import channel
from slipstream.errors import ResourceExhausted, SlipstreamError
from slipstream.frame import Frame, check
from slipstream.links import Link
from slipstream.proposal import Proposal
from slipstream.v1 import drafter_pb2, drafter_pb2_grpc, types_pb2, verifier_pb2
from verifier_svc.pace import Average, Pace
from verifier_svc.session import Session

if TYPE_CHECKING:
    from verifier_svc.drafters import Drafters

MAX_REOPENS = 3
"""How often a session is opened again because its drafter missed a commit; a drafter that always does is no use."""


@dataclass(slots=True, eq=False)
class Attachment:
    """One session on one drafter. Each open gets a number and a source of its own, so that frames sent before it, which
    stand on something else, name nothing."""

    session: Session
    drafter: Drafter
    number: int
    source: int
    since: float
    """Monotonic seconds: when the drafter was asked, or its last candidate came."""
    fresh: bool = True
    """Whether nothing came yet since the drafter's tree was left."""
    reopens: int = 0
    """How often the drafter said that it missed a commit."""

    def expected_s(self, now: float) -> float | None:
        return self.drafter.pace.expected_s(now, self.since, self.fresh)


class Drafter:
    """The link to one drafter and the sessions on it."""

    def __init__(self, name: str, address: str, pool: Drafters) -> None:
        self.name = name
        self.pace = Pace(Average(), Average())
        self._pool = pool
        self._attached: dict[int, Attachment] = {}
        self._by_session: dict[Session, Attachment] = {}
        self._channel = channel(address)
        stub = drafter_pb2_grpc.DrafterServiceStub(self._channel)
        self._link: Link[drafter_pb2.DraftCommand, drafter_pb2.DraftRequest, drafter_pb2.DraftResponse] = Link(
            stub.Draft, lambda commands: drafter_pb2.DraftRequest(commands=commands), self
        )

    async def run(self) -> None:
        try:
            await self._link.run()
        finally:
            await self._channel.close()

    @property
    def idle(self) -> bool:
        return not self._by_session

    @property
    def up(self) -> bool:
        return self._link.up

    def attachment(self, session: Session) -> Attachment | None:
        return self._by_session.get(session)

    def open(self, session: Session, reopens: int = 0) -> None:
        """Start drafting for a session, or start again on its present prefix."""
        self.close(session)
        number = self._pool.next_number()
        attachment = Attachment(session, self, number, number, self._pool.clock(), reopens=reopens)
        self._attached[number] = self._by_session[session] = attachment
        session.name_source(number, self.name)
        self._send(attachment, open=self._open_request(session))

    def commit(self, session: Session, base: int, token_ids: list[int]) -> None:
        attachment = self._by_session.get(session)
        if attachment is None:
            return
        if session.tree.empty:  # the drafter's tree was left or used up: a new first candidate is on its way
            attachment.since, attachment.fresh = self._pool.clock(), True
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
        self.close(session)
        self._give_up(session, error)

    # What the link reports.

    def connected(self) -> None:
        for session in list(self._by_session):
            self.open(session)
            self._event(session, None)

    def lost(self, error: SlipstreamError) -> None:
        for session in self._by_session:
            self._event(session, error)

    def receive(self, frame: drafter_pb2.DraftResponse) -> None:
        for candidates in frame.candidates:
            attachment = self._attached.get(candidates.session)
            if attachment is None or candidates.epoch != attachment.session.epoch:
                continue
            try:
                self._graft(attachment, candidates)
            except SlipstreamError as error:
                self.quarantine(attachment.session, error)
        for refusal in frame.refusals:
            refused = self._attached.get(refusal.session)
            if refused is not None and refusal.epoch == refused.session.epoch:
                self._refused(refused, wire.failure_from_wire(refusal.failure))
        self._pool.arrived()

    def _graft(self, attachment: Attachment, candidates: types_pb2.Candidates) -> None:
        """Raises InvalidArgument for what no correct drafter sends, FailedPrecondition for a base from the future."""
        tree, now = attachment.session.tree, self._pool.clock()
        frame = check(_frame(candidates, attachment.source), self._pool.vocabulary_size, tree.limits)
        for distribution in frame.distributions:
            if distribution is not None:
                proposal.check(distribution, self._pool.vocabulary_size)
        if not tree.graft(frame).added:
            return
        average = self.pace.first if attachment.fresh else self.pace.between
        average.add((now - attachment.since) / max(1, len(candidates.token_ids)))
        attachment.since, attachment.fresh = now, False

    def _refused(self, attachment: Attachment, error: SlipstreamError) -> None:
        missed = error.code is grpc.StatusCode.OUT_OF_RANGE  # a commit: the prefix says all
        if missed and attachment.reopens < MAX_REOPENS:
            self.open(attachment.session, attachment.reopens + 1)
            return
        self._forget(attachment)
        self._give_up(attachment.session, error)

    def _forget(self, attachment: Attachment) -> None:
        del self._attached[attachment.number], self._by_session[attachment.session]
        attachment.session.tree.forget(attachment.source)

    def _give_up(self, session: Session, error: SlipstreamError) -> None:
        self._pool.gave_up(session, self)
        self._event(session, error)

    def _event(self, session: Session, error: SlipstreamError | None) -> None:
        failure = None if error is None else wire.failure_to_wire(error)
        session.say(
            verifier_pb2.DrafterEvent(session=session.number, epoch=session.epoch, drafter=self.name, failure=failure)
        )

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
            sampling=wire.sampling_to_wire(session.sampling),
            target=self._pool.target,
            policy=self._policy(session),
            max_length=session.max_length,
            prediction_token_ids=session.prediction,
            cache_salt=session.cache_salt,
        )

    def _policy(self, session: Session) -> drafter_pb2.DraftPolicy:
        most = session.max_draft_tokens
        return drafter_pb2.DraftPolicy(
            max_nodes=3 * most + 1 if most else 0,  # in verification, ahead, and replacements
            min_path_probability=self._pool.min_path_probability,
        )


def _frame(candidates: types_pb2.Candidates, source: int) -> Frame:
    return Frame(
        base_length=candidates.base_length,
        generation=candidates.generation,
        first_node=candidates.first_node,
        token_ids=tuple(candidates.token_ids),
        log_probs=wire.confidences_from_wire(candidates.confidences),
        parents=tuple(candidates.parents),
        distributions=tuple(Proposal(tuple(d.token_ids), tuple(d.weights)) for d in candidates.distributions),
        source=source,
    )
