"""Whatever a request may ask for, a draft model's candidates are ones that the verifier takes."""

from __future__ import annotations

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
    seed=st.integers(0, 2**64 - 1),
    acceptance=st.sampled_from(["coupled", "rejection"]),
)


@settings(deadline=None, max_examples=500)
@given(SAMPLINGS, st.integers(0, 2**32), st.sampled_from([0.0, 2.0, 4.0, 30.0, 6e4]), st.sampled_from([0.7, 1.5]))
def test_every_candidate_is_one_that_a_frame_may_hold(
    sampling: SamplingParams, seed: int, scale: float, sharpness: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (12,), generator=draw).tolist()
    context = ProposerContext(
        "text", tokens, 12, 4, 400, sampling, expand=[ROOT], noise_nodes=[0], vocabulary_size=VOCABULARY
    )
    rows = (torch.randn(1, VOCABULARY, generator=draw) * scale).log_softmax(-1)
    answers: list[Proposal | SlipstreamError] = [Proposal([], 12)]
    NodeChooser(width=4, proposal_tokens=32, sharpness=sharpness).choose([Place(0, context, 0)], rows, answers)
    [answer] = answers
    assert isinstance(answer, Proposal) and answer.nodes
    ids, log_probs = tuple(each.token for each in answer.nodes), tuple(each.log_prob for each in answer.nodes)
    check(Frame(12, 0, 1, ids, log_probs, parents=(0,) * len(ids)), VOCABULARY, TreeLimits())
