"""Messages between the verifier and vLLM's workers, beside vLLM's scheduler output and the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.engine.sampler.logits_processor import LogprobArrays
from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.sampling_params import SamplingParams

Indices = npt.NDArray[np.int64]

EXTRA = "slipstream"
"""Key of a session's parameters in the `extra_args` of vLLM's sampling parameters."""


class SpeculatorSettings(NamedTuple):
    """Settings of vLLM's own speculator beside the target."""

    depth: int
    """Most draft tokens of a request after a step."""
    in_one_pass: bool
    """Whether all of them are drafted in one pass (DFlash, DSpark), which writes KV behind the step's tokens."""

    @property
    def rows_ahead(self) -> int:
        """KV rows behind a step's tokens that the speculator writes at most."""
        return self.depth + 1


@dataclass(slots=True)
class WorkerSettings:
    """Settings of a worker from its start on, as vLLM's `additional_config`."""

    failures: str
    """The file in which a worker writes why it cannot start."""
    kv_tokens: int = 0
    """Tokens that have room in the KV cache; 0: as many as vLLM's memory has."""
    speculator: SpeculatorSettings | None = None

    def compute_hash(self) -> str:
        """Returns a constant: no setting here decides what is compiled, and vLLM's cache would miss at each start."""
        return ""


@dataclass(frozen=True, slots=True)
class SessionParameters:
    """Parameters of one session, which a worker keeps from its first step on."""

    sampling: SamplingParams
    prompt_length: int
    """Tokens before the output; penalties distinguish the two."""
    top_logprobs: int | None = None

    def pack(self) -> dict[str, Any]:
        """Plain values, which can be pickled."""
        named = {each.name: getattr(self.sampling, each.name) for each in fields(self.sampling)}
        named |= {name: dict(value) for name, value in named.items() if isinstance(value, Mapping)}
        return {"sampling": named, "prompt_length": self.prompt_length, "top_logprobs": self.top_logprobs}

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> SessionParameters:
        return cls(SamplingParams(**packed["sampling"]), packed["prompt_length"], packed["top_logprobs"])


class StepMasks(NamedTuple):
    """The M rows of a step on which a grammar or a least length allows some tokens alone."""

    names: Sequence[str]
    """The requests that have such rows."""
    requests: Indices
    """[M] index of the row's request in `names`."""
    depths: Indices
    """[M] candidates before the row."""
    bits: npt.NDArray[np.uint8]
    """[M, ceil(V / 8)]; the lowest bit is the lowest token."""


class StepProposals(NamedTuple):
    """The distributions that the candidates of sessions under a ratio rule were drawn from: P pairs of a token and its
    weight. A candidate without any was not drawn."""

    names: Sequence[str]
    requests: Indices
    """[P] index of the request in `names`."""
    depths: Indices
    """[P] candidates before the one that was drawn."""
    token_ids: Indices
    weights: Indices

    @classmethod
    def of(cls, distributions: Mapping[str, Sequence[DraftDistribution | None]]) -> StepProposals:
        """Collects the distributions of each candidate of each request."""
        found = [
            (number, depth, each)
            for number, chain_of_request in enumerate(distributions.values())
            for depth, each in enumerate(chain_of_request)
            if each is not None
        ]
        sizes = [len(each.token_ids) for _, _, each in found]
        return cls(
            list(distributions),
            np.repeat(np.array([number for number, _, _ in found], np.int64), sizes),
            np.repeat(np.array([depth for _, depth, _ in found], np.int64), sizes),
            np.fromiter(chain.from_iterable(each.token_ids for _, _, each in found), np.int64),
            np.fromiter(chain.from_iterable(each.weights for _, _, each in found), np.int64),
        )


class StepLogprobs(NamedTuple):
    """Log-probabilities of the tokens of a step's requests that want them."""

    names: Sequence[str]
    lengths: Indices
    """Tokens of each of these requests."""
    arrays: LogprobArrays
    """One row for each of these tokens."""


class Graphs(NamedTuple):
    """CUDA graphs of passes that read no prompt."""

    path: str
    """`full`: a CUDA graph for chains of any lengths; `padded`: for chains of one length; `piecewise`; or `eager`."""
    notice: str = ""
    """Why passes do not run as full graphs of ragged chains, where the operator did not ask for that."""
    lengths: tuple[int, ...] = ()
    """Lengths, ascending, to which chains are padded, so that all chains of a step have one length."""


class Drafts(NamedTuple):
    """Draft tokens of vLLM's own speculator behind a step's tokens. D for each request."""

    names: Sequence[str]
    token_ids: npt.NDArray[np.int32]
    """[N, D]"""
    log_probs: npt.NDArray[np.float32]
    """[N, D] log-probability of each, given those before it; NaN where the speculator's numbers are broken."""


class SampledStep(NamedTuple):
    """Decisions of a worker in a step."""

    tokens: Mapping[str, list[int]]
    """Tokens of each request: the accepted candidates and the token behind them; none for a prefill that goes on."""
    broken: Sequence[str] = ()
    """Requests whose numbers are broken. Their tokens mean nothing."""
    dishonest: Sequence[str] = ()
    """Requests with a candidate that lay outside its own distribution."""
    logprobs: StepLogprobs | None = None
    drafts: Drafts | None = None
