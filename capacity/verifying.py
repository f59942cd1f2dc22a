"""A simulated verifier: batched steps over its sessions, planned by the very rules of the real one.

Budget, wait policy, arrival times and prefill are `verifier_svc`'s own; what is written again here in small is what
`verifier_svc.scheduling.planner` and `verifier_svc.scheduling.scheduler` put around them. Acceptance is known, so there
is no calibration.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from capacity.cost import Cost, over
from capacity.drafting import Agenda, SimulatedDrafter, SimulatedSession
from capacity.guessing import Acceptance, SimulatedGuess, SimulatedTree
from slipstream.speculation.selection import ROOT
from verifier_svc.config import PROMPT_STEP_S
from verifier_svc.scheduling.budget import Offer, allot
from verifier_svc.scheduling.prefill import PROMPT_STEPS, prefill_chunks, tokens_within
from verifier_svc.wait_policy.arrival_times import ArrivalTimes, DelayDistribution
from verifier_svc.wait_policy.draft_threshold import LEVELS, PAUSE
from verifier_svc.wait_policy.drafting_trial import compared_step
from verifier_svc.wait_policy.wait_policy import DraftedRound, ExpectedGain, WaitPolicy


@dataclass(frozen=True, slots=True)
class Verifying:
    """The settings of a verifier."""

    cost: Cost
    acceptance: Acceptance
    host_s: float = 0.0
    """Seconds between two passes in which the device waits: planning, committing, talking."""
    host_session_s: float = 0.0
    """Further seconds for each session in the step."""
    sessions: int = 1024
    kv_tokens: int = 1 << 40
    max_draft_tokens: int = 8
    step_tokens: int = 512
    prefill_tokens: int = 256
    prompt_step_s: float = PROMPT_STEP_S
    max_wait_s: float = 0.25
    draft: Cost | None = None
    """Co-located speculation: what a pass of the draft model costs on this device, between the target's passes."""
    expand: int = 4

    def prefill_room(self, tokens: int, sessions: int) -> int:
        """Most prompt tokens of a step with so many tokens of sessions that decode, as the real planner has it."""
        own_s = self.cost(tokens, sessions)
        most = min(self.prefill_tokens, self.step_tokens - tokens)
        added_s = max(PROMPT_STEPS * own_s, self.prompt_step_s - own_s)
        return max(1, tokens_within(lambda n: self.cost(tokens + n, sessions) - own_s, most, added_s))

    def limit(self, session: SimulatedSession) -> int:
        """Most candidates of the session in one step."""
        if session.drafter is None and self.draft is None:
            return 0
        return max(0, min(self.max_draft_tokens, session.left - 1))


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    decoding: list[SimulatedSession]
    chosen: list[list[SimulatedGuess]]
    """Candidates of each of them."""
    paths: list[list[float]]
    """Path probabilities of each one's best candidates, of which the first are chosen."""
    reading: dict[SimulatedSession, int]
    tokens: float
    """Expected to be committed."""
    seconds: float

    @property
    def sessions(self) -> int:
        """Number of sessions that decode."""
        return len(self.decoding)

    @property
    def size(self) -> int:
        return len(self.decoding) + sum(map(len, self.chosen)) + sum(self.reading.values())


MOST_NODES = 128
"""Nodes of a tree."""


