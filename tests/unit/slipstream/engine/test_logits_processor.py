"""Logits processing against a one-row reference in float64, and against the transformers processors where no ties
are.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.sampler.coupled_sampling import choose
from slipstream.engine.sampler.logits_processor import SampledRow, process
from slipstream.engine.sampler.token_history import TokenHistory
from slipstream.errors import InvalidArgument, OutOfRange
from slipstream.speculation.sampling_params import SamplingParams

VOCABULARY = 40


def reference(values: list[float], sampling: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """One row, step by step as the words say it. Returns logits with -inf for tokens that are cut."""
    counts = Counter(output)
    row = np.array(values, dtype=np.float64)
    for token in set(prompt) | set(output):
        factor = sampling.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token, count in counts.items():
        row[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    for token, bias in sampling.logit_bias.items():
        row[token] += bias
    if sampling.allowed_token_ids:
        row[[token for token in range(len(row)) if token not in sampling.allowed_token_ids]] = -math.inf
    if sampling.greedy:
        return list(row)
    row = row / sampling.temperature
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = [math.exp(row[token] - row[order[0]]) for token in order]
    if sampling.top_p < 1.0:
        wanted = sampling.top_p * sum(weights)
        order = order[: max(1, sum(before < wanted for before in itertools.accumulate(weights[:-1], initial=0.0)))]
    floor = row[order[0]] + (math.log(sampling.min_p) if sampling.min_p else -math.inf)
    kept = {token for token in order if row[token] >= floor}
    return [row[token] if token in kept else -math.inf for token in range(len(row))]


def samplings() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.25, 1.0, 2.0]),
        top_k=st.sampled_from([0, 1, 3, 10, 39, 40, 99]),
        top_p=st.sampled_from([1.0, 0.9, 0.53, 0.1, 1e-9]),
        min_p=st.sampled_from([0.0, 0.07, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.5, 0.75]),
        presence_penalty=st.sampled_from([0.0, 0.5, -0.5]),
        frequency_penalty=st.sampled_from([0.0, 0.25]),
        logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-100.0, 2.0]), max_size=3),
        allowed_token_ids=st.lists(st.integers(0, VOCABULARY - 1), max_size=6).map(tuple),
    )


TOKEN = st.integers(0, VOCABULARY - 1)
TOKENS = st.lists(TOKEN, max_size=8)


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 10**6), st.lists(st.tuples(samplings(), TOKENS, TOKENS, TOKENS), min_size=1, max_size=5))
def test_a_batch_equals_the_reference_row_by_row(
    seed: int, cases: list[tuple[SamplingParams, list[int], list[int], list[int]]]
) -> None:
    raw = torch.randn(len(cases), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3.0
    before = raw.clone()
    rows = []
    for sampling, prompt, output, path in cases:
        history = TokenHistory(prompt)
        history.append(output)
        rows.append(SampledRow(sampling, history, tuple(path)))
    processed = process(raw, rows)
    assert torch.equal(raw, before)
    for row, (sampling, prompt, output, path), result in zip(raw.tolist(), cases, processed.tolist(), strict=True):
        expected = reference(row, sampling, prompt, output + path)
        assert [math.isinf(value) for value in result] == [math.isinf(value) for value in expected]
        assert result == pytest.approx(expected, rel=1e-4, abs=1e-4)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**6), st.sampled_from([0, 1, 2, 7, 20]), st.sampled_from([1.0, 0.3, 0.6, 0.95]))
def test_ties_are_cut_from_the_highest_ids_down(seed: int, top_k: int, top_p: float) -> None:
    raw = torch.randint(0, 3, (4, VOCABULARY), generator=torch.Generator().manual_seed(seed)).float()
    sampling = SamplingParams(top_k=top_k, top_p=top_p)
    for row, result in zip(raw.tolist(), process(raw, [SampledRow(sampling)] * 4).tolist(), strict=True):
        expected = reference(row, sampling, [], [])
        assert [math.isinf(value) for value in result] == [math.isinf(value) for value in expected]


@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
def test_a_nucleus_wider_than_the_shortlist_is_found_too(scale: float) -> None:
    raw = torch.randn(6, 3000, generator=torch.Generator().manual_seed(8)) * scale
    cuts = ((0.5, 0), (0.999, 0), (1e-6, 0), (0.9, 700), (0.2, 5), (1.0, 9))
    rows = [SampledRow(SamplingParams(top_p=mass, top_k=count)) for mass, count in cuts]
    processed = process(raw, rows)
    for row, context, result in zip(raw.tolist(), rows, processed, strict=True):
        expected = reference(row, context.sampling, [], [])
        assert int(result.isfinite().sum()) == pytest.approx(sum(map(math.isfinite, expected)), abs=1)
    assert torch.equal(processed.argmax(-1), raw.argmax(-1))


def test_a_nucleus_that_reaches_its_mass_exactly_stops_there() -> None:
    processed = process(torch.zeros(1, 4), [SampledRow(SamplingParams(top_p=0.5))])
    assert processed[0].isfinite().tolist() == [True, True, False, False]


def test_neutral_rows_cost_nothing() -> None:
    raw = torch.randn(2, VOCABULARY)
    assert (
        process(raw, [SampledRow(SamplingParams()), SampledRow(SamplingParams(temperature=0.0, top_k=3, top_p=0.5))])
        is raw
    )


def test_a_tiny_temperature_does_not_overflow() -> None:
    raw = torch.tensor([[50.0, 49.0, -math.inf], [1.0, 2.0, 3.0]])
    processed = process(
        raw, [SampledRow(SamplingParams(temperature=1e-38)), SampledRow(SamplingParams(temperature=0.5))]
    )
    assert processed[0].softmax(-1).tolist() == [1.0, 0.0, 0.0]
    assert processed[1].tolist() == [2.0, 4.0, 6.0]


@pytest.mark.parametrize(
    "sampling", [SamplingParams(top_p=0.5), SamplingParams(top_k=2), SamplingParams(min_p=0.5, temperature=0.5)]
)
def test_broken_rows_pass_through_without_harm(sampling: SamplingParams) -> None:
    raw = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(2))
    expected = process(raw, [SampledRow(sampling)] * 3)
    raw[0, 5], raw[2] = math.nan, -math.inf
    processed = process(raw, [SampledRow(sampling)] * 3)
    assert torch.equal(processed[1], expected[1])
    assert not bool(processed[0].amax().isfinite())
    assert not bool(processed[2].amax().isfinite())


def test_processing_agrees_with_transformers() -> None:
    """Without ties, and away from the rounding of a boundary, they keep the same tokens."""
    transformers = pytest.importorskip("transformers")
    raw = torch.randn(8, 200, generator=torch.Generator().manual_seed(3)) * 2.0
    seen = torch.randint(200, (8, 12), generator=torch.Generator().manual_seed(4))
    pairs = [
        (SamplingParams(top_k=17), transformers.TopKLogitsWarper(17)),
        (SamplingParams(top_p=0.7), transformers.TopPLogitsWarper(0.7)),
        (SamplingParams(min_p=0.1), transformers.MinPLogitsWarper(0.1)),
        (SamplingParams(temperature=0.7), transformers.TemperatureLogitsWarper(0.7)),
        (SamplingParams(repetition_penalty=1.3), transformers.RepetitionPenaltyLogitsProcessor(1.3)),
    ]
    for sampling, processor in pairs:
        rows = [SampledRow(sampling, TokenHistory(tokens)) for tokens in seen.tolist()]
        assert torch.allclose(process(raw, rows), processor(seen, raw.clone()), atol=1e-6), sampling


# --- history ---


@settings(deadline=None)
@given(TOKENS, st.lists(st.one_of(TOKENS, st.integers(0, 6)), max_size=12), TOKENS)
def test_a_history_that_grew_and_shrank_tallies_like_a_fresh_count(
    prompt: list[int], events: list[list[int] | int], path: list[int]
) -> None:
    history, output = TokenHistory(prompt), list[int]()
    for event in events:
        if isinstance(event, list):
            history.append(event)
            output += event
        else:
            output = output[: max(0, len(output) - event)]
            history.truncate(len(prompt) + len(output))
    ids, counts, seen = history.tally(path)
    assert len(set(ids.tolist())) == len(ids)
    tally = {token: count for token, count in zip(ids.tolist(), counts.tolist(), strict=True) if count}
    assert tally == Counter(output + path)
    assert set(ids[seen].tolist()) == set(prompt + output + path)
    assert len(history) == len(prompt) + len(output)


@pytest.mark.parametrize("length", [1, 5])
def test_a_history_is_not_cut_inside_the_prompt_or_beyond_its_end(length: int) -> None:
    history = TokenHistory([1, 2])
    history.append([3, 4])
    with pytest.raises(OutOfRange):
        history.truncate(length)


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 10**6),
    st.lists(st.tuples(samplings(), TOKENS, TOKENS, st.none() | st.sets(TOKEN, min_size=1)), min_size=1, max_size=4),
)
def test_a_mask_comes_before_everything_else(
    seed: int, cases: list[tuple[SamplingParams, list[int], list[int], set[int] | None]]
) -> None:
    """A row with a mask is the row of a model that never says the others: cuts count what is left, and no bias brings
    a forbidden token back."""
    logits = torch.randn(len(cases), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3.0
    before, rows, plain = logits.clone(), list[SampledRow](), logits.clone()
    for index, (sampling, prompt, output, allowed) in enumerate(cases):
        history = TokenHistory(prompt)
        history.append(output)
        mask = None
        if allowed is not None:
            bits = np.isin(np.arange(VOCABULARY), list(allowed))
            plain[index, ~torch.from_numpy(bits)] = -math.inf
            mask = np.packbits(bits, bitorder="little")
        rows.append(SampledRow(sampling, history, mask=mask))
    masked = process(logits, rows)
    assert torch.equal(masked, process(plain, [replace(row, mask=None) for row in rows]))
    assert torch.equal(logits, before)


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    """The range, its ends and what is near them, and what is near 0 in float32 and in float64."""
    edges = [low, high, 5e-324, 1e-310, 1e-50, 1e-40, 1e-38, 1.2e-38, 1e-30, 1e-20, 1e-7]
    return st.sampled_from([*edges, *(-each for each in edges)]) | st.floats(low, high, allow_subnormal=True)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.floats(-6e4, 6e4, width=32), min_size=3, max_size=12),
    st.fixed_dictionaries(
        {
            "temperature": numbers(0.0, 100.0),
            "top_p": numbers(0.0, 1.0),
            "min_p": numbers(0.0, 1.0),
            "repetition_penalty": numbers(0.0, 100.0),
            "presence_penalty": numbers(-2.0, 2.0),
            "frequency_penalty": numbers(-2.0, 2.0),
        }
    ),
    numbers(-100.0, 100.0),
)
def test_numbers_at_the_ends_of_their_ranges_are_refused_or_choose_a_token(
    logits: list[float], given_: dict[str, float], bias: float
) -> None:
    try:
        sampling = SamplingParams(**given_, logit_bias={1: bias}, seed=7)
    except InvalidArgument:
        return
    history = TokenHistory([0, 1])
    history.append([2])
    row = SampledRow(sampling, history)
    tokens, broken = choose(process(torch.tensor([logits]), [row]), [sampling.greedy], [7], [3])
    assert not broken.any() and 0 <= int(tokens[0]) < len(logits)
