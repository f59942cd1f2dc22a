"""Typical acceptance against a plain search over all paths, and what marks it as lossy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import InvalidArgument
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.speculation.selection import Selection
from tests.unit.verifier_svc.acceptance.test_acceptance_coupled import PATHS, PREFIX, model, plain, rows_of, tree_of
from verifier_svc.acceptance.judge import VerifyInput, judge
from verifier_svc.acceptance.result import AcceptanceResult
from verifier_svc.acceptance.typical import ALPHA, EPSILON, threshold
from verifier_svc.admission import check_rule

TYPICAL = SamplingParams(seed=3, acceptance="typical")


def judged(selection: Selection, sampling: SamplingParams) -> AcceptanceResult:
    (found,) = judge([VerifyInput(selection, 0, sampling, len(PREFIX))], rows_of(selection))
    assert isinstance(found, AcceptanceResult)
    return found


def is_typical(path: tuple[int, ...], temperature: float) -> float:
    """Log-probability of the path's last token, -inf where it is not typical."""
    p = (model(path[:-1]) / temperature).double().softmax(-1)
    entropy = float(torch.distributions.Categorical(probs=p).entropy())
    chance = float(p[path[-1]])
    return math.log(chance) if chance > min(0.09, 0.3 * math.exp(-entropy)) else -math.inf


@settings(deadline=None, max_examples=100)
@given(PATHS, st.sampled_from([0.5, 1.0, 3.0]))
def test_the_longest_typical_path_is_taken_and_the_likeliest_of_these(
    paths: set[tuple[int, ...]], temperature: float
) -> None:
    tree = tree_of(paths)
    found = judged(tree, SamplingParams(temperature=temperature, seed=3, acceptance="typical"))
    sure = {(): 0.0}
    for path in sorted((tree.path(node) for node in range(len(tree))), key=len):
        if path[:-1] in sure and (chance := is_typical(path, temperature)) > -math.inf:
            sure[path] = sure[path[:-1]] + chance
    assert tuple(tree.token_ids[node] for node in found.path) == max(sure, key=lambda path: (len(path), sure[path]))


def test_without_candidates_and_at_temperature_0_it_is_plain_decoding() -> None:
    assert judged(tree_of(set()), TYPICAL).next_token == plain(TYPICAL, 1)[0]
    greedy = SamplingParams(temperature=0.0, acceptance="typical")
    text = plain(greedy, 4)
    tree = tree_of({tuple(text[:3]), (text[0], (text[1] + 1) % 5, 0)})
    found = judged(tree, greedy)
    assert [*(tree.token_ids[node] for node in found.path), found.next_token] == text


def test_typical_acceptance_accepts_tokens_that_the_target_would_not_have_drawn() -> None:
    choice, p = plain(TYPICAL, 1)[0], model(()).double().softmax(-1).numpy()
    others = [token for token in range(5) if token != choice and p[token] > threshold(p)]
    assert others, "the prefix was chosen badly"
    assert judged(tree_of({(others[0],)}), TYPICAL).path == (0,)
    assert judged(tree_of({(others[0],)}), SamplingParams(seed=3)).path == ()


def test_the_threshold_is_medusas() -> None:
    assert threshold(np.array([1.0, 0.0, 0.0])) == EPSILON
    assert threshold(np.full(8, 0.125)) == pytest.approx(ALPHA / 8)


def test_only_typical_above_temperature_0_is_lossy_and_some_executors_refuse_it() -> None:
    greedy = SamplingParams(temperature=0.0, acceptance="typical")
    assert TYPICAL.lossy and not (TYPICAL.drawn or TYPICAL.coupled)
    assert not (greedy.lossy or SamplingParams().lossy or SamplingParams(acceptance="rejection").lossy)
    check_rule(greedy, lossy_rules=False)
    check_rule(TYPICAL, lossy_rules=True)
    with pytest.raises(InvalidArgument, match=r"typical.* embedded engine alone"):
        check_rule(TYPICAL, lossy_rules=False)
