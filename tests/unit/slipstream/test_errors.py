"""Each error has one gRPC status and one HTTP status."""

from __future__ import annotations

import pytest

from slipstream.errors import (
    KV_TOO_SMALL,
    MAX_ERROR_BYTES,
    RETRY_S,
    Internal,
    NotFound,
    ResourceExhausted,
    SlipstreamError,
    Unavailable,
    code_number,
    from_code,
    message_to_send,
    retry_delay_s,
    typed_error,
)

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


def test_an_unexpected_exception_becomes_an_internal_error_that_quotes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = NotFound("no such session.")
    assert typed_error(known) is known and not caplog.records
    unexpected = typed_error(ValueError("secret"))
    assert type(unexpected) is Internal and "secret" not in unexpected.message
    assert "secret" in caplog.text


def test_only_errors_that_pass_with_time_carry_a_retry_delay() -> None:
    assert retry_delay_s(Unavailable("away.")) == RETRY_S
    assert retry_delay_s(ResourceExhausted("full.", retry_s=0.0)) == 0.0
    assert retry_delay_s(ResourceExhausted("too large.", reason=KV_TOO_SMALL)) is None
    assert retry_delay_s(NotFound("no such session.", retry_s=3.0)) is None


def test_a_message_is_cut_at_a_whole_character() -> None:
    assert message_to_send(NotFound("x" + "é" * MAX_ERROR_BYTES)) == "x" + "é" * ((MAX_ERROR_BYTES - 1) // 2)
    assert message_to_send(NotFound("\ud800")) == "?"
