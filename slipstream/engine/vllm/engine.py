"""An engine whose passes vLLM computes, in this process: for draft models on GPUs, with quantised weights and captured
graphs.

It computes chains: committed tokens, and candidates one below the other. What the model says of the last one can be fed
back without reading it (`extend`), so several levels of a chain are enqueued one after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.engine.devices import download, take_rows
from slipstream.engine.engine import HiddenRequest, ModelOutput
from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.engine.kvcache.kv_cache import KVCache, Moves
from slipstream.engine.model_info import DIGITS, ModelInfo
from slipstream.engine.sampler import fused_ranking
from slipstream.engine.segment import KVSequence, Segment
from slipstream.engine.vllm import options
from slipstream.engine.vllm.options import FIXED, VLLMModel, VLLMRole
from slipstream.engine.vllm.scheduling import (
    NULL_BLOCKS,
    add_cached_request,
    block_copies,
    new_request,
    no_cached_requests,
    scheduler_output,
)
from slipstream.errors import FailedPrecondition, InvalidArgument, OutOfRange, SlipstreamError
from slipstream.tokenizer.vocabulary import common_prefix

ONE_DEVICE = "a draft model runs on one device"
DRAFTER = VLLMRole(
    "drafter",
    "draft model",
    FIXED
    | dict.fromkeys(("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--nnodes"), ONE_DEVICE)
    | {"--distributed-executor-backend": "vLLM runs in the drafter's process"},
)
KV_TOKENS = "slipstream_kv_tokens"
"""Key in vLLM's additional configuration: tokens that shall have KV, unless the operator gave something else."""
CANDIDATES = 128
"""Candidates above a pass's last token for which there is room beyond a step's tokens."""


@dataclass(slots=True)
class _RunnerSequence:
    """A sequence as the runner has it."""

    name: str
    blocks: list[int]


