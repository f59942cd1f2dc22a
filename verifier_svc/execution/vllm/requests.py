"""KV blocks and the requests that vLLM's workers know: our bookkeeping above, vLLM's scheduler outputs below.

A worker keeps a request's tokens and blocks from its first step on, appends what it decides and is sent only what it
cannot know. What it has of a sequence is dropped, and sent anew under another name, whenever it may differ from the
verifier's: after a step that failed, and after a rollback; and where more are known than a worker has places for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.engine.kvcache.kv_cache import KVCache, Moves
from slipstream.engine.segment import KVSequence, Segment
from slipstream.engine.vllm.scheduling import (
    add_cached_request,
    block_copies,
    new_request,
    no_cached_requests,
    scheduler_output,
)
from slipstream.errors import ResourceExhausted
from slipstream.speculation.draft_distribution import DraftDistribution
from verifier_svc.execution.vllm.messages import (
    EXTRA,
    Graphs,
    SampledStep,
    SessionParameters,
    SpeculatorSettings,
    StepProposals,
)

NO_TOKEN = -1
"""A candidate that no choice equals."""


class RequestStep(NamedTuple):
    """One sequence's part of a step."""

    segment: Segment
    tokens: list[int]
    """All committed tokens, those that this step does not reach included."""
    parameters: Callable[[], SessionParameters]
    proposals: tuple[DraftDistribution | None, ...] = ()


class Rewound(NamedTuple):
    """A request of which the verifier has kept less than the workers decided."""

    name: str
    computed: int
    """Leading tokens with KV."""
    tokens: int
    last: int
    """The last of the tokens."""


@dataclass(slots=True)
class KnownRequest:
    """State of one sequence in the workers."""

    name: str
    prompt_length: int
    """Tokens when they got it; for vLLM these are the prompt."""
    blocks: int
    tokens: int
    computed: int
    """Leading tokens with KV."""


