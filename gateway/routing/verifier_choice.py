"""Which verifier of a model gets a session: by load, by weights, by the prefix whose KV it may hold.

Verifiers of one model name may differ in what decides their numbers, and then each name of it
(`ModelInfo.arithmetic`) is a pool of its own: a text is written by one of them. Of several weights, as in a rolling
update, new sessions go to the newest ones unless all of these are crowded; one arithmetic beside another on the same
weights shares the load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Generic, Protocol, TypeVar

from gateway.store.session_store import pack_tokens
from slipstream.v1 import types_pb2

MOST_CHARACTERS = 256
"""Length of a name that a worker announces: longer ones are cut."""
STRIDE = 64
"""Tokens between two prefixes that are remembered; prefill of shorter ones costs as little as looking them up."""
MOST_PREFIXES = 64
"""Prefixes of one text that are remembered."""
MOST_REMEMBERED = 65_536
BUSIER, SPARE = 1.5, 2
"""A verifier with the prefix is preferred up to BUSIER times the sessions of the least busy one, plus SPARE."""


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
T = TypeVar("T")


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


def choose(able: Sequence[V], newest: str, known: V | None) -> V | None:
    """The least loaded verifier; but the `known` one, which has computed the text's prefix, unless it is crowded, has
    other weights, or is much busier."""
    least = least_loaded(able, newest)
    if least is None or known is None or known not in able or known.crowded or known.weights != least.weights:
        return least
    return known if known.sessions <= BUSIER * least.sessions + SPARE else least


def prefix_hashes(token_ids: Sequence[int], salt: str) -> list[bytes]:
    """A hash of each prefix of STRIDE, 2 * STRIDE, ... tokens. Texts with different salts share none."""
    hashes: list[bytes] = []
    digest = blake2b(salt.encode(), digest_size=16)
    for start in range(0, min(len(token_ids), MOST_PREFIXES * STRIDE) - STRIDE + 1, STRIDE):
        digest.update(pack_tokens(token_ids[start : start + STRIDE]))
        hashes.append(digest.copy().digest())
    return hashes


class PrefixAffinity(Generic[T]):
    """Which verifier computed a prefix last: its KV may still be there, and prefill is shorter. A hint only."""

    def __init__(self, capacity: int = MOST_REMEMBERED) -> None:
        self._capacity = capacity
        self._workers: OrderedDict[bytes, T] = OrderedDict()

    def note(self, hashes: Sequence[bytes], worker: T) -> None:
        """`worker` has computed the text with these prefix hashes."""
        for each in hashes:
            self._workers[each] = worker
            self._workers.move_to_end(each)
        while len(self._workers) > self._capacity:
            self._workers.popitem(last=False)

    def find(self, hashes: Sequence[bytes]) -> T | None:
        """The worker that computed the longest of these prefixes last."""
        return next((self._workers[each] for each in reversed(hashes) if each in self._workers), None)
