"""The batched sampling of vLLM's workers decides as the acceptance rules do, on logits and candidates of any kind."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from benchmarks.virtual_gpu import DEVICE, VirtualGPU
from slipstream.engine.sampler import coupled_sampling
from slipstream.engine.sampler.logits_processor import SampledRow, logprobs, process
from slipstream.engine.sampler.token_history import TokenHistory
from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.tokenizer.grammar import Mask
from tests.support.enumeration import chain
from verifier_svc.acceptance.judge import VerifyInput, judge
from verifier_svc.acceptance.result import AcceptanceResult, BrokenNumbers
from verifier_svc.execution.vllm import step_sampler
from verifier_svc.execution.vllm.messages import SampledStep, SessionParameters, StepMasks, StepProposals
from verifier_svc.execution.vllm.session_table import SessionTable
from verifier_svc.execution.vllm.step_sampler import StepRows, StepSampler

VOCABULARY = 320
CPU = torch.device("cpu")
OWN = tuple(str(Path(__file__).parents[4] / package) for package in ("slipstream", "verifier_svc"))
ALLOWED = tuple(range(0, VOCABULARY, 3))
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=2**64 - 1),
    SamplingParams(temperature=1.3, seed=5, top_k=7, top_p=0.9),
    SamplingParams(temperature=0.9, seed=6, min_p=0.2),
    SamplingParams(temperature=0.7, seed=7, repetition_penalty=1.7, presence_penalty=-1.0, frequency_penalty=0.6),
    SamplingParams(temperature=0.0, repetition_penalty=0.6, logit_bias={3: 9.0, 300: -40.0}),
    SamplingParams(temperature=1.0, seed=8, logit_bias={11: 2.5}),
    SamplingParams(temperature=0.9, seed=9, acceptance="rejection"),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, acceptance="rejection"),
    SamplingParams(temperature=0.8, seed=10, top_k=9, top_p=0.95, frequency_penalty=1.1, acceptance="rejection"),
    SamplingParams(temperature=1.1, seed=11, min_p=0.05, logit_bias={3: 4.0, 210: -2.0}, acceptance="rejection"),
    SamplingParams(temperature=0.9, seed=12, repetition_penalty=1.3, logit_bias={3: 1.0}, allowed_token_ids=ALLOWED),
    SamplingParams(temperature=0.0, allowed_token_ids=(300,)),
    SamplingParams(temperature=1.2, seed=13, top_k=30, allowed_token_ids=ALLOWED, acceptance="rejection"),
]


APPLIED_BY_GRAMMAR = {"bad_words_ids"}
"""By `verifier_svc.grammar.token_constraint`, for both executors."""


def test_every_sampling_parameter_is_tried_here() -> None:
    """One that the batched sampling did not know of would be ignored on vLLM."""
    names, neutral = {each.name for each in fields(SamplingParams)}, SamplingParams()
    tried = {name for name in names if any(getattr(each, name) != getattr(neutral, name) for each in SAMPLINGS)}
    assert tried | APPLIED_BY_GRAMMAR == names


class Verified(NamedTuple):
    name: str
    sampling: SamplingParams
    tokens: list[int]
    prompt_length: int
    drafts: list[int]
    distributions: tuple[DraftDistribution | None, ...]
    masks: dict[int, Mask]
    """By the number of candidates before the row."""


class Masks:
    def __init__(self, masks: dict[int, Mask]) -> None:
        self._masks = masks

    def after(self, path: tuple[int, ...]) -> Mask | None:
        return self._masks.get(len(path))


def request(name: str, sampling: SamplingParams, chance: np.random.Generator) -> Verified:
    size, candidates = int(chance.integers(4, 20)), int(chance.integers(0, 6))
    tokens = chance.integers(0, 24, size).tolist()  # few, so that penalties see them again
    drafts = chance.integers(0, 24, candidates).tolist()
    given = None
    if not sampling.coupled:
        others = chance.integers(24, 60, candidates).tolist()
        shares = chance.integers(1, 65536, (candidates, 2)).tolist()
        given = tuple(
            DraftDistribution((token, other), tuple(share)) if chance.random() < 0.7 else None
            for token, other, share in zip(drafts, others, shares, strict=True)
        )
        if given and given[-1] is not None and chance.random() < 0.3:  # a draft that lies
            given = (*given[:-1], DraftDistribution((100,), (1,)))
    masks = {}
    if chance.random() < 0.4:
        bits = chance.integers(0, 256, (candidates + 1, VOCABULARY // 8), dtype=np.uint8)
        masks = {depth: row for depth, row in enumerate(bits) if depth != 1}
    return Verified(name, sampling, tokens, size // 2, drafts, given or (None,) * candidates, masks)


def proposals_of(requests: list[Verified]) -> StepProposals | None:
    found = {each.name: each.distributions for each in requests[::-1] if not each.sampling.coupled}
    return StepProposals.of(found) if found else None


def masks_of(requests: list[Verified]) -> StepMasks | None:
    masked = [each for each in requests[::-1] if each.masks]  # in an order of their own
    found = [(number, *pair) for number, each in enumerate(masked) for pair in each.masks.items()]
    if not found:
        return None
    owners, depths, bits = zip(*found, strict=True)
    return StepMasks([each.name for each in masked], np.array(owners), np.array(depths), np.stack(bits))


class Worker:
    """A StepSampler, in the place where a runner has it."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.sampler = StepSampler(VOCABULARY, device)
        self._device = device

    def begin(self, requests: list[Verified], new: bool = True, logprobs: int | None = None) -> None:
        added = [
            (each.name, SessionParameters(each.sampling, each.prompt_length, logprobs), each.tokens)
            for each in requests
        ]
        chains = {each.name: each.drafts for each in requests if each.drafts}
        self.sampler.begin(added if new else [], set(), chains, proposals_of(requests))

    def decide(self, requests: list[Verified], logits: torch.Tensor, decided: bool = True) -> SampledStep:
        counts = np.array([len(each.drafts) for each in requests])
        lengths = np.array([len(each.tokens) for each in requests])
        rows = StepRows([each.name for each in requests], counts, lengths, np.full(len(requests), decided))
        return self.sampler.fetch(*self.sampler.decide(logits.to(self._device), rows, masks_of(requests)))

    def step(self, requests: list[Verified], logits: torch.Tensor, new: bool = True) -> SampledStep:
        self.begin(requests, new)
        return self.decide(requests, logits)