class WorkerRequests:
    """The KV blocks of vLLM's workers, and the requests there. Chains alone: `KVCache.keep` never moves rows."""

    def __init__(
        self,
        pool: BlockPool,
        max_length: int,
        places: int,
        step_tokens: int,
        graphs: Graphs,
        speculator: SpeculatorSettings | None = None,
    ) -> None:
        """`places`: requests that a worker can know; `step_tokens`: most tokens of a step."""
        self.kv = KVCache(pool, max_length, self._copy_rows, self.forget)
        self._places = places
        self._step_tokens = step_tokens
        self._lengths = graphs.lengths
        self._speculator = speculator
        self._known: dict[KVSequence, KnownRequest] = {}
        """Those of the last steps last."""
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
        self._copies += block_copies(moves, self.kv.block_size)

    def name_of(self, sequence: KVSequence) -> str:
        """The name of a sequence that is part of the last scheduler output."""
        return self._known[sequence].name

    def schedule(self, step: Sequence[RequestStep], *, drafting: bool = True) -> Any:
        """vLLM's scheduler output of the step. `drafting`: its speculator shall draft behind the step, if there is one.
        Raises what `Engine.forward` raises for malformed segments."""
        self.kv.check_step([each.segment for each in step])
        self._make_room(step)
        length = self._padded_length([each.segment for each in step])
        depth = self._draft_depth([each.segment for each in step], length, drafting=drafting)
        new: list[Any] = []
        rewound: list[Rewound] = []
        cached = no_cached_requests()
        sizes: dict[str, int] = {}
        candidates: dict[str, list[int]] = {}
        proposals: dict[str, tuple[DraftDistribution | None, ...]] = {}
        for each in step:
            name = self._add_request(each, new, cached, rewound)
            nodes = each.segment.nodes + [NO_TOKEN] * max(0, length - len(each.segment.nodes))
            sizes[name] = len(each.segment.pending) + len(nodes)
            if nodes:
                candidates[name] = nodes
            if each.proposals:
                proposals[name] = each.proposals
        output = scheduler_output(new, cached, sizes, self._ended, self._copies, candidates)
        output.proposals = StepProposals.of(proposals) if proposals else None
        output.rewound = rewound
        output.draft_depth = depth
        self._number += 1
        output.number, output.succeeded = self._number, self._succeeded
        return output

    def step_succeeded(self, step: Sequence[RequestStep], sampled: SampledStep) -> None:
        """The workers have all that the last output held, and what they decided."""
        self._succeeded = self._number
        self._ended.clear()
        self._copies.clear()
        for each in step:
            known = self._known[each.segment.sequence]
            decided = len(sampled.tokens[known.name])
            known.tokens += decided
            known.computed += len(each.segment.pending) + max(0, decided - 1)
            each.segment.sequence.ahead = each.segment.tokens

    def step_failed(self, step: Sequence[RequestStep]) -> None:
        """The workers' state of the step is unknown; their KV below it is unchanged."""
        for each in step:
            self.forget(each.segment.sequence)

    def _make_room(self, step: Sequence[RequestStep]) -> None:
        """Forgets those that waited longest, so that there is a place for each of the step."""
        chosen = {each.segment.sequence for each in step}
        waiting = [sequence for sequence in self._known if sequence not in chosen]
        for sequence in waiting[: max(0, len(waiting) + len(chosen) - self._places)]:
            self.forget(sequence)

    def _padded_length(self, step: list[Segment]) -> int:
        """The length to which the step's chains are padded, once there is KV for that; 0 where they stay as they
        are."""
        longest = max(len(segment.nodes) for segment in step)
        length = next((each for each in self._lengths if each >= longest), 0)
        if not length:
            return 0
        ends = [segment.sequence.length + 1 + length for segment in step]
        reads_prompts = any(len(segment.pending) > 1 for segment in step)
        if reads_prompts or max(ends) > self.kv.max_length or len(step) * (1 + length) > self._step_tokens:
            return 0
        try:
            for segment in step:
                self.kv.grow(segment.sequence, 1 + length)
        except ResourceExhausted:
            return 0
        return length

    def _draft_depth(self, step: list[Segment], padded: int, *, drafting: bool) -> int:
        """Draft tokens behind the step, once there is KV for what the speculator writes behind its tokens: without a
        block of its own it would write over rows of its own layers that are another sequence's."""
        speculator = self._speculator
        if speculator is None:
            return 0
        if not drafting and not speculator.in_one_pass:
            return 0  # which still reads the step's tokens
        rows = [len(each.pending) + max(padded, len(each.nodes)) + speculator.rows_ahead for each in step]
        fits = max(map(lambda each, more: each.sequence.length + more, step, rows)) <= self.kv.max_length
        if fits and (not speculator.in_one_pass or len(step) * speculator.rows_ahead <= self._step_tokens):
            try:
                for segment, more in zip(step, rows, strict=True):
                    self.kv.grow(segment.sequence, more)
                return speculator.depth
            except ResourceExhausted:
                pass
        return 0 if speculator.in_one_pass else min(1, speculator.depth)

    def _add_request(self, each: RequestStep, new: list[Any], cached: Any, rewound: list[Rewound]) -> str:
        sequence, size = each.segment.sequence, len(each.tokens)
        known = self._known.get(sequence)
        if known is not None and (known.tokens, known.computed) != (size, sequence.length):
            if known.prompt_length <= sequence.length == size - 1 < known.tokens:
                rewound.append(Rewound(known.name, sequence.length, size, each.tokens[-1]))
                known.tokens, known.computed = size, sequence.length
            else:
                self.forget(sequence)
                known = None
        if known is None:
            known = KnownRequest(f"r{next(self._numbers)}", size, 0, size, sequence.length)
            extra = {EXTRA: each.parameters().pack()}
            new.append(new_request(known.name, each.tokens, sequence.blocks, sequence.length, extra))
        else:
            del self._known[sequence]
            added = sequence.blocks[known.blocks :]
            add_cached_request(cached, known.name, added, sequence.length, size - known.prompt_length)
        self._known[sequence] = known
        known.blocks = len(sequence.blocks)
        return known.name
