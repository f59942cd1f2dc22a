"""Draft tokens of vLLM's own speculators: the target's choice, had it the draft's logits."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.engine.sampler import torch_noise
from slipstream.engine.sampler.coupled_sampling import choose, rank
from slipstream.engine.sampler.logits_processor import SampledRow, process
from slipstream.speculation.noise import Purpose
from slipstream.speculation.sampling_params import SamplingParams
from verifier_svc.execution.vllm.draft_sampler import UNKNOWN, DraftSampler

ROWS, VOCABULARY, DEPTH = 12, 2000, 4
PLACES = [7, 2, 11, 0, 5, 3, 9, 1, 4, 6, 8, 10]
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=2**63 + 1),
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=0.3, seed=2**64 - 1),
]
SAMPLED = [SAMPLINGS[row % len(SAMPLINGS)] for row in range(ROWS)]
POSITIONS = [100 + 3 * row for row in range(ROWS)]
DEVICE = torch.device("cpu")


def drawn(seed: int = 0) -> torch.Tensor:
    return 3.0 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def sampler() -> DraftSampler:
    made = DraftSampler(ROWS, DEPTH, DEVICE)
    made.begin(PLACES, SAMPLED)
    return made


def chosen(
    made: DraftSampler, logits: torch.Tensor, column: int = 1, token_ids: torch.Tensor | None = None
) -> torch.Tensor:
    return made.choose(logits, torch.tensor(PLACES), torch.tensor(POSITIONS), torch.tensor(column), token_ids)


def test_a_token_is_the_target_s_choice_of_the_same_logits() -> None:
    for seed in range(20):
        logits = drawn(seed)
        expected, _ = choose(
            process(logits, [SampledRow(each) for each in SAMPLED]),
            [each.greedy for each in SAMPLED],
            [each.seed for each in SAMPLED],
            POSITIONS,
        )
        assert chosen(sampler(), logits).tolist() == expected.tolist()


def test_confidences_are_those_of_other_drafters() -> None:
    made, logits = sampler(), drawn()
    chosen(made, logits, column=2)
    heated = process(logits, [SampledRow(each) for each in SAMPLED])
    greedy, seeds = [each.greedy for each in SAMPLED], [each.seed for each in SAMPLED]
    _, expected = rank(heated, greedy, seeds, POSITIONS, 1)
    found = made.log_probs(torch.tensor(PLACES))
    assert found[:, 2].tolist() == pytest.approx(expected[:, 0].tolist(), abs=1e-5)
    assert found[:, [0, 1, 3]].tolist() == [[pytest.approx(UNKNOWN)] * 3] * ROWS


def test_a_place_has_the_parameters_of_its_last_request() -> None:
    made, logits = sampler(), drawn()
    before = chosen(made, logits).tolist()
    made.begin([PLACES[1]], [SamplingParams(temperature=0.8, seed=5)])
    after = chosen(made, logits).tolist()
    assert after[1] != before[1] and after[:1] + after[2:] == before[:1] + before[2:]


def test_rows_of_no_request_change_nothing() -> None:
    made, logits = sampler(), drawn()
    chosen(made, logits)
    before = made.log_probs(torch.tensor(PLACES)).clone()
    made.choose(drawn(1), torch.full((ROWS,), -1), torch.zeros(ROWS, dtype=torch.int64), torch.tensor(1))
    assert torch.equal(made.log_probs(torch.tensor(PLACES)), before)


def test_a_smaller_vocabulary_s_tokens_have_the_noise_of_the_target_s() -> None:
    known = torch.arange(0, VOCABULARY, 7)
    whole, part = torch.full((ROWS, VOCABULARY), -math.inf), drawn()[:, : len(known)]
    whole[:, known] = part
    assert chosen(sampler(), part, token_ids=known).tolist() == chosen(sampler(), whole).tolist()


def test_broken_numbers_have_no_confidence() -> None:
    made, logits = sampler(), drawn()
    logits[3] = math.nan
    chosen(made, logits)
    finite = made.log_probs(torch.tensor(PLACES))[:, 1].isfinite().tolist()
    assert finite == [row != 3 for row in range(ROWS)]


def test_keys_on_the_device_are_the_host_s() -> None:
    seeds, positions = [each.seed for each in SAMPLED], torch.tensor(POSITIONS)
    for purpose in Purpose:
        found = torch_noise.keys_at(torch_noise.mixed(seeds), positions, purpose)
        assert found.tolist() == torch_noise.keys(seeds, POSITIONS, purpose).tolist()
