"""Stop strings: the same text ends at the same place however it arrives, and nothing is shown too early."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.text.transcript import StopStrings, Transcript

TEXTS = st.text(alphabet="ab", max_size=12)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)


class Letters:
    """A detokenizer whose tokens are characters; token 0 is held back until the next one."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, token: int) -> str:
        if token == 0:
            self._held += "_"
            return ""
        held, self._held = self._held, ""
        return held + chr(token)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def expected(text: str, stops: list[str], include: bool = False) -> tuple[str, str]:
    """By definition: read the text character by character until it ends with a stop string."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, ""


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 12), max_size=4), include=st.booleans())
def test_the_end_of_the_text_does_not_depend_on_how_it_was_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    scanner, shown, stop = StopStrings(stops, include=include), "", ""
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for low, high in pairwise(edges):
        scan = scanner.push(text[low:high])
        shown, stop = shown + scan.text, scan.stop
        if stop:
            break
    assert (shown if stop else shown + scanner.flush(), stop) == expected(text, stops, include)


@given(text=TEXTS, stops=STOPS)
def test_text_is_held_back_no_longer_than_a_stop_string_may_be_beginning(text: str, stops: list[str]) -> None:
    scanner, shown = StopStrings(stops), ""
    for end, character in enumerate(text, 1):
        scan = scanner.push(character)
        shown += scan.text
        if scan.stop:
            return
        held = text[:end].removeprefix(shown)
        assert held == "" or any(stop.startswith(held) for stop in stops)


def feed(text: str, stops: list[str], include: bool = False) -> tuple[str, Transcript]:
    transcript = Transcript(Letters(), stops, include_stop=include)
    shown = transcript.push([0 if character == "_" else ord(character) for character in text])
    return "".join(shown + transcript.finish()) + transcript.rest, transcript


def test_a_stop_string_that_is_included_is_carried_by_its_tokens() -> None:
    for text, stops, shown, carrying in (
        ("abcdef", ["cd"], "abcd", 4),
        ("abcdef", ["a"], "a", 1),
        ("abc", ["x"], "abc", 3),
    ):
        found, transcript = feed(text, stops, include=True)
        assert (found, transcript.carrying(), transcript.stop) == (
            shown,
            carrying,
            stops[0] if "x" not in stops else "",
        )


def test_the_tokens_that_carry_the_text_are_the_fewest_that_do() -> None:
    for text, stops, shown, carrying in (
        ("abcdef", ["cd"], "ab", 2),
        ("abcdef", ["a"], "", 1),
        ("abcdef", [], "abcdef", 6),
        ("abcdef", ["x"], "abcdef", 6),
        ("a_bc", ["bc"], "a_", 3),  # the character is carried by the token that made it whole
        ("ab_", ["_"], "ab", 2),
    ):
        final, transcript = feed(text, stops)
        assert (final, transcript.carrying()) == (shown, carrying)


@given(text=st.text(alphabet="ab_", max_size=12), stops=STOPS)
def test_the_transcript_ends_at_the_first_stop_string(text: str, stops: list[str]) -> None:
    shown, transcript = feed(text, stops)
    assert (shown, transcript.stop) == expected(text, stops)
    assert len(transcript) == len(text)


@given(text=st.text(alphabet="ab_", max_size=12), stops=STOPS)
def test_tokens_are_settled_with_their_text_and_never_taken_back(text: str, stops: list[str]) -> None:
    """One after the other, and the same however many come at once; those of a text that a stop string ends never
    exceed what carries it."""
    transcript, settled = Transcript(Letters(), stops), list[str]()
    for number, character in enumerate(text, 1):
        settled += transcript.push([0 if character == "_" else ord(character)])
        assert len(settled) <= number
        if settled and not transcript.stop:
            assert text.startswith("".join(settled))
    settled += transcript.finish()
    whole, once = feed(text, stops)
    assert "".join(settled) + transcript.rest == whole
    assert len(settled) == transcript.carrying() == once.carrying()
    assert transcript.carrying() >= bool(text), "a text of one token is charged as one"
    if not transcript.stop:
        assert len(settled) == len(text)


class Words:
    """A detokenizer of these words, by their index."""

    def __init__(self, words: list[str]) -> None:
        self._words = words

    def push(self, token: int) -> str:
        return self._words[token]

    def flush(self) -> str:
        return ""


@given(words=st.lists(st.text(alphabet="ab", max_size=3), max_size=8), stops=STOPS)
def test_a_token_comes_with_the_whole_of_its_text_unless_a_stop_string_cuts_it(
    words: list[str], stops: list[str]
) -> None:
    """So a place in the text is the same for whoever counts tokens' texts and whoever counts the text that came."""
    transcript, settled = Transcript(Words(words), stops), list[str]()
    for token in range(len(words)):
        settled += transcript.push([token])
        if not transcript.stop:
            assert settled == words[: len(settled)]
    settled += transcript.finish()
    assert settled[:-1] == words[: max(0, len(settled) - 1)]
    if not transcript.stop:
        assert settled == words
    elif settled:
        assert words[len(settled) - 1].startswith(settled[-1])
