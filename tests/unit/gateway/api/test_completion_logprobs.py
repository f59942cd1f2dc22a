"""Log-probabilities of `/v1/completions`: a token's offset is into the text, whatever characters tokens divide."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.api.openai.completion_logprobs import completion_logprobs
from slipstream.v1 import gateway_pb2

TEXTS = st.text(alphabet="ab é日🚀", min_size=1, max_size=8)
CUTS = st.lists(st.integers(0, 30), max_size=6)


def logprob(token: bytes, *likeliest: tuple[bytes, float]) -> gateway_pb2.Logprob:
    def of(token: bytes) -> gateway_pb2.TokenText:
        return gateway_pb2.TokenText(text=token.decode(errors="replace"), bytes=token)

    top = [gateway_pb2.TopLogprob(token=of(other), logprob=each) for other, each in likeliest]
    return gateway_pb2.Logprob(token=of(token), logprob=-3.0, top=top)


@given(TEXTS, CUTS, st.integers(0, 7))
async def test_offsets_are_into_the_text_also_where_a_stream_is_cut_within_a_character(
    text: str, cuts: list[int], first: int
) -> None:
    whole = text.encode()
    edges = sorted({0, len(whole), *(min(cut, len(whole)) for cut in cuts)})
    tokens = [whole[start:end] for start, end in pairwise(edges)]
    before = [whole[:start].decode(errors="ignore") for start, _ in pairwise(edges)]
    wanted = [len(each) for each in before]
    for parts in ([tokens], [tokens[:first], tokens[first:]]):
        found: list[int] = []
        for part in parts:
            at = len(b"".join(tokens[: len(found)]).decode(errors="ignore"))
            found += (await completion_logprobs([logprob(token) for token in part], at, text[at:]))["text_offset"]
        assert found == wanted


async def test_bytes_that_are_no_utf8_count_as_their_replacement_characters() -> None:
    tokens = [b"ab", b"\x97", b"\xa5'", b"\xe4\xb8", b"!", b"c"]
    text = b"".join(tokens).decode(errors="replace")
    found = (await completion_logprobs([logprob(token) for token in tokens], 0, text))["text_offset"]
    assert found == [0, 2, 3, 5, 5, 7] and text == "ab\ufffd\ufffd'\ufffd!c"


async def test_a_token_without_text_moves_no_offset() -> None:
    end = gateway_pb2.Logprob(token=gateway_pb2.TokenText(text="<|end|>"), logprob=-1.0)
    assert (await completion_logprobs([logprob(b"ab"), end, logprob(b"c")], 5, "abc"))["text_offset"] == [5, 7, 7]


async def test_the_token_itself_is_among_the_likeliest_and_parts_of_characters_have_names_of_their_own() -> None:
    each = logprob(b"x", (b"\xf0", -0.5), (b"\x9f", -1.0), (b"y", -2.0))
    (top,) = (await completion_logprobs([each], 0, "x"))["top_logprobs"]
    assert top == {"bytes:\\xf0": -0.5, "bytes:\\x9f": -1.0, "y": -2.0, "x": -3.0}
    assert list(top) == ["bytes:\\xf0", "bytes:\\x9f", "y", "x"], "the likeliest first"


async def test_a_space_that_the_text_does_not_begin_with_moves_no_offset() -> None:
    tokens = [logprob(b" "), logprob(b" The"), logprob(b" end")]
    assert (await completion_logprobs(tokens, 0, " The end"))["text_offset"] == [0, 0, 4]
    assert (await completion_logprobs(tokens[1:], 0, "The end"))["text_offset"] == [0, 3]
    assert (await completion_logprobs(tokens[1:], 7, " The end"))["text_offset"] == [7, 11]
