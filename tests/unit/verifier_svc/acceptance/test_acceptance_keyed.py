"""Keyed randomness, through several rounds and among siblings: what enumeration, whose coins are always fresh, cannot
see. The seeds are fixed, so each test always comes out the same.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import scipy
import torch

from slipstream.speculation import noise
from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.noise import Purpose
from slipstream.speculation.sampling_params import SamplingParams
from tests.support.enumeration import Path, chain, continuations, draft_of, run, target_of, tree
from verifier_svc.acceptance.judge import VerifyInput, judge
from verifier_svc.acceptance.rejection import KeyedRandomness, rejection
from verifier_svc.acceptance.result import AcceptanceResult, FloatArray

VOCABULARY = 3
TOKENS, RUNS = 3, 4_000
TARGET, Q = target_of(14, VOCABULARY), draft_of(64, VOCABULARY, VOCABULARY)(())
"""The same q everywhere: the same noise draws the same token again, which shows its reuse best."""


def drawn(stream: int, proposal: DraftDistribution | None) -> int:
    assert proposal is not None
    scores = np.log(np.array(proposal.weights)) + noise.gumbel(stream, proposal.token_ids)
    return proposal.token_ids[int(scores.argmax())]


def after(start: Path, path: Path) -> FloatArray:
    return TARGET(start + path)


def generated(seed: int) -> Path:
    """TOKENS tokens, in as many rounds as it takes. A draft token's noise belongs to its position."""
    text: Path = ()
    while len(text) < TOKENS:
        start = text
        streams = noise.key(seed, 0, Purpose.DRAFT)
        draft = tuple(drawn(noise.key(streams, at, Purpose.DRAFT), Q) for at in range(len(start), TOKENS))
        answer = functools.partial(after, start)
        verdict = run(rejection, chain(draft, lambda path: Q), KeyedRandomness(seed, len(start)), answer)
        text = (*start, *draft[: len(verdict.path)], verdict.next_token)
    return text[:TOKENS]


def test_a_chains_drafts_and_coins_may_belong_to_positions() -> None:
    """The rule has not looked at coins and draft tokens beyond the end of its round, so the next may meet them
    again.
    """
    expected = dict(continuations((), TOKENS, TARGET))
    observed = dict.fromkeys(expected, 0)
    for seed in range(RUNS):
        observed[generated(seed)] += 1
    found = scipy.stats.chisquare(list(observed.values()), [RUNS * share for share in expected.values()])
    assert found.pvalue > 1e-4


class OneCoin(KeyedRandomness):
    """All candidates for a position share one coin."""

    def accepts(self, depth: int, probability: float, sibling: int = 0) -> bool:
        return super().accepts(depth, probability)


@pytest.mark.parametrize(
    ("chance", "own_noise", "exact"),
    [
        pytest.param(KeyedRandomness, True, True, id="as built"),
        pytest.param(OneCoin, True, False, id="siblings share a coin"),
        pytest.param(KeyedRandomness, False, False, id="siblings share the noise they were drawn with"),
    ],
)
def test_siblings_need_a_coin_and_draft_noise_each(chance: type[KeyedRandomness], own_noise: bool, exact: bool) -> None:
    """Two drafters' draws from two q meet under one node."""
    p, proposals = (
        np.array([0.2, 0.5, 0.3]),
        [DraftDistribution((0, 1, 2), weights) for weights in ((8, 1, 1), (1, 8, 1))],
    )
    observed, size = np.zeros(VOCABULARY), 2 * RUNS
    for position in range(size):
        nodes: dict[Path, DraftDistribution | None] = {}
        for drafter, proposal in enumerate(proposals):
            stream = noise.key(drafter if own_noise else 0, position, Purpose.DRAFT)
            nodes.setdefault((drawn(stream, proposal),), proposal)
        selection = tree(list(nodes.items()))
        verdict = run(rejection, selection, chance(11, position), lambda path: p)
        observed[selection.token_ids[verdict.path[0]] if verdict.path else verdict.next_token] += 1
    assert (scipy.stats.chisquare(observed, p * size).pvalue > 1e-4) == exact


def test_the_first_siblings_coin_is_that_of_rejection() -> None:
    """So the text of a `rejection` session is what it always was."""
    u = noise.scalar_uniform(noise.key(7, 5, Purpose.ACCEPT))
    for chance, depth in ((KeyedRandomness(7, 5), 0), (KeyedRandomness(7, 2), 3)):
        assert chance.accepts(depth, u + 1e-9) and chance.accepts(depth, u + 1e-9, sibling=0)
        assert not chance.accepts(depth, u) and not chance.accepts(depth, u, sibling=0)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_the_judge_runs_the_rule_with_keyed_randomness(temperature: float) -> None:
    sampling = SamplingParams(seed=7, temperature=temperature, acceptance="rejection")
    paths: list[Path] = [(0,), (1,), (0, 2), (0, 1), (0, 2, 0)]
    selection = tree([(path, Q) for path in paths])
    logits = torch.randn(60, VOCABULARY, generator=torch.Generator().manual_seed(1))
    cases = [VerifyInput(selection, 6 * index, sampling, 10 + index) for index in range(10)]
    verdicts = judge(cases, logits)
    assert len({verdict.path for verdict in verdicts if isinstance(verdict, AcceptanceResult)}) > 1
    for case, verdict in zip(cases, verdicts, strict=True):

        def target(path: Path, first_row: int = case.first_row) -> FloatArray:
            row = logits[first_row + (paths.index(path) + 1 if path else 0)]
            p: FloatArray = (row / (temperature or 1e-6)).double().softmax(-1).numpy()
            return p

        assert run(rejection, selection, KeyedRandomness(7, case.position), target) == verdict
