"""What steps give a GPU to do stays within budgets, and a step that does needless work exceeds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import launches
from benchmarks.virtual_gpu import VirtualGPU
from slipstream.engine import devices
from slipstream.engine.models import linear
from slipstream.engine.sampler import fused, fused_ranking
from slipstream.proposers import node_choice


@pytest.fixture
def small_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches, copies and waits are as many as with a large one, and the bytes are multiples of the logits' own."""
    monkeypatch.setattr(launches, "VOCABULARY", 2048)


def test_passes_stay_within_their_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "CONTEXT", 32)  # launches are as many
    found = launches.passes(VirtualGPU())
    assert len(found) == len(launches.PASSES) and not launches.exceeded(found)
    assert all(work.launches["mm"] > 20 for work in found.values())


def test_proposals_stay_within_their_budgets() -> None:
    found = launches.proposals(VirtualGPU())
    assert len(found) == 6 and not launches.exceeded(found)


def test_chains_on_vllm_stay_within_their_budgets_and_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "SESSIONS", 2)  # launches are as many, and kernels interpret as many rows
    found = launches.chains(VirtualGPU())
    assert len(found) == 6 and not launches.exceeded(found)
    # A launch for each of two sessions would be within the budget, and for each of eight beyond it.
    assert all(work.launches.total() == 8 * int(name[-1]) for name, work in found.items())


def test_a_chain_whose_tokens_are_read_between_two_levels_exceeds_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    extend = launches.Passes.extend

    def reading(passes: launches.Passes, sequences: Any, tokens: torch.Tensor) -> torch.Tensor:
        assert tokens.tolist()
        return extend(passes, sequences, tokens)

    monkeypatch.setattr(launches, "SESSIONS", 2)  # reads are as many, and kernels interpret as many rows
    monkeypatch.setattr(launches.Passes, "extend", reading)
    over = launches.exceeded(launches.chains(VirtualGPU()))
    assert any("chain, T, levels: 4: to_host 4 > 1" in each for each in over)


def test_a_level_of_a_chain_stays_within_its_budget_and_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "VOCABULARY", 16_384)  # of a smaller one the shortlists are a part
    found = launches.rankings(VirtualGPU())
    assert len(found) == 3 and not launches.exceeded(found)


@pytest.mark.usefixtures("small_vocabulary")
def test_without_kernels_each_level_of_a_chain_exceeds_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_ranking, "ranks", lambda logits, samplings, count: False)
    over = launches.exceeded(launches.rankings(VirtualGPU()) | launches.chains(VirtualGPU()))
    for what in ("launches", "multiple"):
        assert sum(f"ranking, {each}: {what} " in line for each in launches.PROPOSED for line in over) == 3
    assert sum("chain" in each and ": launches " in each for each in over) == 6


@pytest.mark.usefixtures("small_vocabulary")
def test_a_level_whose_tokens_are_read_exceeds_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fused_ranking.rank

    def reading(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ranked = whole(*given)
        assert ranked[0].tolist()
        return ranked

    monkeypatch.setattr(fused_ranking, "rank", reading)
    over = launches.exceeded(launches.rankings(VirtualGPU()))
    assert sum("to_host 1 > 0" in each for each in over) == 3


def test_sampling_steps_stay_within_their_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "VOCABULARY", 8192)  # of a smaller one the candidates' tables are a part
    found = launches.sampling_steps(VirtualGPU())
    assert len(found) == 6 and not launches.exceeded(found)
    masks = launches.REQUESTS * (launches.CANDIDATES + 1) * launches.VOCABULARY // 8
    for name, work in found.items():  # masks cross as bits
        assert work.bytes_to_device - (masks if "mask" in name else 0) < 2048


def test_a_draft_token_stays_within_its_budget_and_is_not_read() -> None:
    found = launches.draft_tokens(VirtualGPU())
    assert len(found) == 1 and not launches.exceeded(found)


@pytest.mark.usefixtures("small_vocabulary")
def test_a_draft_token_that_is_read_back_exceeds_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = launches.DraftSampler.choose

    def reading(sampler: launches.DraftSampler, *given: Any) -> torch.Tensor:
        chosen = whole(sampler, *given)
        assert chosen.tolist()
        return chosen

    monkeypatch.setattr(launches.DraftSampler, "choose", reading)
    over = launches.exceeded(launches.draft_tokens(VirtualGPU()))
    assert any("to_host 1 > 0" in each for each in over) and any("waits" in each for each in over)


def test_every_step_has_a_budget() -> None:
    kinds = len(launches.PASSES) + 2 * len(launches.PROPOSED) * len(launches.LEVELS) + len(launches.SAMPLINGS) + 2
    kinds += len(launches.PROPOSED)
    assert len(launches.BUDGETS) == kinds


def test_a_pass_with_one_more_launch_a_layer_exceeds_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = linear.Linear.__call__
    monkeypatch.setattr(launches, "CONTEXT", 32)  # what came before is no launch of these passes
    monkeypatch.setattr(linear.Linear, "__call__", lambda self, x: whole(self, x) + 0.0)
    over = launches.exceeded(launches.passes(VirtualGPU()))
    assert len(over) == len(launches.PASSES) and all("launches" in each for each in over)


@pytest.mark.usefixtures("small_vocabulary")
def test_copies_from_ordinary_memory_exceed_the_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_staged", lambda host, device: host)
    over = launches.exceeded(launches.sampling_steps(VirtualGPU()))
    assert sum("not pinned" in each for each in over) == 6


def test_reading_back_each_result_alone_exceeds_the_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_choice, "download", lambda *tensors: tensors)
    over = launches.exceeded(launches.proposals(VirtualGPU()))
    assert sum("tolist" in each for each in over) == 6


@pytest.mark.usefixtures("small_vocabulary")
def test_reading_a_value_back_exceeds_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fused.decide

    def looking(logits: torch.Tensor, *rest: Any) -> fused.Decided:
        assert logits.isfinite().any()
        return whole(logits, *rest)

    monkeypatch.setattr(fused, "decide", looking)
    over = launches.exceeded(launches.sampling_steps(VirtualGPU()))
    assert sum("_local_scalar_dense" in each for each in over) == 6


@pytest.mark.usefixtures("small_vocabulary")
def test_without_kernels_each_sampling_step_exceeds_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's operators take, which are left for sessions under a ratio rule: they do not wait either."""
    monkeypatch.setattr(fused, "fuses", lambda logits: False)
    over = launches.exceeded(launches.sampling_steps(VirtualGPU()))
    for what in ("launches", "multiple"):
        assert sum(f": {what} " in each for each in over) == 6
    assert not any("waits" in each for each in over)
