"""Models without a text, for plans: token r below a place is the drafter's guess number r there, and which of them the
target takes is drawn when a pass decides the place. So acceptance may depend on the depth, and no tensor is computed.

A `GuessingProposer` stands for a draft model below the real drafting loop, a `DrawingExecutor` for the target below the
real scheduler; `IdealDrafts` drafts between the target's passes. KV, budget, waiting and calibration are the services'.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Hashable
from itertools import accumulate

from capacity.cost import Cost
from capacity.settings import Acceptance, DraftSettings, Verifying
from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.engine.kvcache.kv_cache import KVCache
from slipstream.engine.model_info import ModelInfo
from slipstream.engine.segment import Segment
from slipstream.errors import SlipstreamError
from slipstream.proposers.base import ROOT, Proposal, ProposedNode, ProposerContext
from slipstream.speculation.selection import Selection
from verifier_svc.acceptance.result import AcceptanceResult
from verifier_svc.estimators.cost_curve import CostCurve
from verifier_svc.execution.executor import ExecutorLimits, ScheduledSequence, StepOutcome

LONGEST = 1 << 30
"""Tokens of a sequence."""
BLOCK_SIZE, MOST_KV_TOKENS = 32, 1 << 22
"""Tokens of a block of KV; and of all blocks, more than a plan's verifier ever fills."""
LEAST_SHARE = 1e-9


def model_of(acceptance: Acceptance) -> ModelInfo:
    """Facts that both models announce."""
    size = acceptance.width + 1
    return ModelInfo("guesses", "", size, f"guesses-{size}", LONGEST, "none", 0, (), batch_invariant=True)


class GuessingProposer:
    """A draft model. `sleep` is called with the seconds of each call."""

    def __init__(self, acceptance: Acceptance, settings: DraftSettings, sleep: Callable[[float], None]) -> None:
        self._acceptance, self._settings, self._sleep = acceptance, settings, sleep
        self._read: dict[Hashable, int] = {}
        """Committed tokens that were read, by sequence."""
        self._below: dict[tuple[int, int], list[ProposedNode]] = {}
        """The guesses below a place, by its index and depth."""

    def propose(self, contexts: list[ProposerContext]) -> list[Proposal | SlipstreamError]:
        tokens, sessions = [0], [0]  # of each level
        answers: list[Proposal | SlipstreamError] = []
        for context in contexts:
            answer, sizes = self._propose(context)
            answers.append(answer)
            for level, size in enumerate(sizes):
                if level == len(tokens):
                    tokens.append(0)
                    sessions.append(0)
                tokens[level] += size
                sessions[level] += 1
        passes_s = sum(map(self._settings.cost, tokens, sessions)) if sessions[0] else 0.0
        self._sleep(passes_s + self._settings.around_s(len(contexts)))
        return answers

    def close_sequence(self, handle: Hashable) -> None:
        self._read.pop(handle, None)

    def _propose(self, context: ProposerContext) -> tuple[Proposal, list[int]]:
        """The proposal, and the tokens that each of its levels computes."""
        # As in `slipstream.proposers.draft_model`, the last token is computed again with each tree.
        start = min(self._read.get(context.handle, 0), context.length - 1)
        end = context.length if context.expand else context.length - 1
        stop = min(end, start + context.max_read_tokens)
        if start == stop:
            return Proposal([], start), []
        self._read[context.handle] = stop
        if stop < context.length or not context.expand:
            return Proposal([], stop), [stop - start]
        nodes, levels = self._grow(context)
        return Proposal(nodes, stop, levels=1 + len(levels)), [stop - start + len(context.node_tokens), *levels]

    def _grow(self, context: ProposerContext) -> tuple[list[ProposedNode], list[int]]:
        """The proposed nodes, and how many each level below the first one computes."""
        deeper, first = context.deeper, len(context.node_tokens)
        depths = {ROOT: 0}
        for node, parent in enumerate(context.parents):
            depths[node] = depths[parent] + 1
        nodes = [guess for node in context.expand for guess in self._guesses(node, depths[node] + 1)]
        levels: list[int] = []
        if deeper is not None:
            paths, ranked = dict(zip(context.expand, deeper.path_log_probs, strict=True)), list[tuple[float, int]]()
            done = 0
            while len(levels) < deeper.levels and len(nodes) < context.max_nodes:
                for number, guess in enumerate(nodes[done:], first + done):
                    depths[number] = depths[guess.parent] + 1
                    paths[number] = paths[guess.parent] + guess.log_prob
                    if paths[number] >= deeper.least_log_prob:
                        heapq.heappush(ranked, (-paths[number], number))
                done = len(nodes)
                if not ranked:
                    break
                starts = [heapq.heappop(ranked)[1] for _ in range(min(deeper.expand, len(ranked)))]
                levels.append(len(starts))
                nodes += [guess for node in starts for guess in self._guesses(node, depths[node] + 1)]
        return nodes[: context.max_nodes], levels

    def _guesses(self, place: int, depth: int) -> list[ProposedNode]:
        found = self._below.get((place, depth))
        if found is None:
            shares = enumerate(self._acceptance.shares(depth))
            found = [ProposedNode(place, guess, math.log(max(share, LEAST_SHARE))) for guess, share in shares]
            self._below[place, depth] = found
        return found


