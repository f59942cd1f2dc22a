"""Log-probabilities: torch's own log-softmax of the raw row, and the likeliest tokens in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.sampler.logits_processor import logprobs
from slipstream.rpc import proto_conversion
from slipstream.speculation.sampling_params import TokenLogprobs

VOCABULARY = 12
CELLS = st.sampled_from([0.0, 0.5, 1.0, 3.0, -2.0, float("-inf")])


@settings(deadline=None, max_examples=80)
@given(
    st.lists(
        st.tuples(
            st.lists(CELLS, min_size=VOCABULARY, max_size=VOCABULARY).filter(lambda row: max(row) > float("-inf")),
            st.integers(0, VOCABULARY - 1),
            st.integers(0, VOCABULARY + 2),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_log_probabilities_are_the_log_softmax_of_the_raw_row(cases: list[tuple[list[float], int, int]]) -> None:
    """The cells tie often, as those of a model in bf16 do: of equal tokens the lowest ids are named."""
    rows, tokens, tops = zip(*cases, strict=True)
    told = logprobs(torch.tensor(rows), torch.tensor(tokens), np.array(tops)).tokens()
    for row, token, top, one in zip(rows, tokens, tops, told, strict=True):
        expected = torch.tensor(row).double().log_softmax(-1).tolist()
        assert one.logprob == pytest.approx(expected[token], abs=1e-5)
        best = sorted(range(VOCABULARY), key=lambda other: (-row[other], other))[:top]
        assert [other for other, _ in one.top] == best
        assert [share for _, share in one.top] == pytest.approx([expected[other] for other in best], abs=1e-5)


def test_rows_are_read_in_float32() -> None:
    row = torch.randn(1, 4096, generator=torch.Generator().manual_seed(1)).bfloat16()
    (told,) = logprobs(row, torch.tensor([7]), np.array([2])).tokens()
    assert told.logprob == pytest.approx(float(row.double().log_softmax(-1)[0, 7]), abs=1e-5)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_row_s_numbers_are_the_same_alone_and_beside_others() -> None:
    """torch's own sum of one long row is cut for two threads, and some of these rows got other bits alone."""
    logits = torch.randn(64, 49_152, generator=torch.Generator().manual_seed(0)) * 4.0 + 3.0
    tokens, tops = torch.arange(64), np.full(64, 2)
    together = logprobs(logits, tokens, tops).tokens()
    alone = [logprobs(logits[at : at + 1], tokens[at : at + 1], tops[at : at + 1]).tokens()[0] for at in range(64)]
    assert together == alone


def test_log_probabilities_survive_the_wire() -> None:
    message = proto_conversion.logprobs_to_proto(TokenLogprobs(-0.5, ((3, -0.5), (1, -1.25))))
    assert (message.logprob, list(message.top_token_ids), list(message.top_logprobs)) == (-0.5, [3, 1], [-0.5, -1.25])