class Serial:
    """As many draft passes before each step as give the most tokens a second for its number of sessions, none included:
    what an ideal co-located engine would choose."""

    def __init__(self, settings: Verifying) -> None:
        self._settings = settings
        self._passes: dict[int, int] = {}

    def grow(self, decoding: Sequence[SimulatedSession], now: float) -> None:
        """The trees of those that decode."""
        for session in decoding:
            for _ in range(self.passes(len(decoding))):
                _pass(session.tree, self._settings.expand)
            session.tree.mark_sent(MOST_NODES, now)

    def seconds(self, sessions: int) -> float:
        """Seconds of all draft passes before a step."""
        return sum(self._pass_s(sessions, number) for number in range(self.passes(sessions)))

    def reading_s(self, tokens: int, prompts: int) -> float:
        """The draft model reads prompts too."""
        return self._settings.draft(tokens, prompts) if self._settings.draft is not None and tokens else 0.0

    def passes(self, sessions: int) -> int:
        if self._settings.draft is None or not sessions:
            return 0
        best = self._passes.get(sessions)
        if best is None:
            best = self._passes[sessions] = self._best(sessions)
        return best

    def _best(self, sessions: int) -> int:
        """From trees that begin with nothing."""
        settings, tree = self._settings, SimulatedTree(self._settings.acceptance)
        seconds = settings.host_s + settings.host_session_s * sessions
        rates: list[float] = []
        for number in range(settings.max_draft_tokens + 1):
            tree.mark_sent(MOST_NODES, 0.0)
            offer = Offer(tree.offer(0.0, settings.max_draft_tokens)[1], settings.max_draft_tokens)
            step = allot([offer] * sessions, over(settings.cost, sessions), settings.step_tokens - sessions)
            rates.append(step.tokens / (step.seconds + seconds))
            seconds += self._pass_s(sessions, number)
            _pass(tree, settings.expand)
        return rates.index(max(rates))

    def _pass_s(self, sessions: int, number: int) -> float:
        """Each pass computes the committed tokens and what the ones before it guessed on."""
        draft = self._settings.draft
        return draft(sessions * (1 + self._settings.expand * number), sessions) if draft is not None else 0.0


def _pass(tree: SimulatedTree, expand: int) -> None:
    for start in tree.frontier(expand, MOST_NODES):
        start.expanded = True
        tree.grow(start)


class Attachments:
    """Waiting for the candidates of one verifier's sessions that have a drafter."""

    def __init__(self, agenda: Agenda, max_draft_tokens: int) -> None:
        self._agenda = agenda
        self._max_draft_tokens = max_draft_tokens
        self._arrival_times: dict[SimulatedDrafter, ArrivalTimes] = {}

    def opened(self, session: SimulatedSession) -> None:
        self._await(session)

    def arrived(self, session: SimulatedSession) -> None:
        """Candidates came."""
        session.delays.came(self._agenda.now - session.since)
        session.fresh = False
        session.version += 1
        self._await(session)

    def committed(self, session: SimulatedSession, *, answering: bool) -> None:
        """Candidates on a new root are awaited. `answering`: the drafter was to send some until now."""
        if answering:
            session.delays.missed(self._agenda.now - session.since)
        session.fresh = session.fresh or not session.tree.holds(1, self._agenda.now)
        self._await(session)

    def awaited(self, session: SimulatedSession) -> tuple[DelayDistribution, float]:
        """The distribution of its next candidates' delay, and the seconds they have been awaited."""
        return session.delays, self._agenda.now - session.since

    def _await(self, session: SimulatedSession) -> None:
        assert session.drafter is not None
        if session.drafter not in self._arrival_times:
            self._arrival_times[session.drafter] = ArrivalTimes()
        pace = self._arrival_times[session.drafter]
        session.since = self._agenda.now
        if session.fresh:
            session.delays = pace.first
        else:
            enough = session.tree.holds(self._max_draft_tokens, self._agenda.now)
            session.delays = pace.enough if enough else pace.few


