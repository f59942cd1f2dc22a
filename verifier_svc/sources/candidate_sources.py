"""The drafters of a verifier, by address: dialled when a session needs one, given up when another needs the room."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection

from slipstream.errors import InvalidArgument, ResourceExhausted, SlipstreamError
from slipstream.rpc import proto_conversion
from slipstream.rpc.channel import Dial, channel
from slipstream.rpc.send_queue import ByteCounter
from slipstream.v1 import types_pb2, verifier_pb2
from verifier_svc.session import Session
from verifier_svc.sources.attachment import tell
from verifier_svc.sources.drafter_link import DrafterLink
from verifier_svc.sources.shadow import ShadowDrafters
from verifier_svc.wait_policy.arrival_times import DelayDistribution
from verifier_svc.wait_policy.draft_threshold import PAUSE

MAX_DRAFTERS = 64
"""Links one verifier keeps, whatever gateways ask for."""
FORGET_S = 60.0
"""How often those that nobody uses and that do not answer are let go: pods come and go, and addresses with them."""
SOON_S = 0.02
"""Within which the drafters of one session are compared."""


class DrafterPool:
    """All drafters of this verifier, by address."""

    def __init__(
        self,
        target: types_pb2.ModelInfo,
        min_path_probability: float,
        clock: Callable[[], float] = time.monotonic,
        silence_s: float = 3.0,
        dial: Dial = channel,
    ) -> None:
        self.target = target
        self.vocabulary_size = target.vocabulary_size
        self.threshold = min_path_probability
        """Path probability that candidates must have; 1: none are wanted."""
        self.arrived: Callable[[], None] = lambda: None
        """Called whenever candidates came: a step may be worth starting. The scheduler puts itself here."""
        self.clock = clock
        self.silence_s = silence_s
        self.dial = dial
        self.traffic = ByteCounter()
        self.dropped: Counter[str] = Counter()
        """Candidates that came and were not taken, by reason."""
        self._drafters: dict[str, DrafterLink] = {}
        self._of_session: dict[Session, list[DrafterLink]] = {}
        self.shadows = ShadowDrafters(self, clock)
        self._numbers = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._links: dict[DrafterLink, asyncio.Task[None]] = {}

    @property
    def wanted(self) -> bool:
        """Whether any candidates pay now."""
        return self.threshold < PAUSE

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    async def run(self) -> None:
        """Keeps the links; cancelled when the verifier ends."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for drafter in self._drafters.values():
                self._links[drafter] = tasks.create_task(drafter.run())
            while True:
                await asyncio.sleep(FORGET_S)
                for address, drafter in list(self._drafters.items()):
                    if drafter.idle and not drafter.up:
                        self._let_go(address)

    def attach(self, session: Session, addresses: list[verifier_pb2.DrafterAddress]) -> None:
        """The session's drafters are now these; one for which there is no link left is left out, and that is told."""
        serving = [address for address in addresses if not address.shadow]
        self.assign(session, serving)
        places = {address.address for address in serving}
        self.shadows.attach(session, [each for each in addresses if each.shadow and each.address not in places])

    def assign(self, session: Session, addresses: list[verifier_pb2.DrafterAddress]) -> None:
        """The same for a session that has no shadows, or is a shadow's double."""
        names: dict[DrafterLink, str] = {}
        for address in addresses:
            name = address.name or address.address
            try:
                names.setdefault(self._drafter(address, names), name)
            except ResourceExhausted as error:
                tell(session, name, proto_conversion.failure_to_wire(error))
        wanted = list(names)
        for drafter in self._of_session.get(session, []):
            if drafter not in wanted:
                drafter.close(session)
        self._of_session[session] = wanted
        for drafter, name in names.items():
            drafter.attach(session, name)

    def detach(self, session: Session) -> None:
        self.shadows.detach(session)
        for drafter in self._of_session.pop(session, []):
            drafter.close(session)

    def policy(self, session: Session) -> None:
        for drafter in self._of_session.get(session, ()):
            drafter.policy(session)
        self.shadows.policy(session)

    def demand(self, threshold: float) -> None:
        """Candidates below this path probability do not pay now."""
        self.threshold = threshold
        for session in self._of_session:
            if session.served:
                self.policy(session)

    def gave_up(self, session: Session, drafter: DrafterLink) -> None:
        """The drafter is not asked again for this session, whatever happens to its prefix."""
        if session in self._of_session:
            self._of_session[session] = [other for other in self._of_session[session] if other is not drafter]

    def moved(self, session: Session) -> None:
        """The session's root moved: from now on candidates on the new one are expected."""
        for drafter in self._of_session.get(session, ()):
            drafter.moved(session)

    def commit(self, session: Session, base: int, token_ids: list[int]) -> list[verifier_pb2.ShadowScore]:
        """Tells them; what the session's shadows would have brought, as far as it is known now."""
        for drafter in self._of_session.get(session, ()):
            drafter.commit(session, base, token_ids)
        return self.shadows.commit(session, base, token_ids)

    def disbelieve(self, session: Session, error: SlipstreamError) -> None:
        """A draft token lay outside its own q: nobody who drafts for this session can be believed."""
        for drafter in self._of_session.get(session, ()):
            drafter.quarantine(session, InvalidArgument(error.message, reason="DISHONEST"))

    def reopen(self, session: Session) -> None:
        """The prefix changed otherwise than by a commit (rollback)."""
        for drafter in self._of_session.get(session, ()):
            drafter.reopen(session)
        self.shadows.reopen(session)

    def working(self, session: Session) -> bool:
        """Whether anybody drafts for the session."""
        return any(drafter.up for drafter in self._of_session.get(session, ()))

    def awaited(self, session: Session, now: float) -> tuple[DelayDistribution, float] | None:
        """How long the session's next candidates take, and for how many seconds they have been awaited; None when
        nobody is to send any. Of several drafters the one that is likeliest to send some soon.
        """
        awaited = [
            (attachment.delays, now - attachment.since)
            for drafter in self._of_session.get(session, ())
            if (attachment := drafter.attachment(session)) is not None and drafter.awaited(attachment)
        ]
        if len(awaited) > 1:
            awaited.sort(key=lambda each: -sum(chance for _, chance in each[0].expected(each[1], SOON_S)))
        return awaited[0] if awaited else None

    def _drafter(self, address: verifier_pb2.DrafterAddress, wanted: Collection[DrafterLink]) -> DrafterLink:
        known = self._drafters.get(address.address)
        if known is not None:
            return known
        if len(self._drafters) >= MAX_DRAFTERS:
            self._release(wanted)
        drafter = self._drafters[address.address] = DrafterLink(address.address, self)
        if self._tasks is not None:
            self._links[drafter] = self._tasks.create_task(drafter.run())
        return drafter

    def _release(self, wanted: Collection[DrafterLink]) -> None:
        """Gives up a drafter that no session uses, or one that serves none. Raises ResourceExhausted when all serve."""
        unused = [address for address, known in self._drafters.items() if not known.serves and known not in wanted]
        if not unused:
            raise ResourceExhausted(f"this verifier uses {MAX_DRAFTERS} drafters already; name one of them.")
        self._let_go(min(unused, key=lambda address: not self._drafters[address].idle))

    def _let_go(self, address: str) -> None:
        gone = self._drafters.pop(address)
        gone.dismiss()
        link = self._links.pop(gone, None)
        if link is not None:
            link.cancel()
