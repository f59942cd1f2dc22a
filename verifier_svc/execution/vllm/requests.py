"""KV blocks and the requests that vLLM's workers know: our bookkeeping above, vLLM's scheduler outputs below.

A worker keeps a request's tokens and blocks from its first step on and is sent only what is new. What it has of a
sequence is dropped, and sent anew under another name, whenever it may differ from the verifier's: after a step that
failed, and after a rollback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.engine.kvcache.kv_cache import KVCache, Moves
from slipstream.engine.model_info import ModelInfo
from slipstream.engine.segment import KVSequence, Segment
from slipstream.speculation.draft_distribution import DraftDistribution
from verifier_svc.execution.vllm.messages import SessionParameters, StepProposals

NULL_BLOCKS = 1
"""vLLM never writes its block 0; our block i is its block i + 1."""


class RequestStep(NamedTuple):
    """One sequence's part of a step."""

    segment: Segment
    tokens: list[int]
    """All committed tokens, those that this step does not reach included."""
    parameters: Callable[[], SessionParameters]
    proposals: tuple[DraftDistribution | None, ...] = ()


@dataclass(slots=True)
class KnownRequest:
    """What the workers have of one sequence."""

    name: str
    prompt_length: int
    """Tokens when they got it; for vLLM these are the prompt."""
    blocks: int


class WorkerRequests:
    """The KV blocks of vLLM's workers, and the requests there. Chains alone: `KVCache.keep` never moves rows."""

    def __init__(self, pool: BlockPool, model: ModelInfo) -> None:
        self.kv = KVCache(pool, model.max_length, self._copy_rows, self.forget)
        self._known: dict[KVSequence, KnownRequest] = {}
        self._ended: list[str] = []
        """Names that the workers shall drop; sent until a step succeeds."""
        self._copies: list[tuple[int, int]] = []
        """Blocks to copy before the next step."""
        self._numbers = count()
        self._number = self._succeeded = 0
        """The numbers of the last step, and of the last that succeeded; 0 where there was none."""

    def forget(self, sequence: KVSequence) -> None:
        """Makes the workers drop what they have of the sequence; its KV stays."""
        if (known := self._known.pop(sequence, None)) is not None:
            self._ended.append(known.name)

    def _copy_rows(self, moves: Moves) -> None:
        """Only the rows of a shared block that a rollback made writable again: vLLM copies whole blocks."""
        size = self.kv.block_size
        self._copies += sorted({(source // size, target // size) for source, target in moves})

    def name_of(self, sequence: KVSequence) -> str:
        """The name of a sequence that is part of the last scheduler output."""
        return self._known[sequence].name

    def schedule(self, step: Sequence[RequestStep]) -> Any:
        """vLLM's scheduler output of the step. Raises what `Engine.forward` raises for malformed segments."""
        from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
        from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

        self.kv.check_step([each.segment for each in step])
        new: list[Any] = []
        cached = CachedRequestData.make_empty()
        sizes: dict[str, int] = {}
        candidates: dict[str, list[int]] = {}
        proposals: dict[str, tuple[DraftDistribution | None, ...]] = {}
        for each in step:
            name = self._add_request(each, new, cached)
            sizes[name] = each.segment.tokens
            if each.segment.nodes:
                candidates[name] = each.segment.nodes
            if each.proposals:
                proposals[name] = each.proposals
        shift = NULL_BLOCKS
        output = SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=sizes,
            total_num_scheduled_tokens=sum(sizes.values()),
            scheduled_spec_decode_tokens=candidates,
            scheduled_encoder_inputs={},
            finished_req_ids=set(self._ended),
            free_encoder_mm_hashes=[],
            kv_cache_block_copies=[KVCacheBlockCopy(a + shift, b + shift) for a, b in self._copies] or None,
        )
        output.proposals = StepProposals.of(proposals) if proposals else None
        self._number += 1
        output.number, output.succeeded = self._number, self._succeeded
        return output

    def step_succeeded(self, step: Sequence[RequestStep]) -> None:
        """The workers have all that the last output held."""
        self._succeeded = self._number
        self._ended.clear()
        self._copies.clear()
        for each in step:
            each.segment.sequence.ahead = each.segment.tokens

    def step_failed(self, step: Sequence[RequestStep]) -> None:
        """Nobody knows what the workers have of the step; their KV below it is as it was."""
        for each in step:
            self.forget(each.segment.sequence)

    def _add_request(self, each: RequestStep, new: list[Any], cached: Any) -> str:
        from vllm.v1.core.sched.output import NewRequestData

        sequence = each.segment.sequence
        known = self._known.get(sequence)
        if known is None:
            known = self._known[sequence] = KnownRequest(f"r{next(self._numbers)}", len(each.tokens), 0)
            new.append(
                NewRequestData(
                    req_id=known.name,
                    prompt_token_ids=list(each.tokens),
                    mm_features=[],
                    sampling_params=_sampling_params(each.parameters()),
                    pooling_params=None,
                    block_ids=(_numbered(sequence.blocks),),
                    num_computed_tokens=sequence.length,
                    lora_request=None,
                )
            )
        else:
            added = sequence.blocks[known.blocks :]
            cached.req_ids.append(known.name)
            cached.new_block_ids.append((_numbered(added),) if added else None)
            cached.num_computed_tokens.append(sequence.length)
            cached.num_output_tokens.append(len(each.tokens) - known.prompt_length)
        known.blocks = len(sequence.blocks)
        return known.name


def _numbered(blocks: list[int]) -> list[int]:
    """vLLM's numbers of these blocks."""
    return [block + NULL_BLOCKS for block in blocks]


def _sampling_params(parameters: SessionParameters) -> Any:
    """Neutral for vLLM's own sampling; ours travels along."""
    from vllm import SamplingParams

    from verifier_svc.execution.vllm.messages import EXTRA

    return SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, extra_args={EXTRA: parameters.pack()})
