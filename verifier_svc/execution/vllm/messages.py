"""What travels between the verifier and vLLM's workers, beside vLLM's scheduler output and the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.sampling_params import SamplingParams, TokenLogprobs

EXTRA = "slipstream"
"""Key of a session's parameters in the `extra_args` of vLLM's sampling parameters."""


@dataclass(frozen=True, slots=True)
class SessionParameters:
    """What a worker knows of one session from its first step on."""

    sampling: SamplingParams
    prompt_length: int
    """Tokens before the output; penalties tell the two apart."""
    top_logprobs: int | None = None

    def pack(self) -> dict[str, Any]:
        """Plain values, which can be pickled."""
        named = {each.name: getattr(self.sampling, each.name) for each in fields(self.sampling)}
        named["logit_bias"] = dict(self.sampling.logit_bias)
        return {"sampling": named, "prompt_length": self.prompt_length, "top_logprobs": self.top_logprobs}

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> SessionParameters:
        return cls(SamplingParams(**packed["sampling"]), packed["prompt_length"], packed["top_logprobs"])


class ChainMasks(NamedTuple):
    """Tokens that a grammar allows along one session's chain of candidates."""

    depths: npt.NDArray[np.int64]
    """[M] candidates before each masked row."""
    bits: npt.NDArray[np.uint8]
    """[M, ceil(V / 8)]; the lowest bit is the lowest token."""


Masks = dict[str, ChainMasks]
"""By the request's name; a request without a grammar has no entry."""
Proposals = dict[str, tuple[DraftDistribution | None, ...]]
"""The distribution that each candidate was drawn from, by the request's name; for sessions under a ratio rule."""


@dataclass(slots=True)
class SampledStep:
    """What a worker decided in a step, beside the tokens."""

    broken: list[str] = field(default_factory=list)
    """Requests whose numbers are broken. The tokens that vLLM has for them mean nothing."""
    dishonest: list[str] = field(default_factory=list)
    """Requests with a candidate that lay outside its own distribution."""
    logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """By request, one for each of its tokens."""