class VLLMEngine:
    """Owned by the model's thread. `kv` is ours: sequences share prefixes and roll back as in other engines."""

    batch_invariant = False

    def __init__(self, max_length: int, info: ModelInfo, core: Any) -> None:
        """Use `open_vllm_engine`."""
        self._core = core
        self._runner = core.model_executor.driver_worker.worker.model_runner
        config = core.vllm_config
        self.max_sequences = int(config.scheduler_config.max_num_seqs)
        """Most sequences of one pass."""
        self.max_tokens = int(config.scheduler_config.max_num_batched_tokens)
        """Most tokens of one pass."""
        self.max_pending = self.max_tokens - CANDIDATES
        """Most committed tokens of one sequence in one pass."""
        dtype = str(config.model_config.dtype).removeprefix("torch.")
        precision = "/".join(filter(None, (config.model_config.quantization, dtype)))
        name = "/".join((info.revision.removeprefix("local-")[:DIGITS], precision, "vllm"))
        self.model = replace(info, dtype=precision, arithmetic=name, forward_path="vllm", max_length=max_length)
        cache = core.scheduler.kv_cache_config
        pool = BlockPool(int(cache.num_blocks) - NULL_BLOCKS, int(cache.kv_cache_groups[0].kv_cache_spec.block_size))
        self.kv = KVCache(pool, max_length, self._copy_rows, self._dropped)
        self._known: dict[KVSequence, _RunnerSequence] = {}
        """Those of the last passes last."""
        self._ended: list[str] = []
        """Names that the runner shall drop with the next pass."""
        self._copies: list[tuple[int, int]] = []
        """Blocks to copy before the next pass."""
        self._numbers = count()
        self._enqueued = 0
        """Passes since the host waited for the device."""

    def warm_up(self) -> None:
        """Compiles the kernels that rank tokens on a GPU."""
        if self._runner.device.type != "cpu":
            fused_ranking.warm_up(self.model.vocabulary_size, self._runner.device)

    def close(self) -> None:
        self._core.shutdown()

    def forward(self, segments: list[Segment], hidden: HiddenRequest | None = None) -> ModelOutput:
        """Raises InvalidArgument for segments that are no chains or want other logits than those of their last tokens,
        and for more of them than a pass holds; FailedPrecondition for hidden states."""
        if hidden is not None:
            raise FailedPrecondition("vLLM gives no hidden states of a draft model; use DRAFTER_ENGINE=embedded.")
        self.kv.check_step(segments)
        for segment in segments:
            self._check(segment)
        if len(segments) > self.max_sequences or sum(each.computed for each in segments) > self.max_tokens:
            raise InvalidArgument(f"a pass holds {self.max_sequences} sequences and {self.max_tokens} tokens")
        tokens = [[*each.pending, *each.nodes][each.held :] for each in segments]
        sequences = [each.sequence for each in segments]
        logits = self._compute(sequences, [each.held for each in segments], tokens)
        for segment in segments:
            segment.sequence.ahead = segment.tokens
        wanted = [row for row, each in enumerate(segments) if each.want_logits]
        return ModelOutput(take_rows(logits, wanted))

    def extend(self, sequences: Sequence[KVSequence], tokens: Tensor) -> Tensor:
        """See `slipstream.engine.engine.ChainEngine`."""
        for each in sequences:
            if each.length + each.ahead >= min(each.capacity, self.kv.max_length):
                raise OutOfRange(f"one more token after {each.length + each.ahead} does not fit the sequence")
        self._runner.feed([self._known[each].name for each in sequences], tokens)
        logits = self._compute(sequences, [each.ahead for each in sequences], [[] for _ in sequences])
        for each in sequences:
            each.ahead += 1
        return logits

    def fetch(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """See `slipstream.engine.engine.ChainEngine`."""
        self._enqueued = 0
        return download(*tensors)

    def _compute(self, sequences: Sequence[KVSequence], held: Sequence[int], tokens: Sequence[list[int]]) -> Tensor:
        """float32 [N, V] in the order of the sequences. `held`: rows behind each one's length that stay; `tokens`: what
        is computed behind them, empty for the one token that the runner was fed."""
        with self._sending(sequences):
            output = self._schedule(sequences, held, tokens)
            names, logits = self._runner.compute(output)
        order = {name: row for row, name in enumerate(names)}
        return take_rows(logits, [order[self._known[each].name] for each in sequences]).float()

    @contextlib.contextmanager
    def _sending(self, sequences: Sequence[KVSequence]) -> Iterator[None]:
        """After an error the sequences are sent anew: what the runner has of them is not known."""
        from slipstream.engine.vllm.chain_runner import PASSES_AHEAD

        if self._enqueued == PASSES_AHEAD - 1 and self._runner.device.type != "cpu":
            torch.accelerator.synchronize()
            self._enqueued = 0
        self._enqueued += 1
        try:
            yield
        except BaseException:
            for each in sequences:
                self._forget(each)
            raise
        self._ended.clear()
        self._copies.clear()

    def _schedule(self, sequences: Sequence[KVSequence], held: Sequence[int], tokens: Sequence[list[int]]) -> Any:
        from slipstream.engine.vllm.chain_runner import PassStart

        self._make_room(sequences)
        new, cached, starts = [], no_cached_requests(), []
        sizes: dict[str, int] = {}
        for sequence, rows, computed in zip(sequences, held, tokens, strict=True):
            start, known = sequence.length + rows, self._known.pop(sequence, None)
            if known is None:
                known = _RunnerSequence(f"d{next(self._numbers)}", list(sequence.blocks))
                new.append(new_request(known.name, [0], sequence.blocks, 0))  # its tokens are those of the PassStart
                kept = len(known.blocks)
            else:
                kept = common_prefix(known.blocks, sequence.blocks)
                add_cached_request(cached, known.name, sequence.blocks[kept:], start, 0)
                known.blocks[kept:] = sequence.blocks[kept:]
            self._known[sequence] = known
            sizes[known.name] = max(1, len(computed))
            starts.append(PassStart(known.name, start, kept, computed))
        output = scheduler_output(new, cached, sizes, self._ended, self._copies)
        output.starts = tuple(starts)
        return output

    def _make_room(self, chosen: Sequence[KVSequence]) -> None:
        """Forgets those that waited longest, so that the runner has a place for each of the pass."""
        of_pass = set(chosen)
        waiting = [sequence for sequence in self._known if sequence not in of_pass]
        for sequence in waiting[: max(0, len(waiting) + len(of_pass) - self.max_sequences)]:
            self._forget(sequence)

    def _forget(self, sequence: KVSequence) -> None:
        """Makes the runner drop what it has of the sequence; its KV stays."""
        if (known := self._known.pop(sequence, None)) is not None:
            self._ended.append(known.name)

    def _dropped(self, sequence: KVSequence) -> None:
        if sequence.closed:
            self._forget(sequence)

    def _copy_rows(self, moves: Moves) -> None:
        self._copies += block_copies(moves, self.kv.block_size)

    def _check(self, segment: Segment) -> None:
        size = self.model.vocabulary_size
        if not segment.is_chain or segment.logit_tokens() not in ([], [segment.computed - 1]):
            raise InvalidArgument("vLLM computes chains, and the logits of their last tokens alone")
        if segment.sequence.length + segment.tokens > self.kv.max_length:
            raise OutOfRange(f"candidates end behind the model's {self.kv.max_length} tokens")
        if not all(0 <= token < size for token in (*segment.pending, *segment.nodes)):
            raise InvalidArgument(f"a token id is outside the vocabulary of {size}")


class DraftOptions(NamedTuple):
    """A draft model on vLLM, as `drafter_svc.config.DrafterConfig` explains it."""

    model: str
    dtype: str = "auto"
    kv_tokens: int = 65_536
    step_tokens: int = 512
    quantisation: str = ""
    vllm_args: str = ""
    threads: int = 1


def open_vllm_engine(given: DraftOptions) -> VLLMEngine:
    """On the calling thread, which owns it from then on.

    Raises InvalidArgument for settings, NotFound for a model that is not there, FailedPrecondition for one that vLLM
    cannot serve here, or a vLLM that is missing.
    """
    words = options.checked_words(DRAFTER, given.vllm_args, given.quantisation)
    options.prepare_vllm(given.threads)
    from slipstream.engine.models.checkpoint import describe_checkpoint

    info = describe_checkpoint(given.model)
    length, sequences = min(info.max_length, given.kv_tokens), min(given.step_tokens, options.MAX_SEQUENCES)
    model = VLLMModel(given.model, given.dtype, length, given.step_tokens + CANDIDATES, sequences)
    try:
        core = _open_core(model, words, given.kv_tokens)
    except SlipstreamError:
        raise
    except Exception as error:
        raise options.refusal(DRAFTER, f"{type(error).__name__}: {error}") from error
    engine = VLLMEngine(length, info, core)
    engine.warm_up()
    return engine


def _open_core(model: VLLMModel, words: Sequence[str], kv_tokens: int) -> Any:
    from vllm.platforms import current_platform
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    if current_platform.is_cpu():
        from slipstream.engine.vllm import cpu_kernels

        cpu_kernels.register()
    args = options.engine_args(DRAFTER, model, words)
    args.distributed_executor_backend = "uni"
    args.worker_cls = "slipstream.engine.vllm.chain_worker.ChainWorker"
    config = options.engine_config(args)
    options.check_layers(DRAFTER, config.model_config)
    if config.model_config.uses_mrope:
        raise options.unsupported(DRAFTER, "positions of several dimensions (M-RoPE)")
    if options.ask_for_kv(config.cache_config, kv_tokens):
        config.additional_config[KV_TOKENS] = kv_tokens
    core = EngineCore(config, UniProcExecutor, log_stats=False)
    groups, layers = core.scheduler.kv_cache_config.kv_cache_groups, core.model_executor.get_kv_cache_specs()[0]
    options.check_cache(DRAFTER, len(groups), layers.values())
    return core