class IdealDrafts:
    """Co-located speculation: before each step as many passes of the draft model as give the most tokens a second for
    its number of sessions, none included."""

    def __init__(self, settings: Verifying, draft: Cost) -> None:
        self._settings, self._draft = settings, draft
        most = range(settings.max_draft_tokens + 1)
        self._worth = [_accepted(settings.acceptance, settings.expand, passes, most[-1]) for passes in most]
        """By passes, the probabilities of the candidates that a step verifies, from a tree that begins with nothing."""
        self._passes: dict[int, int] = {0: 0}

    def passes(self, sessions: int) -> int:
        best = self._passes.get(sessions)
        if best is None:
            rates = [self._rate(sessions, passes) for passes in range(len(self._worth))]
            best = self._passes[sessions] = rates.index(max(rates))
        return best

    def seconds(self, sessions: int) -> float:
        """Seconds of all passes before a step."""
        return self._passes_s(sessions, self.passes(sessions))

    def reading_s(self, tokens: int, prompts: int) -> float:
        """The draft model reads prompts too."""
        return self._draft(tokens, prompts) if tokens else 0.0

    def _passes_s(self, sessions: int, passes: int) -> float:
        """Each computes the committed tokens and what the ones before it guessed on."""
        return sum(self._draft(sessions * (1 + self._settings.expand * number), sessions) for number in range(passes))

    def _rate(self, sessions: int, passes: int) -> float:
        """Tokens a second of each session, with as many candidates as bring the most."""
        around_s = self._settings.around_s(sessions) + self._passes_s(sessions, passes)
        tokens = accumulate(self._worth[passes], initial=1.0)
        return max(
            committed / (around_s + self._settings.cost(sessions * (1 + candidates), sessions))
            for candidates, committed in enumerate(tokens)
        )


def _accepted(acceptance: Acceptance, expand: int, passes: int, most: int) -> list[float]:
    """Probabilities of the `most` likeliest candidates after so many passes, the likeliest first."""
    ranked, found = [(-1.0, 0)], list[float]()
    for _ in range(passes):
        for path, depth in [heapq.heappop(ranked) for _ in range(min(expand, len(ranked)))]:
            for share in acceptance.shares(depth + 1):
                found.append(-path * share)
                heapq.heappush(ranked, (path * share, depth + 1))
    return sorted(found, reverse=True)[:most]


class DrawingExecutor:
    """A target that takes guesses with the probabilities of the settings' `acceptance`."""

    limits = ExecutorLimits()
    hidden_feed = None
    draft_feed = None

    def __init__(
        self,
        settings: Verifying,
        sleep: Callable[[float], None],
        draws: random.Random,
        ideal: IdealDrafts | None = None,
    ) -> None:
        """`sleep` is called with the seconds of each step."""
        self.model = model_of(settings.acceptance)
        self.kv = KVCache(BlockPool.holding(min(settings.kv_tokens, MOST_KV_TOKENS), BLOCK_SIZE), LONGEST)
        self.busy_s = 0.0
        """Seconds of passes."""
        self.computed = 0
        """Tokens of all steps."""
        self._settings, self._sleep, self._draws, self._ideal = settings, sleep, draws, ideal

    def measure_costs(self, curve: CostCurve, max_tokens: int, limit_s: float) -> None:
        """Nothing is to be measured: `capacity.workers.curve_of` knows what passes cost."""

    def execute(self, step: list[ScheduledSequence]) -> list[StepOutcome]:
        tokens = sum(scheduled.tokens for scheduled in step)
        seconds = self._settings.cost(tokens, len(step)) + self._drafting_s(step)
        self.computed += tokens
        self.busy_s += seconds
        self._sleep(seconds + self._settings.around_s(len(step)))
        return [self._decide(scheduled) for scheduled in step]

    def _drafting_s(self, step: list[ScheduledSequence]) -> float:
        if self._ideal is None:
            return 0.0
        prompts = [len(scheduled.pending) for scheduled in step if scheduled.computed < scheduled.base - 1]
        drafted = any(scheduled.selection.token_ids for scheduled in step)
        passes_s = self._ideal.seconds(len(step) - len(prompts)) if drafted else 0.0
        return passes_s + self._ideal.reading_s(sum(prompts), len(prompts))

    def _decide(self, scheduled: ScheduledSequence) -> StepOutcome:
        sequence, chosen = scheduled.session.sequence, scheduled.selection
        assert sequence is not None
        segment = Segment(sequence, scheduled.pending, list(chosen.token_ids), list(chosen.parents))
        sequence.ahead = segment.tokens
        result = self._walk(chosen) if scheduled.complete else None
        self.kv.keep(segment, list(result.path) if result is not None else [])
        return result

    def _walk(self, chosen: Selection) -> AcceptanceResult:
        places = {each: node for node, each in enumerate(zip(chosen.parents, chosen.token_ids, strict=True))}
        path: list[int] = []
        while True:
            taken = self._settings.acceptance.draw(len(path) + 1, self._draws)
            node = places.get((path[-1] if path else ROOT, taken))
            if node is None:
                return AcceptanceResult(tuple(path), taken)
            path.append(node)
