"""All sources of candidates of a verifier and which sessions have them: the object that the scheduler, the planner and
the service use. Drafters are dialled when a session needs one, and given up when another one needs the room."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from slipstream.errors import InvalidArgument, NotFound, ResourceExhausted, SlipstreamError
from slipstream.proposers.registry import IN_VERIFIER, SPECULATOR, method_in_verifier
from slipstream.rpc import proto_conversion
from slipstream.rpc.channel import Dial, channel
from slipstream.rpc.multiplexed_stream import ByteCounter
from slipstream.telemetry.composite import composite
from slipstream.v1 import types_pb2, verifier_pb2
from verifier_svc.rounds.observer import MessageAnnotator, StepObserver
from verifier_svc.session import DraftedSession, Session
from verifier_svc.sources.drafter_link import DrafterLink
from verifier_svc.sources.shadow import ShadowDrafters
from verifier_svc.sources.source import Attachment, CandidateSource, SourceContext, report

MAX_DRAFTERS = 64
"""Links one verifier keeps, whatever gateways ask for."""
FORGET_S = 60.0
"""Seconds between two searches for drafters that no session uses and that do not answer: pods come and go."""
SOON_S = 0.02
"""Seconds within which the sources of one session are compared."""


class CandidateSources:
    """All sources of this verifier, by address, and those of each session."""

    def __init__(
        self,
        target: types_pb2.ModelInfo,
        min_path_probability: float,
        clock: Callable[[], float] = time.monotonic,
        silence_s: float = 3.0,
        dial: Dial = channel,
    ) -> None:
        self.context = SourceContext(target, min_path_probability, self._gave_up, clock, silence_s, dial)
        self._local: dict[str, CandidateSource] = {}
        self._once_a_round: list[CandidateSource] = []
        """Those of them that propose once a round: no other one has to be informed of a step that is held."""
        self._links: dict[str, DrafterLink] = {}
        self._of_session: dict[DraftedSession, list[CandidateSource]] = {}
        self.shadows = ShadowDrafters(self, clock)
        self._tasks: asyncio.TaskGroup | None = None
        self._running: dict[CandidateSource, asyncio.Task[None]] = {}

    def wants(self, session: DraftedSession) -> bool:
        """Whether any candidate of the session pays for its place in a step now."""
        return self.context.wants(session)

    @property
    def threshold(self) -> float:
        """Path probability that candidates must have."""
        return self.context.threshold

    @property
    def dropped(self) -> Counter[str]:
        """Candidates that came and were not taken, by reason."""
        return self.context.dropped

    @property
    def traffic(self) -> ByteCounter:
        """Bytes exchanged with drafters."""
        return self.context.traffic

    def add_local(self, source: CandidateSource) -> None:
        """Adds a source that runs in this process; to be called before `run`."""
        self._local[source.address] = source
        if source.once_a_round:
            self._once_a_round.append(source)

    def on_candidates(self, wake: Callable[[], None]) -> None:
        """`wake` is called from now on whenever candidates came: a step may be worth starting."""
        self.context.candidates_arrived = wake

    def observe_with(self, observers: Sequence[StepObserver], annotator: MessageAnnotator) -> None:
        """These watch, and add to, what is exchanged with drafters from now on."""
        self.context.observer, self.context.annotator = composite(StepObserver, observers), annotator

    async def run(self) -> None:
        """Keeps the links; cancelled when the verifier ends."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for source in (*self._local.values(), *self._links.values()):
                self._running[source] = tasks.create_task(source.run())
            while True:
                await asyncio.sleep(FORGET_S)
                for address, drafter in list(self._links.items()):
                    if drafter.idle and not drafter.up:
                        self._let_go(address)

    def attach_session(self, session: Session, addresses: Iterable[verifier_pb2.DrafterAddress]) -> None:
        """The session's sources are now these, and no others; the gateway gets an event for each that it cannot have.
        Shadows among them are scored and serve no step."""
        named = list(addresses)
        serving = [each for each in named if not each.shadow]
        self.assign_sources(session, serving)
        places = {each.address for each in serving}
        self.shadows.attach(session, [each for each in named if each.shadow and each.address not in places])

    def assign_sources(self, session: DraftedSession, addresses: Iterable[verifier_pb2.DrafterAddress]) -> None:
        """Opens the session on these sources, and closes it on the others that it had."""
        names: dict[CandidateSource, str] = {}
        for address in addresses:
            name = address.name or address.address
            try:
                names.setdefault(self._source(address.address, names), name)
            except SlipstreamError as error:
                report(session, name, proto_conversion.failure_to_proto(error))
        for source in self._of_session.get(session, []):
            if source not in names:
                source.close(session)
        self._of_session[session] = list(names)
        for source, name in names.items():
            source.open(session, name)

    def detach_session(self, session: Session) -> None:
        self.shadows.detach(session)
        self.release_sources(session)

    def release_sources(self, session: DraftedSession) -> None:
        """Closes the session on all its sources."""
        for source in self._of_session.pop(session, []):
            source.close(session)

    def set_threshold(self, threshold: float) -> None:
        """Candidates below this path probability do not pay now."""
        self.context.threshold = threshold
        for session, sources in self._of_session.items():  # shadows' too
            for source in sources:
                source.policy_changed(session)

    def drafting_changed(self, session: DraftedSession) -> None:
        """Drafters begin or cease to draft for the session."""
        for source in self._of_session.get(session, ()):
            source.policy_changed(session)

    def collect(self) -> None:
        """A step is about to be planned: candidates that can be had at once join the sessions' trees."""
        for source in self._local.values():
            source.collect()

    def root_moved(self, session: DraftedSession) -> None:
        """The session's root moved: from now on candidates on the new one are expected."""
        for source in self._of_session.get(session, ()):
            source.root_moved(session)

    def committed(self, session: DraftedSession, base: int, token_ids: list[int]) -> None:
        """`token_ids` were committed after `base` tokens."""
        for source in self._of_session.get(session, ()):
            source.committed(session, base, token_ids)

    def quarantine_session(self, session: DraftedSession, error: SlipstreamError) -> None:
        """A draft token lay outside its own q: no source of the session can be believed."""
        for source in list(self._of_session.get(session, ())):
            source.quarantine(session, InvalidArgument(error.message, reason="DISHONEST"))

    def has_source(self, session: DraftedSession) -> bool:
        """Whether any source that is up proposes for the session."""
        return any(source.up for source in self._of_session.get(session, ()))

    def awaited(self, session: DraftedSession, now: float) -> Attachment | None:
        """The attachment whose candidates are awaited next, and whose `delays` are the times that they take after its
        `since`. None when none are due: no source of the session is up, drafting is paused for it, or its
        sources propose without being waited for. Of several sources the one that is likeliest to send some soon."""
        awaited = [
            attachment
            for source in self._of_session.get(session, ())
            if (attachment := source.awaited(session)) is not None
        ]
        if len(awaited) > 1:
            awaited.sort(key=lambda each: -sum(chance for _, chance in each.delays.expected(now - each.since, SOON_S)))
        return awaited[0] if awaited else None

    def step_held(self, sessions: Iterable[DraftedSession]) -> None:
        """The next step, of these sessions, is held back for candidates."""
        if self._once_a_round:
            for session in sessions:
                for source in self._once_a_round:
                    source.step_held(session)

    def proposing(self, session: DraftedSession) -> bool:
        """Whether a source that proposes once for each round is at it."""
        sources = self._of_session.get(session, ())
        return any(source.once_a_round and source.awaited(session) is not None for source in sources)

    def _gave_up(self, session: DraftedSession, source: CandidateSource) -> None:
        if session in self._of_session:
            self._of_session[session] = [other for other in self._of_session[session] if other is not source]

    def _source(self, address: str, wanted: Collection[CandidateSource]) -> CandidateSource:
        """Raises NotFound for a local drafter that is not configured, and what `_link` raises."""
        if not method_in_verifier(address):
            return self._link(address, wanted)
        if address not in self._local:
            own = address == IN_VERIFIER + SPECULATOR
            setting = "set VERIFIER_VLLM_SPECULATOR" if own else "add it to VERIFIER_LOCAL_DRAFTERS"
            raise NotFound(f"no drafter {address!r} runs inside this verifier; {setting}.", reason="NO_DRAFTER")
        return self._local[address]

    def _link(self, address: str, wanted: Collection[CandidateSource]) -> DrafterLink:
        """The link to the drafter at the address. Raises ResourceExhausted where there is no room for one more."""
        known = self._links.get(address)
        if known is not None:
            return known
        if len(self._links) >= MAX_DRAFTERS:
            self._release(wanted)
        drafter = self._links[address] = DrafterLink(address, self.context)
        if self._tasks is not None:
            self._running[drafter] = self._tasks.create_task(drafter.run())
        return drafter

    def _release(self, wanted: Collection[CandidateSource]) -> None:
        """Gives up a drafter that no session uses, or one that serves none. Raises ResourceExhausted when all serve."""
        unused = [address for address, known in self._links.items() if not known.serves and known not in wanted]
        if not unused:
            raise ResourceExhausted(f"this verifier uses {MAX_DRAFTERS} drafters already; name one of them.")
        self._let_go(min(unused, key=lambda address: not self._links[address].idle))

    def _let_go(self, address: str) -> None:
        gone = self._links.pop(address)
        gone.dismiss()
        running = self._running.pop(gone, None)
        if running is not None:
            running.cancel()
