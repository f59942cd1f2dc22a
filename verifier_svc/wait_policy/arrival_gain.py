"""What candidates that were waited for bring, against what the best of them alone would: learned by looking.

It is known what one more candidate below the likeliest leaf is worth. A frame may hold several, on many branches
of a tree, or none for which the step has room. So each wait is looked at again when something came: what the plan's
candidates are worth now, less what they were worth before, for the sessions on which something came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

from verifier_svc.wait_policy.average import Average

Key = TypeVar("Key")
"""A session, whatever it is known by."""
LEAST, MOST = 0.5, 8.0
"""More is taken for an accident; and at least half is hoped for, or nothing were waited for and learned ever again."""


class ExpectedGain(NamedTuple):
    """Of one session, while a step waits."""

    version: int
    """Of its tree."""
    worth: float
    """Tokens expected of the candidates that the step would take as it is."""
    gain: float
    """Tokens that one more candidate would add."""
    cost: float = 0.0
    """Tokens that its place costs, or the candidate that a full selection would have to give for it."""


class ArrivalGains(Generic[Key]):
    """Owned by the patience of a verifier."""

    def __init__(self) -> None:
        self._ratio = Average(1.0)
        self._hopes: Mapping[Key, ExpectedGain] = {}

    @property
    def ratio(self) -> float:
        """Tokens that came for each that one more candidate would have added."""
        return max(LEAST, self._ratio.value or 0.0)

    def wait(self, hopes: Mapping[Key, ExpectedGain]) -> None:
        """A step waits, hoping for this."""
        self._hopes = hopes

    def look(self, hopes: Mapping[Key, ExpectedGain]) -> None:
        """It is planned again; the same sessions, and what they hope for now."""
        came = [
            (hope.worth - before.worth, before.gain)
            for session, hope in hopes.items()
            if (before := self._hopes.get(session)) is not None and hope.version != before.version
        ]
        self._hopes = {}
        hoped = sum(gain for _, gain in came)
        if hoped > 0.0:
            self._ratio.add(min(max(sum(worth for worth, _ in came) / hoped, 0.0), MOST))
