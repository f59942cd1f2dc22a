"""Each error has one gRPC status and one HTTP status."""

from __future__ import annotations

import pytest

from slipstream.errors import SlipstreamError, code_number, from_code

KINDS = SlipstreamError.__subclasses__()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_keeps_its_type_across_a_connection(kind: type[SlipstreamError]) -> None:
    error = kind("a sentence.", reason="WORD")
    back = from_code(code_number(error), error.message, error.reason)
    assert type(back) is kind and (back.message, back.reason) == ("a sentence.", "WORD")


def test_no_two_kinds_share_a_grpc_status_and_http_blames_the_same_side() -> None:
    assert len({kind.code for kind in KINDS}) == len(KINDS)
    server_side = {kind.__name__ for kind in KINDS if kind.http_status >= 500}
    assert server_side == {"Unavailable", "DeadlineExceeded", "Internal"}
    assert all(400 <= kind.http_status < 600 for kind in KINDS)
