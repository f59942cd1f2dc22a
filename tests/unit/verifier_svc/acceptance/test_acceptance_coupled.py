"""Coupled acceptance: what is emitted is the target's own choice at each position, whatever the tree."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.sampler.coupled_sampling import choose
from slipstream.engine.sampler.logits_processor import SampledRow, process
from slipstream.engine.sampler.token_history import TokenHistory
from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.speculation.selection import Selection
from verifier_svc.acceptance.judge import VerifyInput, judge
from verifier_svc.acceptance.result import AcceptanceResult

VOCABULARY = 5
PREFIX = [1, 4, 4]
SAMPLINGS = (
    SamplingParams(seed=3),
    SamplingParams(temperature=0.0),
    SamplingParams(seed=4, temperature=0.7, top_k=3, top_p=0.9),
    SamplingParams(seed=5, repetition_penalty=1.8, presence_penalty=0.5, frequency_penalty=0.7),
    SamplingParams(temperature=0.0, frequency_penalty=1.5),
)


def model(path: tuple[int, ...]) -> torch.Tensor:
    """Raw logits [V] after the prefix and this path: any function of the context."""
    seed = sum((token + 1) * 7**index for index, token in enumerate(path)) % 2**31
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2.0


def plain(sampling: SamplingParams, length: int) -> list[int]:
    """Plain decoding, one token at a time."""
    tokens: list[int] = []
    history = TokenHistory(PREFIX)
    for step in range(length):
        processed = process(model(tuple(tokens))[None], [SampledRow(sampling, history)])
        chosen, _ = choose(processed, [sampling.greedy], [sampling.seed], [len(PREFIX) + step])
        tokens.append(int(chosen))
        history.append(tokens[-1:])
    return tokens


def tree_of(paths: set[tuple[int, ...]], lie: DraftDistribution | None = None) -> Selection:
    """The tree that holds these paths and their beginnings."""
    beginnings = {path[:end] for path in paths for end in range(1, len(path) + 1)}
    nodes = sorted(beginnings, key=lambda path: (len(path), path))
    index = {path: number for number, path in enumerate(nodes)} | {(): -1}
    scores = tuple(-0.5 for _ in nodes)
    return Selection(
        tuple(path[-1] for path in nodes),
        tuple(index[path[:-1]] for path in nodes),
        tuple(len(path) for path in nodes),
        scores,
        scores,
        tuple(lie for _ in nodes),
    )


def rows_of(selection: Selection) -> torch.Tensor:
    return torch.stack([model(selection.path(index)) for index in range(-1, len(selection))])


def tokens_of(selection: Selection, verdict: AcceptanceResult) -> list[int]:
    return [*(selection.token_ids[node] for node in verdict.path), verdict.next_token]


PATHS = st.sets(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4).map(tuple), max_size=8)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(SAMPLINGS), PATHS), min_size=1, max_size=6))
def test_any_trees_in_any_batch_emit_what_plain_decoding_emits(
    sessions: list[tuple[SamplingParams, set[tuple[int, ...]]]],
) -> None:
    trees = [tree_of(paths, lie=DraftDistribution((0,), (1,))) for _, paths in sessions]
    starts = list(itertools.accumulate((len(tree) + 1 for tree in trees), initial=0))
    cases = [
        VerifyInput(tree, start, sampling, len(PREFIX), TokenHistory(PREFIX))
        for tree, start, (sampling, _) in zip(trees, starts, sessions, strict=False)
    ]
    logits = torch.cat([rows_of(tree) for tree in trees])
    for tree, (sampling, paths), verdict in zip(trees, sessions, judge(cases, logits), strict=True):
        assert isinstance(verdict, AcceptanceResult)
        tokens = tokens_of(tree, verdict)
        assert tokens == plain(sampling, len(tokens))
        assert tuple(tokens) not in {path[: len(tokens)] for path in paths}  # it walked as far as the tree went


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(SAMPLINGS), st.lists(PATHS, min_size=12, max_size=12))
def test_a_text_does_not_depend_on_how_it_was_drafted(
    sampling: SamplingParams, drafts: list[set[tuple[int, ...]]]
) -> None:
    text: list[int] = []
    history = TokenHistory(PREFIX)
    for paths in drafts:
        tree = tree_of(paths)
        done = tuple(text)
        logits = torch.stack([model(done + tree.path(index)) for index in range(-1, len(tree))])
        (verdict,) = judge([VerifyInput(tree, 0, sampling, len(PREFIX) + len(text), history)], logits)
        assert isinstance(verdict, AcceptanceResult)
        text += tokens_of(tree, verdict)
        history.append(tokens_of(tree, verdict))
    assert text == plain(sampling, len(text))


def test_a_tree_of_the_whole_text_is_accepted_in_one_round() -> None:
    for sampling in SAMPLINGS:
        text = plain(sampling, 5)
        tree = tree_of({tuple(text[:4])})
        (verdict,) = judge([VerifyInput(tree, 0, sampling, len(PREFIX), TokenHistory(PREFIX))], rows_of(tree))
        assert verdict == AcceptanceResult((0, 1, 2, 3), text[4])
