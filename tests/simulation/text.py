"""The outputs that sessions of one text may have: the target's own, and its continuation of an edit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from gateway.store.session_store import pack_tokens
from gateway.text.transcript import Transcript
from tests.simulation.chained import continued
from tests.simulation.parties import tokenizer

if TYPE_CHECKING:
    from tests.simulation.watching import Watched

PROMPT = (8, 9)
"""Behind each text's own first token."""
MOST_TOKENS = 64
Output = tuple[int, ...]


@cache
def truth(first: int, kept: int = 0, edit: Output = ()) -> Output:
    """The target's output after a text's prompt; or its first `kept` tokens, an edit, and what follows that."""
    prompt = (first, *PROMPT)
    text_tokens = continued(prompt, len(prompt) + kept)
    return continued((*text_tokens, *edit), len(prompt) + MOST_TOKENS)[len(prompt) :]


@cache
def words(output: Output, *, all_of_it: bool = True) -> str:
    """The text of some tokens; `all_of_it`: what is held back for more tokens too."""
    transcript = Transcript(tokenizer().detokenizer(), [])
    return transcript.push(output) + (transcript.finish() if all_of_it else "")


@dataclass
class Text:
    first: int
    """Its prompt's first token, which no other text has."""
    tokens: int
    """Requested output tokens."""
    versions: list[Output] = field(default_factory=list)
    """Right outputs; the first one is without an edit."""
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

    def edited(self, kept: int, edit: Sequence[int]) -> Output:
        """One more version."""
        version = truth(self.first, kept, tuple(edit))
        self.versions.append(version)
        self.logs.append(pack_tokens((*self.prompt, *version)))
        return version

    def may_say(self, output: Sequence[int]) -> bool:
        return any(version[: len(output)] == tuple(output) for version in self.versions)

    def may_log(self, packed: bytearray) -> bool:
        return any(log.startswith(packed) for log in self.logs)
