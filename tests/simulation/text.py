"""The outputs that sessions of one text may have: the target's own, and its continuation of an edit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from gateway.store.session_store import pack_tokens, unpack_tokens
from gateway.text.transcript import Transcript
from tests.simulation.chained import continued, follows
from tests.simulation.parties import tokenizer

if TYPE_CHECKING:
    from tests.simulation.watching import Watched

PROMPT = (8, 9)
"""Behind each text's own first token."""
MOST_TOKENS = 64
Output = tuple[int, ...]


@cache
def truth(first: int, kept: int = 0, edit: Output = (), arithmetic: int = 0) -> Output:
    """The target's output after a text's prompt; or its first `kept` tokens, an edit, and what follows that."""
    prompt = (first, *PROMPT)
    text_tokens = continued(prompt, len(prompt) + kept, arithmetic)
    return continued((*text_tokens, *edit), len(prompt) + MOST_TOKENS, arithmetic)[len(prompt) :]


@lru_cache(1 << 12)
def mixture(first: int, output: Output, arithmetics: int) -> bool:
    """Whether each token is what one of the targets writes behind those before it."""
    text = (first, *PROMPT, *output)
    return all(
        text[place] in {follows(first, place, text[place - 1], each) for each in range(arithmetics)}
        for place in range(1 + len(PROMPT), len(text))
    )


@cache
def words(output: Output, *, all_of_it: bool = True) -> str:
    """The text of some tokens; `all_of_it`: what is held back for more tokens too."""
    transcript = Transcript(tokenizer().detokenizer(), [])
    return "".join(transcript.push(output) + (transcript.finish() if all_of_it else []))


@dataclass
class Text:
    first: int
    """Its prompt's first token, which no other text has."""
    tokens: int
    """Requested output tokens."""
    arithmetics: int = 1
    """Targets that may write it."""
    mixed: bool = False
    """Whether several of them may, as its client chose."""
    versions: list[Output] = field(default_factory=list)
    """Right outputs of one target; the first ones, one for each of them, are without an edit."""
    logs: list[bytes] = field(default_factory=list)
    """Packed tokens of the versions, as the store has them."""
    asked: object = None
    """The gateway that was asked for it last."""
    completion: Watched | None = None
    """The client's completion, as of now."""

    def __post_init__(self) -> None:
        self.edited(0, ())

    @property
    def prompt(self) -> Output:
        return (self.first, *PROMPT)

    @property
    def tokens_received(self) -> list[int]:
        return [] if self.completion is None else self.completion.token_ids

    @property
    def originals(self) -> list[Output]:
        return self.versions[: self.arithmetics]

    def edited(self, kept: int, edit: Sequence[int], received: Sequence[int] = ()) -> list[Output]:
        """More versions: one for each target that may have written the kept ones of the tokens received."""
        start = tuple(received[:kept])
        made = [truth(self.first, kept, tuple(edit), each) for each in range(self.arithmetics)]
        made = [version for version in made if version[: len(start)] == start]
        self.versions += made
        self.logs += [pack_tokens((*self.prompt, *version)) for version in made]
        return made

    def may_say(self, output: Sequence[int]) -> bool:
        said = tuple(output)
        right = any(version[: len(said)] == said for version in self.versions)
        return right or (self.mixed and mixture(self.first, said, self.arithmetics))

    def may_log(self, packed: bytearray) -> bool:
        if any(log.startswith(packed) for log in self.logs):
            return True
        return self.mixed and self.may_say(unpack_tokens(bytes(packed))[len(self.prompt) :])