def distribution_after(each: Verified, path: tuple[int, ...]) -> DraftDistribution | None:
    return each.distributions[len(path)]


def expected(requests: list[Verified], logits: torch.Tensor) -> list[AcceptanceResult | BrokenNumbers]:
    cases, row = [], 0
    for each in requests:
        history = TokenHistory(each.tokens[: each.prompt_length])
        history.append(each.tokens[each.prompt_length :])
        grammar = Masks(each.masks) if each.masks else None
        selection = chain(tuple(each.drafts), partial(distribution_after, each))
        cases.append(VerifyInput(selection, row, each.sampling, len(each.tokens), history, grammar))
        row += 1 + len(each.drafts)
    return judge(cases, logits)


def rows(requests: list[Verified]) -> int:
    return sum(1 + len(each.drafts) for each in requests)


def random_logits(requests: list[Verified], chance: np.random.Generator) -> torch.Tensor:
    """Peaked at the drafts more often than not, so that chains are accepted to any depth."""
    logits = torch.from_numpy(chance.normal(0.0, 2.0, (rows(requests), VOCABULARY)).astype(np.float32))
    row = 0
    for each in requests:
        for draft in each.drafts:
            if chance.random() < 0.8:
                logits[row, draft] += 20.0
            row += 1
        row += 1
    return logits


@pytest.mark.parametrize("seed", range(12))
def test_whole_batches_are_decided_as_the_rules_decide_each_session(seed: int) -> None:
    chance = np.random.default_rng(seed)
    requests = [request(f"r{index}", sampling, chance) for index, sampling in enumerate(SAMPLINGS * 2)]
    logits = random_logits(requests, chance)
    if seed % 3 == 0:
        logits[int(chance.integers(len(logits)))] = torch.nan
    results = expected(requests, logits.clone())
    sampled = Worker().step(requests, logits)
    tokens = sampled.tokens
    for each, result in zip(requests, results, strict=True):
        assert tokens[each.name], "never a row without a token"
        assert (each.name in sampled.broken) == isinstance(result, BrokenNumbers)
        if isinstance(result, AcceptanceResult):
            assert tokens[each.name] == [*(each.drafts[node] for node in result.path), result.next_token]
            assert (each.name in sampled.dishonest) == result.dishonest
    lengths = {len(each) for each in tokens.values()}
    assert len(lengths) > 2


