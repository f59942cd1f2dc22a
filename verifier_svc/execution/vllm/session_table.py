"""The sampling parameters of a worker's sessions, as columns of arrays: a step reads all its rows at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.engine.devices import upload
from slipstream.engine.sampler import fused
from slipstream.engine.sampler.logits_processor import CUTS, add_bias, cuts_of
from slipstream.speculation.sampling_params import SamplingParams
from verifier_svc.execution.vllm.messages import Indices, SessionParameters

NONE = -1
COLUMNS = np.dtype(
    [
        ("temperature", np.float32),
        ("cuts", CUTS),
        ("seed", np.uint64),
        ("greedy", np.bool_),
        ("ratio", np.bool_),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("biased", np.bool_),
        ("adjustment", np.int64),
        ("top_logprobs", np.int64),
    ]
)
"""Neutral temperature and cuts where greedy; `ratio`: the session is under a ratio rule; `adjustment`: its place among
the `Adjustments`, or NONE; `top_logprobs`: NONE where it wants no log-probabilities."""
SLOTS = 64
"""Slots at the start; they are doubled as needed."""


class Adjustments:
    """Tensors that penalties and bias need of the sessions that have any, on the device. S places, V tokens."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.counts = torch.zeros(0, vocabulary, device=device)
        """float32 [S, V] how often each token is in the output."""
        self.prompt = torch.zeros(0, vocabulary, dtype=torch.bool, device=device)
        """[S, V] which tokens are in the prompt."""
        self.bias = torch.zeros(0, vocabulary, device=device)
        """float32 [S, V]"""
        self.touched = torch.zeros(0, -(-vocabulary // 32), dtype=torch.int32, device=device)
        """[S, ceil(V / 32)] bits, the lowest for the lowest token: those that any of the three concerns."""
        self.allowed = torch.zeros(0, -(-vocabulary // 8), dtype=torch.uint8, device=device)
        """[S, ceil(V / 8)] likewise: those that `bias` does not forbid."""
        self._free: list[int] = []

    def fused(self) -> fused.Adjusted:
        return fused.Adjusted(*self._arrays())

    def add(self, sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> int:
        """Returns the session's place."""
        if not self._free:
            size = len(self.counts)
            grown = (torch.cat([each, each.new_zeros(max(4, size), each.shape[1])]) for each in self._arrays())
            self.counts, self.prompt, self.bias, self.touched, self.allowed = grown
            self._free = list(range(size, len(self.counts)))[::-1]
        place = self._free[-1]
        for array in self._arrays():
            array[place] = 0
        counts = np.bincount(np.array(output, np.int64), minlength=self.counts.shape[1]).astype(np.float32)
        device = self.counts.device
        self.counts[place] = upload(torch.from_numpy(counts), device)
        self.prompt[place, upload(torch.tensor(prompt, dtype=torch.int64), device)] = True
        if sampling.biased:
            add_bias(self.bias[place], sampling)
        concerned = _bits([*prompt, *output, *sampling.logit_bias], 32 * self.touched.shape[1])
        self.touched[place] = upload(torch.from_numpy(concerned.view(np.int32)), device)
        allowed = _bits(sampling.allowed_token_ids or slice(None), 8 * self.allowed.shape[1])
        self.allowed[place] = upload(torch.from_numpy(allowed), device)
        return self._free.pop()

    def remove(self, place: int) -> None:
        self._free.append(place)

    def count(self, places: Tensor, tokens: Tensor) -> None:
        """Adds decided tokens int32 [K, width] to the counts at these places [K]; tokens below 0 are none."""
        if fused.fuses(self.counts):
            fused.count(self.fused(), places, tokens)
            return
        at = places[:, None].expand_as(tokens), tokens.clamp(min=0).long()
        self.counts.index_put_(at, (tokens >= 0).float(), accumulate=True)

    def _arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.counts, self.prompt, self.bias, self.touched, self.allowed


def _bits(token_ids: Sequence[int] | slice, size: int) -> npt.NDArray[np.uint8]:
    """uint8 [size / 8] with these tokens' bits."""
    chosen = np.zeros(size, np.bool_)
    chosen[np.array(token_ids, np.int64) if isinstance(token_ids, Sequence) else token_ids] = True
    return np.packbits(chosen, bitorder="little")


class SessionTable:
    """Sessions by name; a name has one slot until it is removed."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.adjustments = Adjustments(vocabulary, device)
        self._columns = np.zeros(SLOTS, COLUMNS)
        self._slots: dict[str, int] = {}
        self._free = list(range(SLOTS))[::-1]

    def add(self, name: str, parameters: SessionParameters, tokens: Sequence[int]) -> None:
        """`tokens` are all committed ones."""
        sampling, length = parameters.sampling, parameters.prompt_length
        if not self._free:
            size = len(self._columns)
            self._columns = np.concatenate([self._columns, np.zeros(size, COLUMNS)])
            self._free = list(range(size, 2 * size))[::-1]
        # Before the name has a slot: it raises where memory is missing, and the slot names the place of whoever had it.
        place = self.adjustments.add(sampling, tokens[:length], tokens[length:]) if sampling.adjusted else NONE
        slot = self._slots[name] = self._free.pop()
        self._columns[slot] = (
            1.0 if sampling.greedy else sampling.temperature,
            cuts_of(sampling),
            sampling.seed,
            sampling.greedy,
            sampling.drawn,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.biased,
            place,
            NONE if parameters.top_logprobs is None else parameters.top_logprobs,
        )

    def remove(self, name: str) -> None:
        """Removing an unknown name is harmless."""
        if (slot := self._slots.pop(name, None)) is not None:
            self._free.append(slot)
            if (place := self._columns[slot]["adjustment"]) != NONE:
                self.adjustments.remove(int(place))

    def sessions(self, names: Iterable[str], size: int) -> npt.NDArray[np.void]:
        """The columns [N] of these sessions."""
        slots: Indices = np.fromiter(map(self._slots.__getitem__, names), np.int64, size)
        return self._columns[slots]
