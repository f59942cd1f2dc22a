"""Whatever a request may ask for, a draft model's candidates are ones that the verifier takes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import SlipstreamError
from slipstream.proposers.base import ROOT, Proposal, ProposerContext
from slipstream.proposers.node_choice import NodeChooser, Place
from slipstream.speculation.frame import Frame, TreeLimits, check
from slipstream.speculation.sampling_params import LEAST_REPETITION_PENALTY, LEAST_TEMPERATURE, SamplingParams

VOCABULARY = 300
SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, LEAST_TEMPERATURE, LEAST_TEMPERATURE, 0.7, 100.0]),
    top_k=st.sampled_from([0, 0, 40, 100_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, LEAST_REPETITION_PENALTY, 1.3, 100.0]),
    presence_penalty=st.sampled_from([0.0, -2.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -2.0, 2.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-100.0, 1e-3, 100.0]), max_size=4),
    allowed_token_ids=st.sampled_from([(), (5,), (7, 200), tuple(range(0, VOCABULARY, 2))]),
    seed=st.integers(0, 2**64 - 1),
    acceptance=st.sampled_from(["coupled", "rejection"]),
)


@settings(deadline=None, max_examples=500)
@given(
    SAMPLINGS,
    st.integers(0, 2**32),
    st.sampled_from([0.0, 2.0, 4.0, 30.0, 6e4]),
    st.sampled_from([0.7, 1.5]),
    st.sampled_from([0.0, 0.0, 0.5, 0.99]),
)
def test_every_candidate_is_one_that_a_frame_may_hold(
    sampling: SamplingParams, seed: int, scale: float, sharpness: float, missing: float
) -> None:
    """`missing`: share of the target's tokens that the draft model never proposes. Where the request allows no other,
    there is nothing to propose, and nothing is broken."""
    draw = torch.Generator().manual_seed(seed)
    row = (torch.randn(VOCABULARY, generator=draw) * scale).log_softmax(-1)
    row[torch.rand(VOCABULARY, generator=draw) < missing] = -math.inf
    row[0] = -1.0
    answer = chosen(sampling, row, sharpness)
    assert isinstance(answer, Proposal)
    possible = set(row.isfinite().nonzero().flatten().tolist())
    assert answer.nodes or not possible & set(sampling.allowed_token_ids or possible)
    ids, log_probs = tuple(each.token for each in answer.nodes), tuple(each.log_prob for each in answer.nodes)
    check(Frame(12, 0, 1, ids, log_probs, parents=(0,) * len(ids)), VOCABULARY, TreeLimits())
    assert possible.issuperset(ids)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_broken_numbers_are_an_error_whatever_the_request_allows(poison: float, acceptance: str) -> None:
    row = torch.full((VOCABULARY,), -1.0)
    row[9] = poison
    row = row.log_softmax(-1)
    for allowed in ((), (9, 5)):
        answer = chosen(SamplingParams(acceptance=acceptance, allowed_token_ids=allowed), row)
        assert isinstance(answer, SlipstreamError) and answer.reason == "BROKEN_NUMBERS"


def chosen(sampling: SamplingParams, row: torch.Tensor, sharpness: float = 1.0) -> Proposal | SlipstreamError:
    """What is proposed below one place."""
    tokens = [(7 * place) % VOCABULARY for place in range(12)]
    context = ProposerContext(
        "text", tokens, 12, 4, 400, sampling, expand=[ROOT], noise_nodes=[0], vocabulary_size=VOCABULARY
    )
    answers: list[Proposal | SlipstreamError] = [Proposal([], 12)]
    NodeChooser(width=4, proposal_tokens=32, sharpness=sharpness).choose([Place(0, context, 0)], row[None], answers)
    return answers[0]
