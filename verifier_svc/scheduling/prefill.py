"""How much of each prompt a step reads."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar


class Prompt(Protocol):
    @property
    def rank(self) -> Any:
        """Who came first, the lowest; comparable."""

    @property
    def priority(self) -> int:
        """The lower, the sooner."""

    @property
    def pending(self) -> int:
        """Tokens still to be read."""


Reader = TypeVar("Reader", bound=Prompt)


def chunks(sessions: list[Reader], room: int) -> dict[Reader, int]:
    """How many tokens of each prompt are read in a step of `room`: half goes to those that come first, half to those
    that have the least left. So a long prompt is read on while others come, and they are not held up by it."""
    sizes = dict.fromkeys(sessions, 0)
    first = sorted(sessions, key=lambda session: session.rank)
    shortest = sorted(first, key=lambda session: (session.priority, session.pending))
    for order, until in ((first, room // 2), (shortest, 0)):
        for session in order:
            size = max(0, min(session.pending - sizes[session], room - until))
            sizes[session] += size
            room -= size
    return {session: size for session, size in sizes.items() if size}
