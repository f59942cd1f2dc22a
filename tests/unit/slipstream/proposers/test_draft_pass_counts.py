"""A draft model's pass costs no more calls and operators than it did: counts that no other work on a machine changes.

A pass of a small model is all overhead, so what it costs grows with these. A bound may rise with a reason.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.engine.kernels.compiled import find_kernels
from slipstream.proposers.base import ROOT, Proposal, Proposer, ProposerContext, ProposerSettings
from slipstream.proposers.model_factory import open_proposer
from slipstream.speculation.sampling_params import SamplingParams
from tests.support.call_counts import ROOT_FOLDER, calls_of

TOKENS = list(range(5, 69))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def proposer() -> Proposer:
    return open_proposer(ProposerSettings(model=str(ROOT_FOLDER / "models" / "draft"), dtype="float32")).proposer


def propose(proposer: Proposer, nodes: int) -> None:
    """A pass over one pending token and a chain, whose last node is expanded."""
    expand = [nodes - 1] if nodes else [ROOT]
    chain = [*range(-1, nodes - 1)]
    context = ProposerContext(
        "one", TOKENS, len(TOKENS), len(TOKENS), 512, SamplingParams(temperature=0.0), TOKENS[:nodes], chain, expand
    )
    (answer,) = proposer.propose([context])
    assert isinstance(answer, Proposal) and len(answer.nodes) == 4


def test_a_pass_makes_few_python_calls(proposer: Proposer) -> None:
    propose(proposer, 0)  # reads the prompt
    small, large = (calls_of(lambda count=count: propose(proposer, count), "slipstream") for count in (1, 25))  # type: ignore[misc]
    assert 50 < small <= (175 if find_kernels() else 215)
    assert (large - small) / 24 <= 1.2, "calls for each node"


def test_a_pass_makes_few_operators(proposer: Proposer) -> None:
    propose(proposer, 0)
    with Operators() as small:
        propose(proposer, 1)
    with Operators() as large:
        propose(proposer, 25)
    # With kernels all layers are one call. Without them rows are filled up for oneDNN.
    assert 20 < small.count <= (30 if find_kernels() else 180)
    assert large.count <= small.count + 4
