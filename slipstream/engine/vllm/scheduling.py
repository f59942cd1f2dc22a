"""vLLM's scheduler outputs, of sequences whose KV blocks are ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slipstream.engine.kvcache.kv_cache import Moves

NULL_BLOCKS = 1
"""vLLM never writes its block 0; our block i is its block i + 1."""


def numbered(blocks: Sequence[int]) -> list[int]:
    """vLLM's numbers of these blocks."""
    return [block + NULL_BLOCKS for block in blocks]


def block_copies(moves: Moves, block_size: int) -> list[tuple[int, int]]:
    """The blocks to copy for these rows, of a shared block that a rollback made writable: vLLM copies whole
    blocks."""
    return sorted({(source // block_size, target // block_size) for source, target in moves})


def new_request(
    name: str, token_ids: Sequence[int], blocks: Sequence[int], computed: int, extra: Mapping[str, Any] | None = None
) -> Any:
    """vLLM's NewRequestData, neutral for its sampling; `extra` travels along. `computed`: leading tokens with KV."""
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData

    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, extra_args=dict(extra) if extra else None)
    return NewRequestData(
        req_id=name,
        prompt_token_ids=list(token_ids),
        mm_features=[],
        sampling_params=params,
        pooling_params=None,
        block_ids=(numbered(blocks),),
        num_computed_tokens=computed,
        lora_request=None,
        prefill_token_ids=list(token_ids),
    )


def no_cached_requests() -> Any:
    from vllm.v1.core.sched.output import CachedRequestData

    return CachedRequestData.make_empty()


def add_cached_request(cached: Any, name: str, added_blocks: Sequence[int], computed: int, output_tokens: int) -> None:
    """Adds a request that is known already to vLLM's CachedRequestData. `added_blocks`: behind those that it has."""
    cached.req_ids.append(name)
    cached.new_block_ids.append((numbered(added_blocks),) if added_blocks else None)
    cached.num_computed_tokens.append(computed)
    cached.num_output_tokens.append(output_tokens)


def scheduler_output(
    new: list[Any],
    cached: Any,
    sizes: dict[str, int],
    ended: Iterable[str],
    copies: Iterable[tuple[int, int]],
    candidates: dict[str, list[int]] | None = None,
) -> Any:
    """vLLM's SchedulerOutput. `sizes`: tokens that the step computes of each request, `candidates` included."""
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
    from vllm.v1.core.sched.output import SchedulerOutput

    shift = NULL_BLOCKS
    return SchedulerOutput(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=sizes,
        total_num_scheduled_tokens=sum(sizes.values()),
        scheduled_spec_decode_tokens=candidates or {},
        scheduled_encoder_inputs={},
        finished_req_ids=set(ended),
        free_encoder_mm_hashes=[],
        kv_cache_block_copies=[KVCacheBlockCopy(a + shift, b + shift) for a, b in copies] or None,
    )
