"""The sampling parameters of a worker's sessions, as columns of one array: a step reads all its rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.engine.sampler.logits_processor import log_min_p
from slipstream.engine.sampler.token_history import TokenHistory
from slipstream.speculation.sampling_params import SamplingParams
from verifier_svc.execution.vllm.messages import SessionParameters

COLUMNS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("floor", np.float32),
        ("seed", np.uint64),
        ("greedy", np.bool_),
        ("adjusted", np.bool_),
    ]
)
"""Neutral temperature and cuts where greedy; `adjusted`: the session has penalties or a bias."""
SLOTS = 64
"""Slots at the start; they are doubled as needed."""


@dataclass(slots=True)
class Adjustment:
    """Penalties and bias of one session. float32 and bool [V] on the device; sessions are stacked."""

    repetition: float
    presence: float
    frequency: float
    counts: Tensor
    """How often each token is in the output."""
    prompt: Tensor
    """Which tokens are in the prompt."""
    bias: Tensor

    @classmethod
    def of(
        cls, parameters: SessionParameters, tokens: Sequence[int], vocabulary: int, device: torch.device
    ) -> Adjustment:
        sampling, length = parameters.sampling, parameters.prompt_length
        prompt, bias = np.zeros(vocabulary, np.bool_), np.zeros(vocabulary, np.float32)
        prompt[np.array(tokens[:length])] = True
        bias[np.array(list(sampling.logit_bias), np.int64)] = list(sampling.logit_bias.values())
        counts = np.bincount(np.array(tokens[length:], np.int64), minlength=vocabulary).astype(np.float32)
        on_device = (torch.from_numpy(array).to(device) for array in (counts, prompt, bias))
        penalties = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
        return cls(*penalties, *on_device)


@dataclass(slots=True)
class RatioSession:
    """A session under a ratio rule, whose candidates are judged one after the other."""

    sampling: SamplingParams
    history: TokenHistory | None


class SessionTable:
    """Sessions by name; a name has one slot until it is removed."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.adjustments: dict[str, Adjustment] = {}
        """By session, for those with penalties or a bias."""
        self.ratio: dict[str, RatioSession] = {}
        self.top_logprobs: dict[str, int] = {}
        """By session, for those that want log-probabilities."""
        self._vocabulary = vocabulary
        self._device = device
        self._columns = np.zeros(SLOTS, COLUMNS)
        self._slots: dict[str, int] = {}
        self._free = list(range(SLOTS))[::-1]

    def add(self, name: str, parameters: SessionParameters, tokens: Sequence[int]) -> None:
        """`tokens` are all committed ones."""
        sampling = parameters.sampling
        if not self._free:
            size = len(self._columns)
            self._columns = np.concatenate([self._columns, np.zeros(size, COLUMNS)])
            self._free = list(range(size, 2 * size))[::-1]
        slot = self._slots[name] = self._free.pop()
        adjusted = sampling.coupled and (sampling.penalised or bool(sampling.logit_bias))
        cuts = (0, 1.0, -np.inf) if sampling.greedy else (sampling.top_k, sampling.top_p, log_min_p(sampling))
        temperature = 1.0 if sampling.greedy else sampling.temperature
        self._columns[slot] = (temperature, *cuts, sampling.seed, sampling.greedy, adjusted)
        if adjusted:
            self.adjustments[name] = Adjustment.of(parameters, tokens, self._vocabulary, self._device)
        if not sampling.coupled:
            self.ratio[name] = RatioSession(sampling, _history(parameters, tokens))
        if parameters.top_logprobs is not None:
            self.top_logprobs[name] = parameters.top_logprobs

    def remove(self, name: str) -> None:
        """Removing an unknown name is harmless."""
        if (slot := self._slots.pop(name, None)) is not None:
            self._free.append(slot)
            self.adjustments.pop(name, None)
            self.ratio.pop(name, None)
            self.top_logprobs.pop(name, None)

    def rows(self, names: Sequence[str], owners: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
        """The columns [R] of each row's session; `owners` [R] are indices of `names`."""
        slots = np.fromiter(map(self._slots.__getitem__, names), np.int64, len(names))
        return self._columns[slots[owners]]


def _history(parameters: SessionParameters, tokens: Sequence[int]) -> TokenHistory | None:
    if not parameters.sampling.penalised:
        return None
    history = TokenHistory(tokens[: parameters.prompt_length])
    history.append(tokens[parameters.prompt_length :])
    return history
