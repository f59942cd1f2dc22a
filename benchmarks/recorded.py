"""Drafting beside known texts, by the product's own loop and without a clock: what each pass would have accepted.

A text of the target is read from its prompt on. Before each pass the drafting loop of a verifier fills the session's
tree (`DraftScheduler.step_each`, as for a proposer inside a verifier); all candidates that it sent are verified, and
the text's own tokens say which of them are right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.equality_steps import KINDS, Text
from slipstream.engine.engine import HiddenStates
from slipstream.errors import SlipstreamError
from slipstream.proposers.base import UNLIMITED, HiddenRows, OpenedProposer
from slipstream.proposers.draft_tree import DEEPEST, UNSENT, DraftTree
from slipstream.proposers.drafting.scheduler import DraftScheduler, Subscriber
from slipstream.proposers.drafting.session import DraftPolicy, DraftSession
from slipstream.proposers.drafting.step import DraftStepLimits
from slipstream.proposers.expansion import FEWEST
from slipstream.speculation.lookahead_window import LookaheadWindow
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.speculation.selection import ROOT, Selection
from verifier_svc.acceptance.result import AcceptanceResult
from verifier_svc.execution.embedded import EmbeddedExecutor
from verifier_svc.execution.executor import ScheduledSequence
from verifier_svc.session import Session
from verifier_svc.sources.local import LOOKUP_PASSES, PROMPT_TOKENS, UNLIKELY
from verifier_svc.wait_policy.draft_threshold import LEVELS

AT_ONCE = 6
"""Texts at a time: what one of them gives to a corpus the others may find."""
SALT = "recorded"
NODES = 32
SAMPLING: dict[str, dict[str, float]] = {**KINDS, "T = 1": {"temperature": 1.0}}


@dataclass(frozen=True, slots=True)
class Way:
    """How a session is drafted for; the defaults are the product's."""

    nodes: int = NODES
    """`VERIFIER_MAX_DRAFT_TOKENS`."""
    threshold: float | None = None
    """Least path probability of a candidate; None for what a verifier without load asks for."""
    passes: int = LOOKUP_PASSES
    """Calls of the proposer before each pass of the target."""
    expand: int = FEWEST


@dataclass(frozen=True, slots=True)
class Given:
    """What sessions have beside their texts."""

    predictions: Callable[[Text], Sequence[int]] | None = None
    states: Callable[[Text], HiddenStates] | None = None
    """The target's hidden states of all tokens, for a method that reads them."""
    vocabulary_size: int = UNLIMITED


@dataclass
class Counts:
    passes: int = 0
    tokens: int = 0
    candidates: int = 0
    claimed: float = 0.0
    """Sum of the candidates' own probabilities of being accepted."""
    window_rows: int = 0
    """Rows of lookahead windows."""

    def add(self, session: DraftSession, rest: Sequence[int]) -> list[int]:
        """Counts one pass over what was sent; the tokens that it commits."""
        tree = session.tree
        sent = [node for node in tree.nodes() if node.number != UNSENT]
        self.claimed += sum(math.exp(node.path_log_prob - tree.root.path_log_prob) for node in sent)
        node, right = tree.root, 0
        while right < len(rest) and (child := node.children.get(rest[right])) is not None and child.number != UNSENT:
            node, right = child, right + 1
        self.passes += 1
        self.candidates += len(sent)
        self.tokens += len(rest[: right + 1])
        return list(rest[: right + 1])


@dataclass(slots=True)
class RecordedStates:
    """The target's hidden states of a text's tokens, given as its session commits them."""

    states: HiddenStates
    length: int
    """Committed tokens; the last one's states come with the pass that decides the next one."""
    _given: int = 0

    @property
    def end(self) -> int:
        return self.length - 1

    def take(self) -> tuple[HiddenRows, ...]:
        first, self._given = self._given, max(self._given, self.end)
        return (HiddenRows(first, self.states.cut(first, self.end)),) if self.end > first else ()


@dataclass
class _Walk:
    session: DraftSession
    rest: list[int]
    states: RecordedStates | None
    reading: bool = True
    """Whether the proposer has not read the whole prompt yet."""
    failure: SlipstreamError | None = None

    def fail(self, error: SlipstreamError) -> None:
        self.failure = error