@pytest.mark.parametrize("seed", range(2))
def test_kernels_on_a_gpu_decide_as_the_rules_decide_each_session(seed: int) -> None:
    chance = np.random.default_rng(seed)
    coupled = [sampling for sampling in SAMPLINGS if sampling.coupled]
    requests = [request(f"r{index}", sampling, chance) for index, sampling in enumerate(coupled)]
    logits = random_logits(requests, chance)
    logits[int(chance.integers(len(logits)))] = torch.nan
    results = expected(requests, logits.clone())
    with torch.inference_mode(), VirtualGPU() as gpu:
        sampled = Worker(DEVICE).step(requests, logits)
        tokens = sampled.tokens
        assert {"survey", "race", "cut", "accept", "count"} <= set(gpu.take().launches)
    for each, result in zip(requests, results, strict=True):
        assert (each.name in sampled.broken) == isinstance(result, BrokenNumbers)
        if isinstance(result, AcceptanceResult):
            assert tokens[each.name] == [*(each.drafts[node] for node in result.path), result.next_token]


@pytest.mark.parametrize("known", [True, False])
def test_a_cut_that_the_kernels_lack_is_computed_by_torch(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """And costs nothing while no session asks for it."""
    monkeypatch.setattr(step_sampler, "UNFUSED", () if known else ("top_k",))
    chance = np.random.default_rng(1)
    cut, other = SamplingParams(temperature=1.3, seed=5, top_k=7), SamplingParams(temperature=0.9, seed=6, min_p=0.2)
    for samplings, is_fused in (([cut, other], known), ([other, other], True)):
        requests = [request(f"r{index}", each, chance)._replace(masks={}) for index, each in enumerate(samplings)]
        logits = random_logits(requests, chance)
        results = expected(requests, logits.clone())
        with torch.inference_mode(), VirtualGPU() as gpu:
            tokens = Worker(DEVICE).step(requests, logits).tokens
            assert ("race" in gpu.take().launches) == is_fused
        for each, result in zip(requests, results, strict=True):
            assert isinstance(result, AcceptanceResult)
            assert tokens[each.name] == [*(each.drafts[node] for node in result.path), result.next_token]


@pytest.mark.parametrize(("device", "steps"), [(CPU, 6), (DEVICE, 3)], ids=["CPU", "GPU"])
def test_a_later_step_counts_the_tokens_committed_by_earlier_ones(device: torch.device, steps: int) -> None:
    """Penalties see what earlier steps committed, in the worker too, where only the first step brings the text."""
    with nullcontext() if device == CPU else VirtualGPU():
        count_decided(Worker(device), steps, copies=3 if device == CPU else 1)


def count_decided(worker: Worker, steps: int, copies: int) -> None:
    chance = np.random.default_rng(3)
    penalised = [sampling for sampling in SAMPLINGS if sampling.penalised and (copies > 1 or sampling.coupled)]
    requests = [
        request(f"r{index}", sampling, chance)._replace(masks={}) for index, sampling in enumerate(penalised * copies)
    ]
    for step in range(steps):
        logits = random_logits(requests, chance)
        results = expected(requests, logits.clone())
        tokens = worker.step(requests, logits, new=step == 0).tokens
        following = []
        for each, result in zip(requests, results, strict=True):
            assert isinstance(result, AcceptanceResult)
            decided = [*(each.drafts[node] for node in result.path), result.next_token]
            assert tokens[each.name] == decided
            drafts = chance.integers(0, 24, len(each.drafts)).tolist()
            given = (None,) * len(drafts)
            following.append(each._replace(tokens=[*each.tokens, *decided], drafts=drafts, distributions=given))
        requests = following


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [({"frequency_penalty": 0.4}, [7, 7, 8]), ({"presence_penalty": 0.7}, [7, 8]), ({}, [7] * 4)],
)
def test_penalties_count_the_candidates_before_a_row(penalty: dict[str, float], expected: list[int]) -> None:
    """The chain repeats the likeliest token; each candidate before a row makes it less likely there."""
    sampling = SamplingParams(temperature=0.0, **penalty)
    logits = torch.zeros(4, VOCABULARY)
    logits[:, 7], logits[:, 8] = 1.0, 0.5
    tokens = Worker().step([Verified("r", sampling, [1, 2, 3], 2, [7] * 3, (None,) * 3, {})], logits).tokens
    assert tokens["r"] == expected