class SimulatedVerifier:
    def __init__(
        self,
        agenda: Agenda,
        settings: Verifying,
        random: random.Random,
        ended: Callable[[SimulatedVerifier, SimulatedSession], None],
    ) -> None:
        self._agenda = agenda
        self._settings = settings
        self._random = random
        self._ended = ended
        self._wait_policy = WaitPolicy[SimulatedSession](LEVELS[0], settings.max_wait_s, settings.cost)
        self._attachments = Attachments(agenda, settings.max_draft_tokens)
        self._serial = Serial(settings)
        self._sessions: dict[SimulatedSession, None] = {}
        self.waiting: list[SimulatedSession] = []
        """For room."""
        self._kv = 0
        self._count = 0
        self._busy = self._awake = False
        self._waiting_since: float | None = None
        self._plans = 0
        self.busy_s = 0.0
        self.steps = self.computed = 0
        """Steps taken; tokens computed in them."""

    def add(self, session: SimulatedSession) -> None:
        self._count += 1
        session.rank = 0, self._count
        self.waiting.append(session)
        self._enter()
        self._wake()

    def arrived(self, sessions: list[SimulatedSession]) -> None:
        """Candidates of these came."""
        for session in sessions:
            if session in self._sessions:
                self._attachments.arrived(session)
        self._wake()

    def _enter(self) -> None:
        """As many as fit with all they will hold. The real one lets more in and takes KV back when it must."""
        while self.waiting and len(self._sessions) < self._settings.sessions:
            session = self.waiting[0]
            size = session.prompt + session.output
            if self._kv + size > self._settings.kv_tokens and self._sessions:
                break
            self._kv += size
            self._sessions[self.waiting.pop(0)] = None
            session.idle_since = self._agenda.now
            if session.drafter is not None:
                session.drafting_state = self._wait_policy.new_session()
                self._attachments.opened(session)
                self._send(session.drafter, partial(self._open, session.drafter, session))

    def _open(self, drafter: SimulatedDrafter, session: SimulatedSession) -> None:
        if session in self._sessions:
            drafter.add(session, self._threshold(session), self)

    def _send(self, drafter: SimulatedDrafter, what: Callable[[], None]) -> None:
        """It arrives."""
        self._agenda.at(self._agenda.now + drafter.delay_s, what)

    def _wake(self) -> None:
        """There may be something to start, when all that happens at this moment has happened."""
        if not self._busy and not self._awake:
            self._awake = True
            self._agenda.at(self._agenda.now, self._look)

    def _look(self) -> None:
        self._awake = False
        step = self._plan()
        if not step.size:
            return
        now = self._agenda.now
        waited = 0.0 if self._waiting_since is None else now - self._waiting_since
        pause = self._pause(step, waited)
        self._plans += 1
        if pause > 0.0:
            if self._waiting_since is None:
                self._waiting_since = now
            self._agenda.at(now + pause, partial(self._waited, self._plans))
            return
        self._waiting_since = None
        self._start(step, waited)

    def _waited(self, plan: int) -> None:
        if plan == self._plans:
            self._wake()

    def _pause(self, step: SimulatedStep, waited: float) -> float:
        """Seconds worth waiting before it, having waited so long already."""
        if step.reading:
            return 0.0
        gains = {
            session: self._expected_gain(session, nodes, paths)
            for session, nodes, paths in zip(step.decoding, step.chosen, step.paths, strict=True)
            if session.drafter is not None and self._settings.limit(session) and self._wants(session)
        }
        awaited = {session: self._attachments.awaited(session) for session in gains}
        return self._wait_policy.pause(step, gains, awaited, waited)

    def _expected_gain(
        self, session: SimulatedSession, nodes: list[SimulatedGuess], paths: list[float]
    ) -> ExpectedGain:
        places = {id(node): place for place, node in enumerate(nodes)}
        parents = [places.get(id(node.parent), ROOT) for node in nodes]
        own, limit = [True] * len(nodes), self._settings.limit(session)
        return self._wait_policy.expected_gain(session.version, paths, parents, own, limit)

    def _wants(self, session: SimulatedSession) -> bool:
        """True if any candidates of the session pay now."""
        return self._threshold(session) < PAUSE

    def _threshold(self, session: SimulatedSession) -> float:
        """Path probability that its candidates must have; PAUSE where none are wanted."""
        return self._wait_policy.threshold if session.drafting_state.drafting else PAUSE

    def _plan(self) -> SimulatedStep:
        limits, now = self._settings, self._agenda.now
        decoding = sorted((s for s in self._sessions if not s.pending), key=lambda s: s.idle_since)
        prefilling = [session for session in self._sessions if session.pending]
        reserved = 0
        if decoding and prefilling:
            most = min(limits.prefill_room(len(decoding), len(decoding)), limits.step_tokens // 2)
            reserved = min(most, sum(session.pending for session in prefilling))
        decoding = decoding[: limits.step_tokens - reserved]
        self._serial.grow(decoding, now)
        room = limits.step_tokens - reserved - len(decoding)
        offers: list[Offer] = []
        offered: list[list[SimulatedGuess]] = []
        for session in decoding:
            limit = limits.limit(session)
            nodes, paths = session.tree.offer(now, min(limit, room)) if limit else ([], [])
            offers.append(Offer(paths, limit))
            offered.append(nodes)
        allotment = allot(offers, over(limits.cost, max(1, len(decoding))), room, prefill=reserved)
        chosen = [nodes[:count] for nodes, count in zip(offered, allotment.counts, strict=True)]
        used = sum(1 + len(nodes) for nodes in chosen)
        room = limits.step_tokens - used
        if decoding and prefilling:
            room = min(room, limits.prefill_room(used, len(decoding)))
        reading = prefill_chunks(prefilling, room)
        likely = [list(offer.probabilities) for offer in offers]
        seconds = allotment.seconds + self._serial.seconds(len(decoding))
        return SimulatedStep(decoding, chosen, likely, reading, allotment.tokens, seconds)

    def _start(self, step: SimulatedStep, waited: float) -> None:
        members = len(step.decoding) + len(step.reading)
        seconds = self._serial.seconds(len(step.decoding)) + self._settings.cost(step.size, members)
        seconds += self._serial.reading_s(sum(step.reading.values()), len(step.reading))
        self.busy_s += seconds
        self.steps += 1
        self.computed += step.size
        self._busy = True
        whole = seconds + self._settings.host_s + self._settings.host_session_s * members
        self._agenda.at(self._agenda.now + whole, partial(self._end, step, whole + waited))

    def _end(self, step: SimulatedStep, seconds: float) -> None:
        self._busy = False
        for session, size in step.reading.items():
            session.pending -= size
        committed = [self._commit(*each) for each in zip(step.decoding, step.chosen, strict=True)]
        for session in step.reading:
            if not session.pending:
                self._commit(session, [])
        self._observe(step, committed, seconds)
        self._enter()
        self._wake()

    def _observe(self, step: SimulatedStep, committed: Sequence[int], seconds: float) -> None:
        """`committed`: tokens of those that decode; the step took `seconds`, waiting included."""
        if step.reading:
            changed = self._wait_policy.observe_prefill_step()
        else:
            drafted = [session for session in step.decoding if session.drafter is not None]
            drafting = sum(session.drafting_state.drafting for session in drafted)
            compared = compared_step(step.sessions, drafting, sum(committed), step.size, seconds)
            none_drafts = bool(drafted) and not drafting
            changed = self._wait_policy.observe_step(step, step.size, seconds, compared, none_drafts=none_drafts)
        if changed:
            for session in self._sessions:
                self._demand(session)
        elif not step.reading:
            self._observe_drafting(step, committed)

    def _observe_drafting(self, step: SimulatedStep, committed: Sequence[int]) -> None:
        rounds = [
            DraftedRound(session, session.drafting_state, tokens, len(nodes))
            for session, nodes, tokens in zip(step.decoding, step.chosen, committed, strict=True)
            if session.drafter is not None
        ]
        for session in self._wait_policy.observe_drafting(rounds, step.size, step.sessions):
            if session in self._sessions:
                self._demand(session)

    def _demand(self, session: SimulatedSession) -> None:
        if session.drafter is not None:
            self._send(session.drafter, partial(session.drafter.demand, session, self._threshold(session)))

    def _commit(self, session: SimulatedSession, nodes: list[SimulatedGuess]) -> int:
        """Returns how many tokens it commits."""
        draws = [self._random.random() for _ in range(min(session.left, len(nodes) + 1))]
        ranks, refused = session.tree.decide(nodes, draws)
        if nodes:
            self._wait_policy.observe_round(len(ranks) - 1, refused)
        if not session.tokens:
            session.first = self._agenda.now
        session.rounds += 1
        session.tokens += len(ranks)
        session.idle_since = self._agenda.now
        if not session.left:
            self._finish(session)
        elif session.drafter is not None:
            self._attachments.committed(session, answering=self._wants(session))
            self._send(session.drafter, partial(session.drafter.commit, session, len(ranks)))
        else:
            session.tree.commit(len(ranks))
        return len(ranks)

    def _finish(self, session: SimulatedSession) -> None:
        session.ended = self._agenda.now
        del self._sessions[session]
        self._kv -= session.prompt + session.output
        if session.drafter is not None:
            self._send(session.drafter, partial(session.drafter.remove, session))
        self._ended(self, session)