def walk(texts: Iterable[Text], opened: OpenedProposer, way: Way, given: Given) -> Counts:
    """Drafts for all texts, AT_ONCE at a time. Raises the error with which the proposer gives a text up."""
    counts, waiting, walks = Counts(), list(texts)[::-1], list[_Walk]()
    scheduler = DraftScheduler(opened.proposer, DraftStepLimits(UNLIMITED, way.expand, PROMPT_TOKENS), lambda: 0.0)
    number = 0
    while waiting or walks:
        while waiting and len(walks) < AT_ONCE:
            number += 1
            walks.append(_begin(waiting.pop(), opened, way, given, number))
            scheduler.add_session(Subscriber(walks[-1].session, lambda nodes: None, walks[-1].fail))
        scheduler.step_each(way.passes if opened.hidden is None else 1)
        for each in walks:
            if each.failure is not None:
                raise each.failure
            session = each.session
            each.reading = each.reading and session.computed < session.prompt_length - 1
            if each.reading and opened.hidden is None:
                continue
            new = counts.add(session, each.rest)
            del each.rest[: len(new)]
            session.commit(len(session.tokens), new)
            if each.states is not None:
                each.states.length = len(session.tokens)
            if each.rest:
                scheduler.session_changed(session)
            else:
                scheduler.remove_session(session)
        walks = [each for each in walks if each.rest]
    scheduler.step_each(1)  # closes the last ones
    return counts


def walk_windows(texts: Iterable[Text], opened: OpenedProposer, way: Way, executor: EmbeddedExecutor) -> Counts:
    """Drafts with n-grams of windows that run along in the target's passes, whatever their rows cost: greedy texts, all
    of them in one batch. Raises AssertionError for a text that comes out otherwise."""
    assert opened.open_window is not None
    counts, running = Counts(), dict[Session, tuple[_Walk, LookaheadWindow]]()
    scheduler = DraftScheduler(opened.proposer, DraftStepLimits(UNLIMITED, way.expand, PROMPT_TOKENS), lambda: 0.0)
    for number, text in enumerate(texts):
        session, walked = text.open(executor.engine), _begin(text, opened, way, Given(), number)
        running[session] = walked, opened.open_window(walked.session, session.tokens, frozenset())
        scheduler.add_session(Subscriber(walked.session, lambda nodes: None, walked.fail))
    while running:
        scheduler.step_each(way.passes)
        step = []
        for session, (walked, window) in running.items():
            chosen = selection(walked.session.tree)
            part = window.rows(way.nodes - len(chosen), 0.0)
            pending = session.tokens[session.computed :]
            step.append(ScheduledSequence(session, len(session.tokens), session.computed, pending, True, chosen, part))
            assert session.sequence is not None
            executor.kv.grow(session.sequence, step[-1].tokens)
        for scheduled, outcome in zip(step, executor.execute(step), strict=True):
            assert isinstance(outcome, AcceptanceResult), outcome
            session = scheduled.session
            walked, window = running[session]
            new = counts.add(walked.session, walked.rest)
            found = [*(scheduled.selection.token_ids[node] for node in outcome.path), outcome.next_token]
            assert found[: len(new)] == new, "candidates changed a text"
            counts.window_rows += len(scheduled.window)
            session.commit(new, scheduled.base + len(new) - 1)
            window.advance(outcome.window, len(scheduled.window), new)
            del walked.rest[: len(new)]
            if walked.rest:
                walked.session.commit(len(walked.session.tokens), new)
                scheduler.session_changed(walked.session)
            else:
                scheduler.remove_session(walked.session)
                del running[session]
                assert session.sequence is not None
                executor.kv.close(session.sequence)
    return counts


def selection(tree: DraftTree) -> Selection:
    """All that was sent, as candidates of a step."""
    index = {tree.root: ROOT}
    nodes = [node for node in tree.nodes() if node.number != UNSENT]
    index |= {node: number for number, node in enumerate(nodes)}
    return Selection(
        tuple(node.token for node in nodes),
        tuple(index[node.parent] for node in nodes if node.parent is not None),
        tuple(node.depth - tree.root.depth for node in nodes),
        distributions=(None,) * len(nodes),
    )


def _begin(text: Text, opened: OpenedProposer, way: Way, given: Given, number: int) -> _Walk:
    usual = LEVELS[0] if opened.hidden is None else UNLIKELY
    threshold = usual if way.threshold is None else way.threshold
    session = DraftSession(
        epoch=1,
        sampling=SamplingParams(seed=text.seed, **SAMPLING[text.kind]),  # type: ignore[arg-type]
        policy=DraftPolicy(way.nodes, threshold),
        tokens=list(text.prompt),
        prompt_length=len(text.prompt),
        max_length=len(text.prompt) + len(text.plain) + way.nodes,
        vocabulary_size=given.vocabulary_size,
        prediction=tuple(given.predictions(text)) if given.predictions is not None else (),
        cache_salt=SALT,
        number=number,
        max_depth=min(DEEPEST, opened.depth),
        prepared=1.0,
        together_s=0.0,
    )
    states = RecordedStates(given.states(text), len(text.prompt)) if given.states is not None else None
    session.hidden = states
    return _Walk(session, list(text.plain), states)
