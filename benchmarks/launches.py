"""What steps give a GPU to do and where the host waits for it, counted on a machine without one.

usage: python -m benchmarks.launches     (fails if a step exceeds its budget)

Passes of the shipped target (sessions x tokens, after 256 tokens of context), calls of the shipped draft model's
proposer for 8 sessions, what they take beside the passes where vLLM computes those, one level's ranking of these,
sampling steps of vLLM's workers, and the sampling of one draft token of vLLM's own speculator behind such a step, which
a captured graph holds. Steps, and the level that is ranked: 2 requests of 3 candidates, 32,000 tokens in the
vocabulary, bf16 logits; with more requests there are as many launches.
Everything runs on a `benchmarks.virtual_gpu.VirtualGPU`, where an operator of torch is one launch. Waits are the places
where the host stops until the device has done all that it was given: every copy to the host is one, so a call that
returns tokens waits at least once; what a sampling step decides is copied by the caller. Bytes are those that launches
read and write, as a multiple of the bytes of the logits that are sampled from.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.processes import MODELS
from benchmarks.records import Row, write
from benchmarks.virtual_gpu import DEVICE, Remote, VirtualGPU, Work
from slipstream.engine.devices import download
from slipstream.engine.engine import HiddenRequest, ModelOutput
from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.engine.kvcache.kv_cache import KVCache
from slipstream.engine.models.attention_layers import probe_layers
from slipstream.engine.models.checkpoint import describe_checkpoint, load_checkpoint
from slipstream.engine.models.forward_trial import lean_decoder
from slipstream.engine.models.packed_library import unpacked
from slipstream.engine.sampler.logits_processor import SampledRow
from slipstream.engine.segment import KVSequence, Segment
from slipstream.engine.torch_engine import TorchEngine
from slipstream.proposers.base import ROOT, DeeperLevels, Proposal, ProposerContext
from slipstream.proposers.chain_model import ChainProposer
from slipstream.proposers.draft_model import ModelProposer
from slipstream.proposers.node_choice import NodeChooser
from slipstream.speculation.sampling_params import SamplingParams
from verifier_svc.execution.vllm.draft_sampler import DraftSampler
from verifier_svc.execution.vllm.messages import SessionParameters, StepMasks
from verifier_svc.execution.vllm.step_sampler import StepRows, StepSampler

PASSES = ((1, 1), (1, 8), (8, 8), (16, 8))
"""Sessions and tokens of each."""
CONTEXT = 256
LEVELS = (1, 4)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "T": SamplingParams(temperature=0.8, seed=7),
    "top-p": SamplingParams(temperature=0.8, seed=7, top_p=0.9),
    "top-k, top-p, min-p": SamplingParams(temperature=0.8, seed=7, top_k=50, top_p=0.9, min_p=0.02),
    "penalties": SamplingParams(
        temperature=0.8,
        seed=7,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={5: 1.0},
    ),
}
PROPOSED = ("greedy", "T", "top-p")
SESSIONS = 8
"""That are proposed for."""
REQUESTS, CANDIDATES, VOCABULARY = 2, 3, 32_000


class Budget(NamedTuple):
    """The most of each that a step may take."""

    launches: int
    to_device: int
    to_host: int
    """And as many waits."""
    multiple: float = math.inf
    """Bytes read and written / bytes of the logits."""


BUDGETS = {
    "pass of 1 x 1": Budget(105, 1, 0),
    "pass of 1 x 8": Budget(115, 2, 0),
    "pass of 8 x 8": Budget(145, 6, 0),
    "pass of 16 x 8": Budget(145, 6, 0),
    "propose, greedy, levels: 1": Budget(105, 7, 1),
    "propose, greedy, levels: 4": Budget(420, 28, 4),
    "propose, T, levels: 1": Budget(140, 9, 1),
    "propose, T, levels: 4": Budget(560, 36, 4),
    "propose, top-p, levels: 1": Budget(190, 11, 1),
    "propose, top-p, levels: 4": Budget(760, 44, 4),
    "chain, greedy, levels: 1": Budget(12, 1, 1),
    "chain, greedy, levels: 4": Budget(48, 4, 1),
    "chain, T, levels: 1": Budget(12, 1, 1),
    "chain, T, levels: 4": Budget(48, 4, 1),
    "chain, top-p, levels: 1": Budget(12, 1, 1),
    "chain, top-p, levels: 4": Budget(48, 4, 1),
    "ranking, greedy": Budget(12, 1, 0, 3),
    "ranking, T": Budget(12, 1, 0, 3),
    "ranking, top-p": Budget(12, 1, 0, 3),
    "sampling, greedy": Budget(12, 2, 0, 3),
    "sampling, T": Budget(12, 2, 0, 3),
    "sampling, top-p": Budget(12, 2, 0, 3),
    "sampling, top-k, top-p, min-p": Budget(12, 2, 0, 3),
    "sampling, penalties": Budget(12, 4, 0, 3),
    "sampling, mask": Budget(12, 2, 0, 3),
    "draft token, greedy and T": Budget(70, 0, 0),
}


def exceeded(found: Mapping[str, Work]) -> list[str]:
    """Which steps take more than their budgets, and what of."""
    over = []
    for name, work in found.items():
        most = BUDGETS[name]
        taken = (work.launches.total(), work.to_device, work.to_host, work.bytes / logits_bytes())
        for what, count, limit in zip(Budget._fields, taken, most, strict=True):
            if count > limit:
                over.append(f"{name}: {what} {count:g} > {limit:g}")
        if work.waits.total() > most.to_host:
            over.append(f"{name}: waits {dict(work.waits)}")
    return over


def engine_on(gpu: VirtualGPU, model: str, tokens: int) -> TorchEngine:
    """One of the shipped models as a GPU computes it."""
    with unpacked():
        checkpoint = load_checkpoint(str(MODELS / model), "float32", lean=False)
    library = checkpoint.forward.model  # type: ignore[attr-defined]
    gpu.move(library)
    layers = probe_layers(library, DEVICE)
    return TorchEngine(replace(checkpoint, forward=lean_decoder(library, layers), layers=layers, device=DEVICE), tokens)


@torch.inference_mode()
def passes(gpu: VirtualGPU) -> dict[str, Work]:
    sessions, tokens = (max(column) for column in zip(*PASSES, strict=True))
    found = {}
    with gpu:
        engine = engine_on(gpu, "target", sessions * (CONTEXT + 32))
        sequences = [engine.kv.begin_unshared(CONTEXT + tokens) for _ in range(sessions)]
        prompts = [Segment(sequence, list(range(1, CONTEXT + 1)), want_logits=False) for sequence in sequences]
        engine.forward(prompts)
        for prompt in prompts:
            engine.kv.keep(prompt, [])
        for sessions, tokens in PASSES:
            nodes = [7] * (tokens - 1)
            segments = [Segment(each, [5], nodes, list(range(ROOT, tokens - 2))) for each in sequences[:sessions]]
            gpu.take()
            engine.forward(segments)
            found[f"pass of {sessions} x {tokens}"] = gpu.take()
    return found


@torch.inference_mode()
def proposals(gpu: VirtualGPU) -> dict[str, Work]:
    """The second call of each kind: the first one reads the prompts."""
    found = {}
    with gpu:
        proposer = ModelProposer(engine_on(gpu, "draft", 8192), width=4, proposal_tokens=32)
        for name in PROPOSED:
            for levels in LEVELS:
                for length in (100, 101):
                    contexts = [_context(f"{name} {levels} {at}", length, name, levels) for at in range(SESSIONS)]
                    gpu.take()
                    answers = proposer.propose(contexts)
                    assert all(isinstance(each, Proposal) and each.levels == levels for each in answers)
                    found[f"propose, {name}, levels: {levels}"] = gpu.take()
    return found


class Passes:
    """A `ChainEngine` whose logits are there at once: what is left of a call stands between vLLM's passes."""

    batch_invariant = False
    max_sequences = max_tokens = max_pending = 4096

    def __init__(self) -> None:
        self.kv = KVCache(BlockPool.holding(8192, 32), 2000)
        self.model = describe_checkpoint(str(MODELS / "draft"))
        self._drawn = torch.randn(SESSIONS, self.model.vocabulary_size, generator=torch.Generator().manual_seed(0))

    def forward(self, segments: list[Segment], hidden: HiddenRequest | None = None) -> ModelOutput:
        for each in segments:
            each.sequence.ahead = each.tokens
        return ModelOutput(Remote(4 * self._drawn))

    def extend(self, sequences: Sequence[KVSequence], tokens: Tensor) -> Tensor:
        for each in sequences:
            each.ahead += 1
        return Remote(4 * self._drawn)

    def fetch(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return download(*tensors)


def chains(gpu: VirtualGPU) -> dict[str, Work]:
    """What a call of a draft model on vLLM takes beside its passes."""
    found = {}
    with gpu:
        proposer = ChainProposer(Passes(), width=4, proposal_tokens=32)
        for name in PROPOSED:
            for levels in LEVELS:
                contexts = [_context(f"{name} {levels} {at}", 100, name, levels) for at in range(SESSIONS)]
                gpu.take()
                answers = proposer.propose(contexts)
                assert all(isinstance(each, Proposal) and each.levels == levels for each in answers)
                found[f"chain, {name}, levels: {levels}"] = gpu.take()
    return found


def rankings(gpu: VirtualGPU) -> dict[str, Work]:
    """One level of a chain: what its logits cost, which are as many and as large as a sampling step's."""
    found = {}
    for name in PROPOSED:
        with gpu:
            contexts = [_context(f"{at}", 100, name, 1) for at in range(REQUESTS * (CANDIDATES + 1))]
            drawn = torch.randn(len(contexts), VOCABULARY, generator=torch.Generator().manual_seed(0))
            logits = Remote((4 * drawn).bfloat16())
            chooser = NodeChooser(width=4, proposal_tokens=32)
            sampled = [SampledRow(each.sampling) for each in contexts]
            gpu.take()
            chooser.rank_raw(contexts, [100] * len(contexts), logits, sampled)
            found[f"ranking, {name}"] = gpu.take()
    return found


def _context(handle: str, length: int, name: str, levels: int) -> ProposerContext:
    return ProposerContext(
        handle=handle,
        tokens=list(range(1, length + 1)),
        length=length,
        prompt_length=4,
        max_length=2000,
        sampling=SAMPLINGS[name],
        expand=[ROOT],
        deeper=DeeperLevels(levels - 1, 4, [0.0], -1e9) if levels > 1 else None,
    )


@torch.inference_mode()
def sampling_steps(gpu: VirtualGPU) -> dict[str, Work]:
    """Deciding; the host then reads the results once."""
    found = {}
    for name in (*SAMPLINGS, "mask"):
        with gpu:
            sampler = _sampler(SAMPLINGS["T" if name == "mask" else name])
            masks = _masks() if name == "mask" else None
            drawn = torch.randn(REQUESTS * (CANDIDATES + 1), VOCABULARY, generator=torch.Generator().manual_seed(0))
            logits = Remote((4 * drawn).bfloat16())
            counts, lengths = np.full(REQUESTS, CANDIDATES), np.full(REQUESTS, 100)
            rows = StepRows(_names(), counts, lengths, np.full(REQUESTS, True))
            gpu.take()
            decided = sampler.decide(logits, rows, masks)
            found[f"sampling, {name}"] = gpu.take()
            sampler.fetch(*decided)
            assert gpu.take().to_host == 1
    return found


@torch.inference_mode()
def draft_tokens(gpu: VirtualGPU) -> dict[str, Work]:
    """The speculator's sampling of one level; the host reads its tokens with the step's."""
    with gpu:
        sampler = DraftSampler(REQUESTS, CANDIDATES, DEVICE)
        sampler.begin(range(REQUESTS), [SAMPLINGS["greedy"], SAMPLINGS["T"]])
        logits = Remote(torch.randn(REQUESTS, VOCABULARY, generator=torch.Generator().manual_seed(0)).bfloat16())
        places, positions = Remote(torch.arange(REQUESTS)), Remote(torch.arange(100, 100 + REQUESTS))
        column = Remote(torch.tensor(1))
        gpu.take()
        sampler.choose(logits, places, positions, column)
        found = gpu.take()
        sampler.log_probs(places)
        assert gpu.take().to_host == 0
    return {"draft token, greedy and T": found}


def _names() -> list[str]:
    return [f"r{index}" for index in range(REQUESTS)]


def _sampler(sampling: SamplingParams) -> StepSampler:
    sampler = StepSampler(VOCABULARY, DEVICE)
    chains = {name: list(range(CANDIDATES * index, CANDIDATES * (index + 1))) for index, name in enumerate(_names())}
    sampler.begin([(name, SessionParameters(sampling, 50), range(100)) for name in chains], (), chains)
    return sampler


def _masks() -> StepMasks:
    requests, depths = np.repeat(np.arange(REQUESTS), CANDIDATES + 1), np.tile(np.arange(CANDIDATES + 1), REQUESTS)
    bits = np.random.default_rng(0).integers(0, 256, (len(requests), VOCABULARY // 8), dtype=np.uint8)
    return StepMasks(_names(), requests, depths, bits)


def logits_bytes() -> int:
    """Of a sampling step."""
    return REQUESTS * (CANDIDATES + 1) * VOCABULARY * torch.bfloat16.itemsize


def row(name: str, work: Work, logits: int | None) -> Row:
    return {
        "step": name,
        "launches": work.launches.total(),
        "copies to the device": work.to_device,
        "copies to the host": work.to_host,
        "waits": work.waits.total(),
        "bytes / bytes of the logits": work.bytes / logits if logits else None,
    }


def main() -> None:
    gpu = VirtualGPU()
    computed, sampled = (
        passes(gpu) | proposals(gpu) | chains(gpu) | draft_tokens(gpu),
        rankings(gpu) | sampling_steps(gpu),
    )
    rows = [row(name, work, None) for name, work in computed.items()]
    rows += [row(name, work, logits_bytes()) for name, work in sampled.items()]
    write("launches", "python -m benchmarks.launches", rows)
    if over := exceeded(computed | sampled):
        sys.exit("\n".join(over))


if __name__ == "__main__":
    main()