@pytest.mark.parametrize("row", [0, 1, 2])
def test_broken_numbers_end_their_session_alone_and_it_still_gets_a_token(row: int) -> None:
    logits = torch.zeros(6, VOCABULARY)
    logits[:, 7] = 9.0
    logits[row] = torch.nan
    sampling = SamplingParams(temperature=0.0)
    requests = [Verified(name, sampling, [1, 2], 1, [7, 7], (None,) * 2, {}) for name in "ab"]
    sampled = Worker().step(requests, logits)
    tokens = sampled.tokens
    assert sampled.broken == ["a"] and len(tokens["a"]) == row + 1 and tokens["b"] == [7, 7, 7]


@pytest.mark.parametrize("device", [CPU, DEVICE], ids=["CPU", "GPU"])
def test_prefills_that_are_not_complete_commit_no_token(device: torch.device) -> None:
    """Beside one that decides: vLLM must neither append a token nor take one back."""
    chance = np.random.default_rng(4)
    requests = [request(name, SAMPLINGS[4], chance)._replace(masks={}) for name in "ab"]
    requests[0] = requests[0]._replace(drafts=[], distributions=())
    logits = random_logits(requests, chance)
    with nullcontext() if device == CPU else VirtualGPU():
        worker = Worker(device)
        worker.begin(requests)
        counts = np.array([0, len(requests[1].drafts)])
        rows = StepRows(["a", "b"], counts, np.array([5, 5]), np.array([False, True]))
        batch, decided = worker.sampler.decide(logits.to(device), rows, None)
        sampled = worker.sampler.fetch(batch, decided)
        kept, rest = decided.counts.cpu().tolist()
        before = sum(len(each.tokens) - each.prompt_length for each in requests)
        assert float(worker.sampler._table.adjustments.counts.sum().cpu()) == before + len(sampled.tokens["b"])
    assert sampled.tokens["a"] == [] and kept == [0, len(sampled.tokens["b"])]
    assert rest == [0, 1 + len(requests[1].drafts) - kept[1]]


@pytest.mark.parametrize("device", [CPU, DEVICE], ids=["CPU", "GPU"])
def test_padding_of_a_chain_is_never_accepted_and_changes_nothing(device: torch.device) -> None:
    """As for CUDA graphs of equal chains: each has a row for what pads it."""
    chance = np.random.default_rng(8)
    coupled = [sampling for sampling in SAMPLINGS if sampling.coupled]
    requests = [request(f"r{index}", sampling, chance)._replace(masks={}) for index, sampling in enumerate(coupled[:6])]
    logits, longest = random_logits(requests, chance), 6
    padded, pieces = [], []
    for each, own in zip(requests, logits.split([1 + len(each.drafts) for each in requests]), strict=True):
        more = longest - len(each.drafts)
        padded.append(each._replace(drafts=[*each.drafts, *[-1] * more], distributions=(None,) * longest))
        pieces += [own, torch.full((more, VOCABULARY), 3.0)]
    with nullcontext() if device == CPU else VirtualGPU():
        assert Worker(device).step(padded, torch.cat(pieces)) == Worker(device).step(requests, logits)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    chance = np.random.default_rng(5)
    requests = [request(f"r{index}", sampling, chance) for index, sampling in enumerate(SAMPLINGS)]
    logits = random_logits(requests, chance)
    worker = Worker()
    worker.begin(requests, logprobs=3)
    sampled = worker.decide(requests, logits.clone())
    assert sampled.logprobs is not None
    told = iter(sampled.logprobs.arrays.tokens())
    assert list(sampled.logprobs.names) == [each.name for each in requests]
    row = 0
    for each, length in zip(requests, sampled.logprobs.lengths, strict=True):
        decided = sampled.tokens[each.name]
        alone = logprobs(logits[row : row + len(decided)], torch.tensor(decided), np.full(len(decided), 3))
        assert len(decided) == length and list(islice(told, length)) == alone.tokens()
        row += 1 + len(each.drafts)
    assert not list(told)


@pytest.mark.parametrize("seed", range(8))
def test_whole_batches_are_processed_bit_for_bit_as_the_rows_of_the_embedded_engine(seed: int) -> None:
    chance = np.random.default_rng(seed)
    requests = [request(f"r{index}", sampling, chance) for index, sampling in enumerate(SAMPLINGS * 3)]
    logits = random_logits(requests, chance)
    given = list[SampledRow]()
    for each in requests:
        history = TokenHistory(each.tokens[: each.prompt_length])
        history.append(each.tokens[each.prompt_length :])
        for depth in range(1 + len(each.drafts)):
            given.append(SampledRow(each.sampling, history, tuple(each.drafts[:depth]), each.masks.get(depth)))
    worker = Worker()
    processed: list[torch.Tensor] = []
    whole = worker.sampler._process
    worker.sampler._process = lambda *rows: processed.append(whole(*rows)) or processed[0]  # type: ignore[method-assign, func-returns-value]
    worker.step(requests, logits.clone())
    assert torch.equal(processed[0], process(logits, given))


