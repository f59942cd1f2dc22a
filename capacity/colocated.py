"""Co-located speculation: passes of the draft model on the verifier's own device, between the target's."""

from __future__ import annotations

from collections.abc import Sequence

from capacity.cost import over
from capacity.guessing import SimulatedTree
from capacity.session import SimulatedSession
from capacity.step import Verifying
from verifier_svc.scheduling.budget import Offer, allot

MOST_NODES = 128
"""Of a tree."""


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
            session.tree.tell(MOST_NODES, now)

    def seconds(self, sessions: int) -> float:
        """Of all passes before a step."""
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
            tree.tell(MOST_NODES, 0.0)
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
