"""Which arithmetic wrote which tokens: a model of a session's life beside the functions that its record is made by."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.sessions.arithmetic_spans import (
    MOST_SPANS,
    Spans,
    WrittenSpan,
    chosen,
    cut,
    opened,
    same_request,
    spans_of,
    wanted,
    with_spans,
    written,
)
from slipstream.v1 import gateway_pb2

names = st.sampled_from(("a", "b", "c"))
events = st.lists(
    st.one_of(
        st.tuples(st.just("open"), names),
        st.tuples(st.just("write"), st.integers(1, 4)),
        st.tuples(st.just("cut"), st.tuples(st.integers(0, 8), st.integers(0, 2))),
    ),
    max_size=14,
)


class Text:
    """A text with the author of each token, which the spans must agree with."""

    def __init__(self) -> None:
        self.spans: Spans = chosen("a")
        self.authors: list[str] = []
        """"client" for tokens of an edit."""
        self.now = ""

    def open(self, name: str) -> None:
        self.spans = opened(self.spans, len(self.authors), name)
        self.now = name

    def write(self, count: int) -> None:
        if self.now:
            self.authors += [self.now] * count

    def cut(self, change: tuple[int, int]) -> None:
        keep, edit = min(change[0], len(self.authors)), change[1]
        self.spans = cut(self.spans, keep, edit)
        self.authors, self.now = [*self.authors[:keep], *["client"] * edit], ""


@given(events)
def test_the_spans_name_the_arithmetic_of_every_token_and_the_one_that_goes_on(life: list[tuple[str, object]]) -> None:
    text = Text()
    for kind, argument in life:
        getattr(text, kind)(argument)
        spans = written(text.spans, len(text.authors))
        for place, author in enumerate(text.authors):
            inside = [each.arithmetic for each in spans if each.offset <= place]
            assert author == "client" or inside[-1] == author
        own = [author for author in text.authors if author != "client"]
        assert wanted(spans) == (own[-1] if own else "")
        assert len({*own}) <= len(spans) or len(spans) == MOST_SPANS - 1
        assert [each.offset for each in spans] == sorted({each.offset for each in spans})


@given(st.lists(names, max_size=60))
def test_a_record_holds_a_bounded_number_of_spans_and_the_first_and_last_of_them(moves: list[str]) -> None:
    text = Text()
    for name in moves:
        text.open(name)
        text.write(1)
        assert len(text.spans) <= MOST_SPANS
        assert (text.spans[0].arithmetic, wanted(text.spans)) == (moves[0], name)


def test_a_session_that_was_chosen_a_verifier_and_has_no_token_goes_anywhere() -> None:
    assert wanted(written(chosen("a"), 0)) == ""
    assert opened(chosen("a"), 0, "b") == (WrittenSpan("b", 0),)
    assert opened(chosen("a"), 0, "a") == chosen("a")  # nothing to write


def test_a_move_without_a_token_leaves_no_span() -> None:
    moved = opened(chosen("a"), 5, "b")
    assert moved == (WrittenSpan("a", 0), WrittenSpan("b", 5))
    assert wanted(written(moved, 5)) == "a" and opened(moved, 5, "a") == chosen("a")
    assert wanted(written(moved, 6)) == "b"


def test_a_rollback_behind_a_change_returns_to_the_first_author() -> None:
    mixed = opened(chosen("a"), 5, "b")
    assert wanted(cut(mixed, 5, 0)) == "a" and wanted(cut(mixed, 6, 3)) == "b"
    assert cut(mixed, 0, 2) == (WrittenSpan("", 2),)  # the client's tokens alone: anyone may go on


def test_records_of_older_gateways_have_no_spans_and_get_none() -> None:
    assert opened((), 7, "a") == cut((), 3, 1) == written((), 9) == () and wanted(()) == ""


def test_a_record_is_the_same_request_whatever_computes_it() -> None:
    params = gateway_pb2.GenerateRequest(model="m", max_tokens=4).SerializeToString(deterministic=True)
    first, second = with_spans(params, chosen("a")), with_spans(params, opened(chosen("a"), 2, "b"))
    assert first != second and same_request(first, second) and same_request(params, first)
    assert spans_of(second) == (WrittenSpan("a", 0), WrittenSpan("b", 2)) and with_spans(second, ()) == params
    other = gateway_pb2.GenerateRequest(model="m", max_tokens=5).SerializeToString(deterministic=True)
    assert not same_request(first, with_spans(other, chosen("a")))
