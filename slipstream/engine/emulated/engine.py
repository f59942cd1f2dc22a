"""An engine without a model: time from a cost curve, tokens from a keyed hash.

For load, scale and chaos tests. Nothing measured with it may be reported as a model's speed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from slipstream.engine.emulated.model import ALTERNATIVES, EmulatedModel
from slipstream.engine.engine import HiddenRequest, ModelOutput
from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.engine.kvcache.kv_cache import KVCache
from slipstream.engine.model_info import ModelInfo
from slipstream.engine.segment import Segment
from slipstream.errors import FailedPrecondition, InvalidArgument
from slipstream.speculation.noise import GOLDEN, mix, mix_all

PEAK = 60.0
"""Logit of the chosen token, the others are 0. Gumbel noise of 32 bits spans about 26
(`slipstream.speculation.noise`)."""
LEAST_VOCABULARY = 8
"""The guesses, and something else."""
_STRIDE = np.uint64(GOLDEN)


class EmulatedEngine:
    """The text depends on the seed, a session's first token and the position; never on candidates or batches."""

    batch_invariant = True

    def __init__(
        self,
        model: EmulatedModel,
        cost: Callable[[int, int], float],
        pool: BlockPool,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if model.vocabulary_size < LEAST_VOCABULARY:
            raise InvalidArgument(
                f"vocabulary={model.vocabulary_size}; give an emulated model {LEAST_VOCABULARY} at least."
            )
        self.kv = KVCache(pool, model.max_length)
        self._emulated = model
        self._cost = cost
        self._clock = clock
        self._sleep = sleep
        self._passes = 0
        """Passes that held a session, where some are to raise; those that measure costs hold none."""
        revision, vocabulary = f"emulated-{model.seed}", f"emulated-{model.vocabulary_size}"
        strays = "" if model.acceptance == 1.0 else f"/{model.acceptance:g}-{model.fanout:g}"
        self.model = ModelInfo(
            name=model.name,
            revision=revision,
            vocabulary_size=model.vocabulary_size,
            fingerprint=vocabulary,
            max_length=model.max_length,
            dtype="emulated",
            parameters=0,
            eos_token_ids=model.eos_token_ids,
            arithmetic=f"{revision}/emulated/{vocabulary}{strays}",
            batch_invariant=True,
        )

    def forward(self, segments: list[Segment], hidden: HiddenRequest | None = None) -> ModelOutput:
        if hidden is not None:
            raise FailedPrecondition("an emulated model has no hidden states", reason="HIDDEN_STATES_MISSING")
        start = self._clock()
        self.kv.check_step(segments)
        for segment in segments:
            self._write(segment)
        if self._emulated.fault_every:
            self._count_to_fault(segments)
        chosen = self._next([segment for segment in segments if segment.want_logits])
        logits = torch.zeros(len(chosen), self._emulated.vocabulary_size)
        if len(chosen):
            self._favour(logits, torch.from_numpy(chosen))
        end = start + self._cost(sum(segment.computed for segment in segments), len(segments))
        if (left := end - self._clock()) > 0:
            self._sleep(left)
        return ModelOutput(logits)

    def _next(self, segments: list[Segment]) -> npt.NDArray[np.int64]:
        """The token behind each of the segments' rows."""
        rows = [predicted_positions(segment) for segment in segments]
        salts = [first_token(segment) for segment, places in zip(segments, rows, strict=True) for _ in places]
        return self.tokens(np.array(salts, np.uint64), np.array([*chain.from_iterable(rows)], np.uint64))

    def text(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` tokens after a prompt, without any pass."""
        places = np.arange(len(prompt), len(prompt) + count, dtype=np.uint64)
        text: list[int] = self.tokens(np.full(count, prompt[0], np.uint64), places).tolist()
        return text

    def tokens(self, salts: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """The token at each position (same shape as the inputs) of a text that begins with `salts`."""
        size = np.uint64(self._emulated.vocabulary_size)
        key = mix_all(salts ^ np.uint64(mix(self._emulated.seed)))
        truth = mix_all(key + positions * _STRIDE)
        other = mix_all(truth ^ _STRIDE)
        # 53 bits of the second hash decide at which of the drafter's guesses the truth stands, the rest how far off the
        # first guess is where it is wrong. The further guesses stand right below the first one.
        place = np.searchsorted(np.cumsum(self._shares()), (other >> np.uint64(11)) * 2.0**-53, side="right")
        anywhere = np.uint64(1 + len(ALTERNATIVES)) + other % (size - np.uint64(1 + len(ALTERNATIVES)))
        off = np.where(place <= len(ALTERNATIVES), place.astype(np.uint64), anywhere)
        return ((truth % size + off) % size).astype(np.int64)

    def _shares(self) -> list[float]:
        """Probabilities that the truth is the first candidate, the second, ..."""
        right, fanout = self._emulated.acceptance, self._emulated.fanout
        return [right, *((1.0 - right) * fanout * share for share in ALTERNATIVES)]

    def _favour(self, logits: torch.Tensor, chosen: torch.Tensor) -> None:
        """Writes each row's guesses, the first of which is `chosen`. Without fan-out the first is as good as sure."""
        rows, size = torch.arange(len(chosen)), self._emulated.vocabulary_size
        logits[rows, chosen] = PEAK
        if self._emulated.fanout > 0.0:
            shares = self._shares()
            logits.fill_(math.log(max(1e-9, 1.0 - sum(shares)) / size))
            for place, share in enumerate(shares):
                logits[rows, (chosen - place) % size] = math.log(max(share, 1e-9))

    def _count_to_fault(self, segments: list[Segment]) -> None:
        self._passes += any(segment.sequence.salt is not None for segment in segments)
        if self._passes >= self._emulated.fault_every:
            self._passes = 0
            raise RuntimeError("a pass that was to fail")

    def _write(self, segment: Segment) -> None:
        size = self._emulated.vocabulary_size
        if not all(0 <= token < size for token in (*segment.pending, *segment.nodes)):
            raise InvalidArgument(f"a token id is outside the vocabulary of {size}")
        segment.sequence.ahead = segment.tokens


def first_token(segment: Segment) -> int:
    """The session's first token, which names its text."""
    return (segment.sequence.tokens or segment.pending)[0]


def predicted_positions(segment: Segment) -> list[int]:
    """Per logits row the position of the token it predicts."""
    base, depths = segment.sequence.length + 1, segment.depths()[segment.held :]
    return [base + depths[token] for token in segment.logit_tokens()]
