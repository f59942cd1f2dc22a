"""What the passes of some continuations would take alone, over what they lasted."""

from __future__ import annotations

import pytest

from benchmarks.limit_pair import SIZES, PassSeen, share_of_limit


def test_a_prompts_pass_and_what_stands_before_it_do_not_count() -> None:
    alone = [0.001 * tokens for tokens in SIZES]
    passes = [
        PassSeen(64, True, 5.0),
        PassSeen(1, False, 5.002),
        PassSeen(4, False, 5.010),
        PassSeen(64, True, 9.0),
        PassSeen(SIZES[-1] + 7, False, 9.010),  # as the longest one that was timed
    ]
    share, lasted = share_of_limit(passes, alone)
    assert lasted == pytest.approx(0.020)
    assert share == pytest.approx((0.001 + 0.004 + alone[-1]) / 0.020)
