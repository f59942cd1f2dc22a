"""The drafters of a verifier: one link for each, dialled when a session first needs it. Frames are grafted on trees.

A drafter can be late, wrong, dead or hostile: its frames are checked, one bad frame costs one session its drafter, and
no step ever waits for it longer than the waiting rule says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from slipstream import proposal, wire
from slipstream.client import channel
from slipstream.errors import InvalidArgument, ResourceExhausted, SlipstreamError
from slipstream.frame import Frame, check
from slipstream.links import Link
from slipstream.proposal import Proposal
from slipstream.v1 import drafter_pb2, drafter_pb2_grpc, types_pb2, verifier_pb2
from verifier_svc.pace import Average, Pace
from verifier_svc.session import Session

MAX_DRAFTERS = 64
"""Links one verifier keeps, whatever gateways ask for."""


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
    def up(self) -> bool:
        return self._link.up

    def attachment(self, session: Session) -> Attachment | None:
        return self._by_session.get(session)

    def open(self, session: Session) -> None:
        """Start drafting for a session, or start again on its present prefix."""
        known = self._by_session.pop(session, None)
        if known is not None:
            del self._attached[known.number]
            self._send(known, close=drafter_pb2.DraftClose())
        number = self._pool.next_number()
        attachment = Attachment(session, self, number, number, self._pool.clock())
        self._attached[number] = self._by_session[session] = attachment
        self._send(attachment, open=self._open_request(session))

    def commit(self, session: Session, base: int, token_ids: list[int]) -> None:
        attachment = self._by_session.get(session)
        if attachment is None:
            return
        if session.tree.empty:  # the drafter's tree was left or used up: a new first candidate is on its way
            attachment.since, attachment.fresh = self._pool.clock(), True
        self._send(attachment, commit=drafter_pb2.DraftCommit(base_length=base, token_ids=token_ids))

    def close(self, session: Session) -> None:
        attachment = self._by_session.pop(session, None)
        if attachment is not None:
            del self._attached[attachment.number]
            self._send(attachment, close=drafter_pb2.DraftClose())

    def quarantine(self, session: Session, error: SlipstreamError) -> None:
        """What else this drafter sends for the session is not looked at."""
        self.close(session)
        self._event(session, error)

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
        if error.code is grpc.StatusCode.OUT_OF_RANGE:  # it missed a commit: the prefix says all
            self.open(attachment.session)
            return
        self._forget(attachment)
        self._event(attachment.session, error)

    def _forget(self, attachment: Attachment) -> None:
        self._attached.pop(attachment.number, None)
        self._by_session.pop(attachment.session, None)

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
        close: drafter_pb2.DraftClose | None = None,
    ) -> None:
        if not self._link.up:
            return  # `connected` opens every session again
        command = drafter_pb2.DraftCommand(
            session=attachment.number, epoch=attachment.session.epoch, open=open, commit=commit, close=close
        )
        try:
            self._link.send(command)
        except ResourceExhausted:  # it does not read: dial again
            self._link.drop()

    def _open_request(self, session: Session) -> drafter_pb2.DraftOpen:
        return drafter_pb2.DraftOpen(
            key=types_pb2.SessionKey(id=session.id, epoch=session.epoch),
            prefix=types_pb2.Prefix(token_ids=session.tokens, prompt_length=session.prompt_length),
            sampling=wire.sampling_to_wire(session.sampling),
            target=self._pool.target,
            policy=drafter_pb2.DraftPolicy(
                max_nodes=2 * session.max_draft_tokens + 1,  # one round in verification, one ahead, and the bonus token
                min_path_probability=self._pool.min_path_probability,
            ),
            max_length=session.max_length,
        )


def _frame(candidates: types_pb2.Candidates, source: int) -> Frame:
    return Frame(
        base_length=candidates.base_length,
        generation=candidates.generation,
        first_node=candidates.first_node,
        token_ids=tuple(candidates.token_ids),
        log_probs=tuple(candidates.log_probs),
        parents=tuple(candidates.parents),
        distributions=tuple(Proposal(tuple(d.token_ids), tuple(d.weights)) for d in candidates.distributions),
        source=source,
    )


class Drafters:
    """All drafters of this verifier, by address."""

    def __init__(
        self,
        target: types_pb2.ModelInfo,
        min_path_probability: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.target = target
        self.vocabulary_size = target.vocabulary_size
        self.min_path_probability = min_path_probability
        self.arrived: Callable[[], None] = lambda: None
        """Called whenever candidates came: a step may be worth starting. The scheduler puts itself here."""
        self.clock = clock
        self._drafters: dict[str, Drafter] = {}
        self._of_session: dict[Session, list[Drafter]] = {}
        self._numbers = 0
        self._tasks: asyncio.TaskGroup | None = None

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    async def run(self) -> None:
        """Keeps the links; cancelled when the verifier ends."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for drafter in self._drafters.values():
                tasks.create_task(drafter.run())
            await asyncio.Event().wait()

    def attach(self, session: Session, addresses: list[verifier_pb2.DrafterAddress]) -> None:
        """The session's drafters are now these. Raises ResourceExhausted when there are too many different ones."""
        wanted = [self._drafter(address) for address in addresses] if session.max_draft_tokens else []
        for drafter in self._of_session.get(session, []):
            if drafter not in wanted:
                drafter.close(session)
        for drafter in wanted:
            if drafter.attachment(session) is None:
                drafter.open(session)
        self._of_session[session] = wanted

    def detach(self, session: Session) -> None:
        for drafter in self._of_session.pop(session, []):
            drafter.close(session)

    def commit(self, session: Session, base: int, token_ids: list[int]) -> None:
        for drafter in self._of_session.get(session, ()):
            drafter.commit(session, base, token_ids)

    def disbelieve(self, session: Session, error: SlipstreamError) -> None:
        """A draft token lay outside its own q: nobody who drafts for this session can be believed."""
        for drafter in self._of_session.get(session, ()):
            drafter.quarantine(session, error)

    def reopen(self, session: Session) -> None:
        """The prefix changed otherwise than by a commit (rollback)."""
        for drafter in self._of_session.get(session, ()):
            drafter.open(session)

    def expected_s(self, session: Session, now: float) -> float | None:
        """Seconds until the session's next candidate; None when none is to be waited for."""
        expected = [
            attachment.expected_s(now)
            for drafter in self._of_session.get(session, ())
            if drafter.up and (attachment := drafter.attachment(session)) is not None
        ]
        return min((seconds for seconds in expected if seconds is not None), default=None)

    def _drafter(self, address: verifier_pb2.DrafterAddress) -> Drafter:
        if not address.address:
            raise InvalidArgument("a drafter needs an address.")
        known = self._drafters.get(address.address)
        if known is not None:
            return known
        if len(self._drafters) >= MAX_DRAFTERS:
            raise ResourceExhausted(f"this verifier knows {MAX_DRAFTERS} drafters already; name one of them.")
        drafter = self._drafters[address.address] = Drafter(address.name or address.address, address.address, self)
        if self._tasks is not None:
            self._tasks.create_task(drafter.run())
        return drafter
