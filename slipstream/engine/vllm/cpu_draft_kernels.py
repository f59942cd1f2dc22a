"""The kernels of vLLM's speculators (Model Runner V2) in torch, as `cpu_kernels` has those of its passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

PAD_SLOT = -1


def _prepare_prefill_inputs(*given: Any, **_: Any) -> None:
    """The draft layers' first pass: the target's tokens, each one place earlier, and the next token behind them."""
    last_indices, draft_step, input_ids, positions, starts, seq_lens, target_ids, target_positions = given[:8]
    states, last_sampled, next_tokens, sampled, rejected, target_starts, target_seq_lens, _most = given[8:]
    count = len(rejected)
    bounds = target_starts.tolist()
    for request, (state, dropped) in enumerate(zip(states[:count].tolist(), rejected.tolist(), strict=True)):
        first, end = bounds[request], bounds[request + 1] - dropped
        next_token = last_sampled[state, 0] if int(sampled[request]) > 0 else next_tokens[0, state]
        input_ids[first : end - 1] = target_ids[first + 1 : end]
        input_ids[end - 1] = next_token
        positions[first:end] = target_positions[first:end]
        last_indices[request] = end - 1
    starts[:count] = target_starts[:count]
    starts[count:] = bounds[count]
    seq_lens[:count] = target_seq_lens[:count]
    seq_lens[count:] = 0
    last_indices[count:] = 0
    draft_step.fill_(0)


def _prepare_decode_inputs(*given: Any, ADVANCE_DRAFT_POSITIONS: bool, **_: Any) -> None:
    drafts, _stride, target_seq_lens, rejected, input_ids, positions, sample_positions, starts, seq_lens = given[:9]
    longest, most = given[9:]
    count = len(drafts)
    starts[: most + 1] = torch.arange(most + 1).clamp(max=count)
    input_ids[:count] = drafts
    sample_positions[:count] += 1
    lengths = target_seq_lens[:count] - rejected
    if ADVANCE_DRAFT_POSITIONS:
        positions[:count] = (positions[:count] + 1).clamp(max=longest - 1)
        lengths = (lengths + 1).clamp(max=longest)
    seq_lens[:count] = lengths
    seq_lens[count:] = 0


def _update_draft_inputs(*given: Any, ADVANCE_DRAFT_POSITIONS: bool, **_: Any) -> None:
    output, _stride, next_hidden, _hidden_stride, input_ids, positions, sample_positions, seq_lens = given[:8]
    drafts, draft_step, hidden, _stride, _size, longest, steps = given[8:]
    count, step = len(drafts), int(draft_step)
    output[:count, step] = drafts
    if step >= steps - 1:
        return
    sample_positions[:count] += 1
    input_ids[:count] = drafts
    next_hidden[:count] = hidden[:count]
    if ADVANCE_DRAFT_POSITIONS:
        positions[:count] = (positions[:count] + 1).clamp(max=longest - 1)
        seq_lens[:count] = (seq_lens[:count] + 1).clamp(max=longest)


def _prepare_dflash_inputs(*given: Any, SAMPLE_FROM_ANCHOR: bool, **_: Any) -> None:
    """The block behind each request: its last token and masks; and where the step's tokens and the block have KV."""
    input_ids, positions, starts, seq_lens, slots, context_positions, context_slots = given[:7]
    indices, sample_positions, sample_states, own_temperature, own_seeds = given[7:12]
    target_positions, target_starts, states, last_sampled, next_tokens, sampled, rejected = given[12:19]
    temperature, seeds, table, _stride, mask, size, rows, depth, most, tokens, longest, _rank = given[19:]
    count, first_sample = len(rejected), 0 if SAMPLE_FROM_ANCHOR else 1
    bounds = target_starts.tolist()
    for request, (state, dropped) in enumerate(zip(states[:count].tolist(), rejected.tolist(), strict=True)):
        first, end = bounds[request], bounds[request + 1]
        valid = end - dropped
        context_positions[first:valid] = target_positions[first:valid]
        context_positions[valid:end] = 0
        context_slots[first:valid] = _slots(table[request], target_positions[first:valid], size)
        context_slots[valid:end] = PAD_SLOT
        at = request * rows
        own = int(target_positions[valid - 1]) + 1 + torch.arange(rows)
        input_ids[at : at + rows] = mask
        input_ids[at] = last_sampled[state, 0] if int(sampled[request]) > 0 else next_tokens[0, state]
        positions[at : at + rows] = own.clamp(max=longest - 1)
        slots[at : at + rows] = _slots(table[request], own, size)
        drafted = slice(request * depth, (request + 1) * depth)
        indices[drafted] = at + first_sample + torch.arange(depth)
        sample_positions[drafted] = own[first_sample : first_sample + depth] + 1 - first_sample
        sample_states[drafted] = state
        starts[request] = at
        seq_lens[request] = min(int(own[0]) + rows, longest)
        own_temperature[state], own_seeds[state] = temperature[state], seeds[state]
    starts[count : most + 1] = count * rows
    seq_lens[count:most] = 0
    indices[count * depth : most * depth] = 0
    sample_positions[count * depth : most * depth] = 0
    sample_states[count * depth : most * depth] = -1
    slots[count * rows : tokens] = PAD_SLOT


def _slots(table: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """Block 0 is none."""
    blocks = table[(positions // size).clamp(max=len(table) - 1)].long()
    return torch.where(blocks > 0, blocks * size + positions % size, PAD_SLOT)


DRAFT_KERNELS: dict[str, Callable[..., None]] = {
    "dflash.speculator._prepare_dflash_inputs_kernel": _prepare_dflash_inputs,
    "target_dependent_ar.speculator._prepare_prefill_inputs_kernel": _prepare_prefill_inputs,
    "target_dependent_ar.speculator._prepare_decode_inputs_kernel": _prepare_decode_inputs,
    "target_dependent_ar.speculator._update_draft_inputs_kernel": _update_draft_inputs,
}
"""By name below vLLM's `v1.worker.gpu.spec_decode`."""
