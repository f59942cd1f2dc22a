"""Which verifiers may go on with a session, and which of a model's weights new sessions get. Pure functions.

Verifiers of one model name may differ in what decides their numbers, and then each name of it
(`ModelInfo.arithmetic`) is a pool of its own: a text is written by one of them. Of several weights, as in a rolling
update, new sessions go to the newest ones; one arithmetic beside another on the same weights shares the load.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from slipstream.v1 import types_pb2

MOST_CHARACTERS = 256
"""Length of a name that a worker announces: longer ones are cut."""


class Pooled(Protocol):
    """A verifier, as a choice sees it."""

    @property
    def arithmetic(self) -> str: ...
    @property
    def weights(self) -> str:
        """The model's revision."""
        ...

    @property
    def started_ms(self) -> int:
        """Milliseconds since 1970, by the verifier's clock."""
        ...

    @property
    def crowded(self) -> bool: ...
    @property
    def sessions(self) -> int: ...


V = TypeVar("V", bound=Pooled)


def arithmetic_of(model: types_pb2.ModelInfo) -> str:
    """The name of a model's arithmetic; of a worker that announces none, as older ones do not, what else it says."""
    made = f"{model.revision}/{model.dtype}/{model.vocabulary_fingerprint}"
    return (model.arithmetic or made)[:MOST_CHARACTERS]


def newest_weights(verifiers: Iterable[Pooled]) -> str:
    """The weights that came last: those of the latest first start. All gateways find the same. Empty without any."""
    first: dict[str, int] = {}
    for each in verifiers:
        first[each.weights] = min(each.started_ms, first.get(each.weights, each.started_ms))
    return max(first, key=lambda weights: (first[weights], weights), default="")


def least_loaded(able: Sequence[V], newest: str) -> V | None:
    """The verifier for a session: preferably one without sessions that wait for memory, then one of the newest weights,
    then the least busy."""
    return min(able, key=lambda each: (each.crowded, each.weights != newest, each.sessions), default=None)
