"""The judge: many sessions and rules in one step, each as if it were alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.sampler.logits_processor import SampledRow, process
from slipstream.engine.sampler.token_history import TokenHistory
from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.speculation.selection import Selection
from verifier_svc.acceptance import judge as subject
from verifier_svc.acceptance.judge import VerifyInput, judge
from verifier_svc.acceptance.rejection import KeyedRandomness, rejection
from verifier_svc.acceptance.result import AcceptanceResult, BrokenNumbers

VOCABULARY = 8


def chain(*tokens: int, proposal: DraftDistribution | None = None) -> Selection:
    size = len(tokens)
    zeros = (0.0,) * size
    return Selection(tokens, tuple(range(-1, size - 1)), tuple(range(1, size + 1)), zeros, zeros, (proposal,) * size)


def logits_that_say(*tokens: int) -> torch.Tensor:
    """Rows [R, V] whose argmax are these tokens."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY).float() * 9.0


GREEDY = SamplingParams(temperature=0.0)


def test_an_empty_batch_has_no_results() -> None:
    assert judge([], torch.empty(0, VOCABULARY)) == []


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_greedy_accepts_exactly_the_argmax(rule: str) -> None:
    sampling = SamplingParams(temperature=0.0, acceptance=rule)
    everything = DraftDistribution(tuple(range(VOCABULARY)), (1,) * VOCABULARY)
    selection = chain(3, 5, 6, proposal=everything)
    (verdict,) = judge([VerifyInput(selection, 0, sampling, 10)], logits_that_say(3, 5, 2, 7))
    assert verdict == AcceptanceResult((0, 1), 2)
    (verdict,) = judge([VerifyInput(selection, 0, sampling, 10)], logits_that_say(3, 5, 6, 7))
    assert verdict == AcceptanceResult((0, 1, 2), 7)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("poison", [math.nan, -math.inf, math.inf])
def test_broken_numbers_fail_their_own_session_only(rule: str, poison: float) -> None:
    sampling = SamplingParams(temperature=0.0, acceptance=rule)
    logits = logits_that_say(3, 5, 1, 2, 3, 4)
    logits[1] = poison
    cases = [
        VerifyInput(chain(3), 0, sampling, 10),
        VerifyInput(chain(1, 2), 2, sampling, 10),
        VerifyInput(chain(), 5, sampling, 10),
    ]
    assert judge(cases, logits) == [BrokenNumbers(0), AcceptanceResult((0, 1), 3), AcceptanceResult((), 4)]


def test_broken_rows_that_are_not_visited_affect_no_session() -> None:
    logits = logits_that_say(3, 5)
    logits[1] = math.nan
    assert judge([VerifyInput(chain(4), 0, GREEDY, 10)], logits) == [AcceptanceResult((), 3)]


def test_rejection_in_a_batch_is_the_rule_alone() -> None:
    sampling = SamplingParams(seed=7, temperature=1.3, top_k=6, acceptance="rejection", repetition_penalty=1.4)
    proposal = DraftDistribution((0, 1, 2, 3), (4, 3, 2, 1))
    logits = torch.randn(40, VOCABULARY, generator=torch.Generator().manual_seed(1))
    selection, history = chain(0, 1, 2, proposal=proposal), TokenHistory([5])
    cases = [VerifyInput(selection, 4 * index, sampling, 10 + index, history) for index in range(10)]
    mixed = [*cases, VerifyInput(chain(1), 0, SamplingParams(seed=1), 3)]
    for case, verdict in zip(cases, judge(mixed, logits), strict=False):
        rule = rejection(selection, KeyedRandomness(7, case.position))
        request = next(rule)
        with pytest.raises(StopIteration) as stop:
            while True:
                row = logits[case.first_row + 1 + request.node][None]
                p = process(row, [SampledRow(sampling, history, selection.path(request.node))])[0].double().softmax(-1)
                request = rule.send(p.numpy())
        assert stop.value.value == verdict


def test_ratio_rules_get_p_complete_in_double_precision_and_one_hot_without_noise() -> None:
    logits = torch.tensor([0.0, math.log(3.0), -math.inf])
    told = subject._distribution(logits, 1, False)
    assert told.dtype == np.float64 and told.tolist() == pytest.approx([0.25, 0.75, 0.0], abs=1e-7)
    assert told.sum() == pytest.approx(1.0, abs=1e-15)
    told = subject._distribution(logits, 0, True)
    assert told.dtype == np.float64 and told.tolist() == [1.0, 0.0, 0.0]


def test_only_visited_rows_are_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(logits: torch.Tensor, rows: list[SampledRow]) -> torch.Tensor:
        sizes.append(len(logits))
        return process(logits, rows)

    monkeypatch.setattr(subject, "process", counted)
    walked = SamplingParams(temperature=0.0, logit_bias={0: 0.0})
    cases = [VerifyInput(chain(3, 5, 6), 0, walked, 10), VerifyInput(chain(7, 1), 4, walked, 10)]
    judge(cases, logits_that_say(3, 5, 2, 0, 2, 0, 0))
    assert sizes == [2, 1, 1]


CELLS = st.sampled_from([0.0, 1.0, 2.0, math.inf, -math.inf, math.nan])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_greedy_sessions_have_the_same_result_with_and_without_the_shortcut(data: st.DataObject) -> None:
    """A bias of nothing keeps a session from the shortcut and changes no number."""
    trees = data.draw(st.lists(st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 2)), max_size=5), max_size=4))
    skipped = data.draw(st.booleans())
    fast, slow, rows = list[VerifyInput](), list[VerifyInput](), int(skipped)
    for tree in trees:
        edges: list[tuple[int, int]] = []
        for parent, token in tree:
            edge = min(parent, len(edges) - 1), token
            edges += [] if edge in edges else [edge]
        parents, tokens = [parent for parent, _ in edges], [token for _, token in edges]
        depths = list[int]()
        for parent in parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        zeros = (0.0,) * len(edges)
        selection = Selection(tuple(tokens), tuple(parents), tuple(depths), zeros, zeros, (None,) * len(edges))
        fast.append(VerifyInput(selection, rows, GREEDY, 10))
        slow.append(VerifyInput(selection, rows, SamplingParams(temperature=0.0, logit_bias={0: 0.0}), 10))
        rows += 1 + len(edges)
    cells = data.draw(st.lists(st.lists(CELLS, min_size=3, max_size=3), min_size=rows, max_size=rows))
    logits = torch.tensor(cells).reshape(rows, 3)
    verdicts = judge(fast, logits)
    assert verdicts == judge(slow, logits)
    assert judge([*fast[:1], *slow[1:]], logits) == verdicts
