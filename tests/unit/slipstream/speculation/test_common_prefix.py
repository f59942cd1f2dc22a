from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream.speculation.common_prefix import common_prefix

TOKENS = st.lists(st.integers(0, 1), max_size=8)


@given(TOKENS, TOKENS, TOKENS)
def test_two_texts_share_what_they_begin_with_alike(same: list[int], one: list[int], other: list[int]) -> None:
    some, others = same + one, same + other
    length = common_prefix(some, others)
    assert some[:length] == others[:length]
    assert length in (len(some), len(others)) or some[length] != others[length]
