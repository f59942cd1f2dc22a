"""vLLM's Triton kernels between two passes of Model Runner V2, in torch: its build for CPUs brings no Triton.

Each takes the arguments of the kernel that it stands for, by vLLM's own registry. Requests are looped over: a CPU runs
few. What only vLLM's own samplers read is left out. Those of its speculators are in `cpu_draft_kernels`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

PACKAGE = "vllm.v1.worker.gpu"
PAD_SLOT = -1


def register() -> None:
    """For this process."""
    import vllm.config.vllm
    from vllm.triton_utils import triton
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils.math_utils import next_power_of_2

    from slipstream.engine.vllm.cpu_draft_kernels import DRAFT_KERNELS

    vllm.config.vllm.HAS_TRITON = True  # V2 asks for it again wherever a configuration is copied
    triton.next_power_of_2 = next_power_of_2  # which the stand-in for Triton's module lacks
    register_kernels(
        {
            f"{PACKAGE}.buffer_utils._apply_write_kernel": _apply_write,
            f"{PACKAGE}.input_batch._prepare_prefill_inputs_kernel": _prepare_prefill_inputs,
            f"{PACKAGE}.input_batch._prepare_pos_seq_lens_kernel": _prepare_pos_seq_lens,
            f"{PACKAGE}.input_batch._combine_sampled_and_draft_tokens_kernel": _combine_sampled_and_draft_tokens,
            f"{PACKAGE}.input_batch._expand_idx_mapping_kernel": _expand_idx_mapping,
            f"{PACKAGE}.input_batch._post_update_kernel": _post_update,
            f"{PACKAGE}.block_table._gather_block_tables_kernel": _gather_block_tables,
            f"{PACKAGE}.block_table._compute_slot_mappings_kernel": _compute_slot_mappings,
        }
        | {f"{PACKAGE}.spec_decode.{name}": kernel for name, kernel in DRAFT_KERNELS.items()}
    )


def _apply_write(*given: Any, **_: Any) -> None:
    output, stride, rows, starts, contents, ends, _groups = given
    flat, begin = output.view(-1), 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        at = row * stride + start
        flat[at : at + end - begin] = contents[begin:end]
        begin = end


def _prepare_prefill_inputs(*given: Any, **_: Any) -> None:
    input_ids, next_tokens, _stride, ahead, states, starts, tokens, _tokens_stride, prefill_lens, computed = given
    bounds = starts.tolist()
    for request, state in enumerate(states.tolist()):
        known, prefill = int(computed[state]), int(prefill_lens[state])
        if known < prefill:
            first, end = bounds[request : request + 2]
            behind = known + end - first
            input_ids[first:end] = tokens[state, known:behind]
            known_ahead = tokens[state, behind : min(behind + ahead, prefill)]
            next_tokens[:ahead, state] = 0
            next_tokens[: len(known_ahead), state] = known_ahead


def _prepare_pos_seq_lens(*given: Any, **_: Any) -> None:
    positions, seq_lens, states, starts, computed, _size = given
    bounds = starts.tolist()
    seq_lens[len(states) :] = 0
    for request, known in enumerate(computed[states].tolist()):
        first, end = bounds[request : request + 2]
        seq_lens[request] = known + end - first
        positions[first:end] = torch.arange(known, known + end - first)


def _combine_sampled_and_draft_tokens(*given: Any, **_: Any) -> None:
    input_ids, states, last_sampled, starts, seq_lens, prefill_lens, drafts, _stride, logit_starts, indices = given
    bounds, rows, lengths = starts.tolist(), logit_starts.tolist(), seq_lens.tolist()
    for request, state in enumerate(states.tolist()):
        end, count = bounds[request + 1], rows[request + 1] - rows[request]
        indices[rows[request] : rows[request + 1]] = torch.arange(end - count, end)
        prefill = int(prefill_lens[state])
        if lengths[request] <= prefill:
            continue
        if lengths[request] - count >= prefill:
            input_ids[end - count] = last_sampled[state, 0]
        input_ids[end - count + 1 : end] = drafts[state, : count - 1]


def _expand_idx_mapping(*given: Any, **_: Any) -> None:
    states, expanded, depths, logit_starts = given
    counts = logit_starts.diff()
    expanded[:] = states.repeat_interleave(counts)
    depths[:] = torch.arange(len(depths)) - logit_starts[:-1].repeat_interleave(counts)


def _post_update(*given: Any, **_: Any) -> None:
    states, computed, last_sampled, _bins, _bins_stride, sampled, _stride, counts, rejected, starts = given[:10]
    tokens, _tokens_stride, total_lens = given[10:]
    computed[states] += starts[1 : len(states) + 1] - starts[: len(states)] - rejected
    for request, (state, count) in enumerate(zip(states.tolist(), counts.tolist(), strict=True)):
        if count:
            length = int(total_lens[state])
            tokens[state, length : length + count] = sampled[request, :count]
            last_sampled[state] = int(sampled[request, count - 1])
            total_lens[state] = length + count


def _gather_block_tables(*given: Any, **_: Any) -> None:
    states, sources, targets, strides, blocks, _blocks_stride, size = given
    for group, stride in enumerate(strides.tolist()):
        source, target = (_table(int(addresses[group]), blocks.shape[1], stride) for addresses in (sources, targets))
        target[:size] = source[states.numpy()]


def _compute_slot_mappings(*given: Any, **_: Any) -> None:
    _most, states, starts, positions, tables, strides, sizes, _enabled, _sharded, slots, _stride, _rank = given
    count = len(states)
    end = int(starts[count])
    owners = states.repeat_interleave(starts[: count + 1].diff()).numpy()
    at = positions[:end].numpy()
    for group, stride in enumerate(strides.tolist()):
        size = int(sizes[group])
        table = _table(int(tables[group]), int(owners.max()) + 1, stride)
        slots[group, :end] = torch.from_numpy(table[owners, at // size].astype(np.int64) * size + at % size)
        slots[group, end:] = PAD_SLOT


def _table(address: int, rows: int, stride: int) -> npt.NDArray[np.int32]:
    """The block table at this address."""
    return np.ctypeslib.as_array((ctypes.c_int32 * (rows * stride)).from_address(address)).reshape(rows, stride)
