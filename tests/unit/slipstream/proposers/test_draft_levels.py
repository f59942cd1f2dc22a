"""A draft model's call that goes several levels deep proposes what as many calls would."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.engine.engine import Engine
from slipstream.engine.factory import open_engine
from slipstream.errors import Internal, SlipstreamError, Unavailable
from slipstream.proposers.base import ROOT, UNLIMITED, DeeperLevels, Proposal, ProposerContext
from slipstream.proposers.draft_model import ModelProposer
from slipstream.proposers.draft_tree import DraftNode, DraftTree
from slipstream.proposers.level_budget import MOST_LEVELS, LevelBudget
from slipstream.speculation.sampling_params import SamplingParams
from tests.support.checkpoints import save_checkpoint

TEXT = [5, 9, 2, 11, 7, 3, 3, 8]
EXPAND = 3
CALL_S = 0.004
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, seed=4)


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2", "gpt_oss"])
def open_small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Engine]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    save_checkpoint(request.param, folder)

    def opened(tokens: int) -> Engine:
        return open_engine(str(folder), "float32", kv_tokens=tokens)

    return opened


class Grown:
    """A sequence whose tree is grown in calls of `levels` levels."""

    def __init__(self, proposer: ModelProposer, sampling: SamplingParams, tokens: list[int], handle: str) -> None:
        self.proposer, self.sampling, self.handle = proposer, sampling, handle
        self.tokens = tokens
        self.tree = DraftTree(len(tokens))

    def context(
        self, levels: int, least: float = -math.inf, max_nodes: int = UNLIMITED
    ) -> tuple[ProposerContext, list[DraftNode]]:
        starts = self.tree.frontier(EXPAND, -1e9, 99)
        nodes = self.tree.above(starts)
        number = {id(node): index for index, node in enumerate(nodes)}
        for node in starts:
            node.expanded = True
        paths = [node.path_log_prob for node in starts]
        context = ProposerContext(
            self.handle,
            self.tokens,
            len(self.tokens),
            1,
            200,
            self.sampling,
            [node.token for node in nodes],
            [number.get(id(node.parent), ROOT) for node in nodes],
            [number.get(id(node), ROOT) for node in starts],
            max_nodes=max_nodes,
            deeper=DeeperLevels(levels - 1, EXPAND, paths, least) if levels > 1 else None,
        )
        return context, [self.tree.root, *nodes]

    def grow(self, levels: int) -> None:
        context, places = self.context(levels)
        (answer,) = self.proposer.propose([context])
        assert isinstance(answer, Proposal) and answer.read_tokens == len(self.tokens)
        self.tree.join(places, answer.nodes)

    def same(self, other: Grown) -> bool:
        """The same nodes, of which the same are expanded; probabilities differ by rounding."""
        mine, others = self.shape(), other.shape()
        close = all(math.isclose(one[2], two[2], abs_tol=1e-3) for one, two in zip(mine, others, strict=False))
        return close and [one[:2] for one in mine] == [two[:2] for two in others]

    def shape(self) -> list[tuple[list[int], bool, float]]:
        found = []
        for node in self.tree.nodes():
            path, above = [], node
            while above.parent is not None:
                path.append(above.token)
                above = above.parent
            found.append((path[::-1], node.expanded, node.path_log_prob))
        return sorted(found)


def proposer_over(engine: Engine) -> ModelProposer:
    return ModelProposer(engine, width=3, proposal_tokens=8, sharpness=1.3)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_one_call_proposes_what_a_call_for_each_level_does(
    open_small: Callable[[int], Engine], sampling: SamplingParams
) -> None:
    one, many = (Grown(proposer_over(open_small(1024)), sampling, [*TEXT], "a") for _ in range(2))
    one.grow(7)
    for _ in range(7):
        many.grow(1)
    assert one.same(many)
    assert max(len(path) for path, _, _ in one.shape()) > 3
    # What the call left behind is no part of the text: the next ones read it on, and go on from nodes of the tree.
    for grown in (one, many):
        grown.tokens += [4, 6]
        grown.tree.commit([4, 6])
        grown.grow(1)
        grown.grow(4)
    assert one.same(many)
    fresh = Grown(proposer_over(open_small(1024)), sampling, one.tokens, "b")
    fresh.grow(1)
    fresh.grow(4)
    assert fresh.same(one)


def test_sequences_of_one_call_go_to_depths_of_their_own(open_small: Callable[[int], Engine]) -> None:
    proposer = proposer_over(open_small(1024))
    together = [Grown(proposer, GREEDY, TEXT[:length], str(length)) for length in (3, 5, 8)]
    contexts = [grown.context(levels) for grown, levels in zip(together, (1, 2, 4), strict=True)]
    answers = proposer.propose([context for context, _ in contexts])
    for grown, levels, (_, places), answer in zip(together, (1, 2, 4), contexts, answers, strict=True):
        assert isinstance(answer, Proposal)
        grown.tree.join(places, answer.nodes)
        alone = Grown(proposer_over(open_small(1024)), GREEDY, grown.tokens, "alone")
        alone.grow(levels)
        assert grown.same(alone)


def test_budgets_are_kept(open_small: Callable[[int], Engine]) -> None:
    grown = Grown(proposer_over(open_small(1024)), GREEDY, [*TEXT], "a")
    context, _ = grown.context(9, max_nodes=10)
    (answer,) = grown.proposer.propose([context])
    assert isinstance(answer, Proposal) and len(answer.nodes) == 10
    least = answer.nodes[1].log_prob  # of the root's second child
    grown = Grown(proposer_over(open_small(1024)), GREEDY, [*TEXT], "b")
    context, _ = grown.context(9, least)
    (answer,) = grown.proposer.propose([context])
    assert isinstance(answer, Proposal)
    paths: list[float] = []
    for node in answer.nodes:
        paths.append(node.log_prob + (paths[node.parent] if node.parent != ROOT else 0.0))
        assert node.parent == ROOT or paths[node.parent] >= least
    assert len(answer.nodes) == 3 * (1 + sum(path >= least for path in paths)) > 6


def test_where_room_ends_so_do_the_levels(open_small: Callable[[int], Engine]) -> None:
    """Blocks hold 32 tokens: of two, a text of 40 leaves 24 for candidates."""
    text = [(3 * token) % 90 + 1 for token in range(40)]
    grown = Grown(proposer_over(open_small(64)), GREEDY, text, "a")
    grown.grow(30)
    expanded = sum(expanded for _, expanded, _ in grown.shape())
    assert 20 < expanded <= 24
    text.append(7)
    grown.tree.commit([7])
    grown.grow(2)
    fresh = Grown(proposer_over(open_small(1024)), GREEDY, text, "b")
    fresh.grow(2)
    assert fresh.same(grown)


def test_broken_numbers_of_a_deeper_level_end_the_sequence_alone(
    open_small: Callable[[int], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_small(1024)
    proposer = proposer_over(engine)
    forward, passes = engine.forward, 0

    def breaking(segments: list[object], hidden: object = None) -> object:
        nonlocal passes
        passes += 1
        output = forward(segments, hidden)  # type: ignore[arg-type]
        if passes == 2:
            output.logits[0] = math.nan
        return output

    monkeypatch.setattr(engine, "forward", breaking)
    one, other = (Grown(proposer, GREEDY, TEXT[:length], str(length)) for length in (4, 6))
    contexts = [grown.context(3)[0] for grown in (one, other)]
    answers: list[Proposal | SlipstreamError] = proposer.propose(contexts)
    assert isinstance(answers[0], Internal)
    assert isinstance(answers[1], Proposal) and len(answers[1].nodes) == 3 + 9 + 9


def test_levels_are_as_many_as_their_time_allows() -> None:
    budget = LevelBudget(CALL_S)
    assert budget.levels == 1, "before any was timed"
    budget.observe(9.0, [])
    budget.observe(9.0, [Unavailable("gone")])
    assert budget.levels == 1
    budget.observe(0.001, [Proposal([], 1), Proposal([], 1, levels=2)])  # 0.5 ms each
    assert budget.levels == MOST_LEVELS
    for _ in range(100):
        budget.observe(3 * CALL_S / 2, [Proposal([], 1, levels=3)])
    assert budget.levels == 2
    for _ in range(100):
        budget.observe(10 * CALL_S, [Proposal([], 1)])
    assert budget.levels == 1


def test_deeper_levels_are_likelier_than_what_else_there_is_to_expand() -> None:
    tree = DraftTree(4)
    likely, less, least = (tree.add(tree.root, token, math.log(p)) for token, p in ((1, 0.6), (2, 0.3), (3, 0.1)))
    tree.root.expanded = True
    assert likely is not None and less is not None and least is not None
    first = tree.frontier(2, -9.0, 30)
    assert first == [likely, less]
    deeper = tree.deeper(first, 2, 3, -9.0, 30)
    assert deeper == DeeperLevels(2, 2, [likely.path_log_prob, less.path_log_prob], less.path_log_prob)
    # With room for more than there is, all that may be expanded is.
    deeper = tree.deeper([likely, less, least], 4, 3, -9.0, 30)
    assert deeper is not None and deeper.least_log_prob == -9.0
    assert tree.deeper(first, 2, 1, -9.0, 30) is None
    # Nodes stand at depth 1, so those of the call stand at 2; a third level is the last one.
    assert tree.deeper(first, 2, 9, -9.0, 3) == DeeperLevels(1, 2, deeper.path_log_probs[:2], less.path_log_prob)
    assert tree.deeper(first, 2, 9, -9.0, 2) is None
    # Probabilities count from the present root.
    tree.commit([1])
    below = tree.add(tree.root, 5, math.log(0.5))
    assert below is not None
    deeper = tree.deeper([below], 2, 3, math.log(0.02), 30)
    assert deeper is not None and math.isclose(deeper.least_log_prob, math.log(0.6 * 0.02))