def test_slots_are_used_again_and_grow() -> None:
    worker, chance = Worker(), np.random.default_rng(6)
    for number in range(3):
        requests = [
            request(f"{number}-{index}", SAMPLINGS[4 * (index % 2)], chance)._replace(masks={}) for index in range(100)
        ]
        worker.step(requests, random_logits(requests, chance))
        worker.sampler.begin([], {each.name for each in requests}, {})
        assert len(worker.sampler._table.adjustments._free) == len(worker.sampler._table.adjustments.counts) == 64
    assert len(worker.sampler._table._columns) == 128


def test_a_session_that_cannot_be_added_leaves_the_others_their_own_counts() -> None:
    """As where the device has no memory for it. It would have had the slot of one whose counts another has now."""
    table = SessionTable(VOCABULARY, torch.device("cpu"))
    penalised, plain = (SessionParameters(sampling, 1) for sampling in (SAMPLINGS[4], SAMPLINGS[0]))
    table.add("gone", penalised, [1, 2])
    table.add("gone too", plain, [1, 2])
    table.remove("gone")
    table.remove("gone too")
    table.add("a", penalised, [1, 2, 2])
    with pytest.raises(IndexError):
        table.add("failing", penalised, [VOCABULARY])
    table.remove("failing")
    table.add("b", penalised, [1, 3])
    places = table.sessions(["a", "b"], 2)["adjustment"].tolist()
    assert table.adjustments.counts[places][:, 1:4].tolist() == [[0.0, 2.0, 0.0], [0.0, 0.0, 1.0]]
    assert sorted([*places, *table.adjustments._free]) == list(range(len(table.adjustments.counts)))


FEATURES = {
    "cuts": (SamplingParams(temperature=0.9, seed=3, top_k=9), False, None),
    "penalties": (
        SamplingParams(seed=3, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={3: 1.0}),
        False,
        None,
    ),
    "masks": (SamplingParams(temperature=0.9, seed=3), True, None),
    "logprobs": (SamplingParams(temperature=0.9, seed=3), False, 3),
    "the ratio rule": (SamplingParams(temperature=0.9, seed=3, acceptance="rejection"), False, None),
    "all": (SamplingParams(seed=3, top_p=0.9, presence_penalty=0.2, acceptance="rejection"), True, 3),
}


def work_of(sessions: int, sampling: SamplingParams, masked: bool, likely: int | None) -> tuple[int, int, int]:
    """Python lines that a step of so many sessions executes, and how often values are fetched: before all is decided,
    and with the results."""
    chance = np.random.default_rng(1)
    allowed = np.full(VOCABULARY // 8, 255, np.uint8)
    requests = [
        request(f"r{index}", sampling, chance)._replace(
            drafts=[1, 2, 3],
            distributions=(DraftDistribution((1, 2, 3), (5, 6, 7)),) * 3,
            masks=dict.fromkeys(range(4), allowed) if masked else {},
        )
        for index in range(sessions)
    ]
    worker = Worker()
    worker.begin(requests, logprobs=likely)
    worker.decide(requests, random_logits(requests, chance))
    logits, counts = random_logits(requests, chance), np.full(sessions, 3)
    worker.begin(requests, new=False)
    rows = StepRows([each.name for each in requests], counts, np.full(sessions, 9), counts > 0)
    masks = masks_of(requests)
    lines = fetched = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line" and frame.f_code.co_filename.startswith(OWN)
        return trace

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal fetched
        fetched += event == "c_call" and argument.__name__ in ("tolist", "item")

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        decided = worker.sampler.decide(logits, rows, masks)
        waits = fetched
        worker.sampler.fetch(*decided)
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return lines, waits, fetched


@pytest.mark.parametrize("feature", FEATURES)
def test_deciding_costs_as_many_lines_of_python_for_24_sessions_as_for_4(
    feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, which has no kernel of ours for the race: there a value that is fetched is waited for. With 24, the
    noise of all rows is computed in one block, as with 4."""
    monkeypatch.setattr(coupled_sampling, "contenders", lambda shifted, keys: None)
    lines, waits, fetched = work_of(4, *FEATURES[feature])
    assert lines > 20
    assert work_of(24, *FEATURES[feature]) == (lines, waits, fetched)
    assert waits == 0
