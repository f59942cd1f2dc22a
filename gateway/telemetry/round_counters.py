"""Sums over rounds: those of one session, or of all sessions of one kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from gateway.routing.drafters import pool_of
from slipstream.telemetry.metrics_collector import OTHER
from slipstream.v1 import gateway_pb2, verifier_pb2

MISSES = {
    verifier_pb2.MISS_CAUSE_NO_DRAFTER: "no_drafter",
    verifier_pb2.MISS_CAUSE_OPENING: "opening",
    verifier_pb2.MISS_CAUSE_DIVERGED: "diverged",
    verifier_pb2.MISS_CAUSE_EXHAUSTED: "exhausted",
}
MOST_DRAFTERS = 64
"""Whose shares are told apart."""


@dataclass(slots=True)
class RoundCounters:
    """A hit is a round whose candidates were waiting when the round before ended; a miss is one where they were not.
    Where no candidates are wanted there are neither."""

    rounds: int = 0
    rounds_with_drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    wait_us: int = 0
    verify_us: int = 0
    bubble_us: int = 0
    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    shares: dict[str, gateway_pb2.DrafterStatistics] = field(default_factory=dict)
    """By the name of the drafter."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Rounds by how many candidates they accepted."""

    def add(self, done: verifier_pb2.Round, *, speculates: bool) -> None:
        """`speculates`: whether the session wants candidates at all."""
        self.rounds += 1
        self.drafted += done.drafted
        self.accepted += done.accepted
        self.emitted += len(done.token_ids)
        self.wait_us += done.wait_us
        self.verify_us += done.verify_us
        self.bubble_us += done.bubble_us
        if done.drafted:
            self.rounds_with_drafts += 1
            self.lengths[done.accepted] += 1
        if speculates:
            self._find(done)
        for share in done.drafters:
            known = self._share(pool_of(share.drafter))
            known.drafted += share.drafted
            known.accepted += share.accepted
            known.rounds += share.drafted > 0

    def reached(self) -> Iterator[tuple[int, int]]:
        """(depth below the last committed token, from 1; rounds that accepted a candidate there)"""
        rounds = 0
        for depth in range(max(self.lengths, default=0), 0, -1):
            rounds += self.lengths[depth]
            yield depth, rounds

    def _find(self, done: verifier_pb2.Round) -> None:
        if done.miss == verifier_pb2.MISS_CAUSE_UNSPECIFIED:
            self.hits += 1
        elif done.miss != verifier_pb2.MISS_CAUSE_NOT_WANTED:
            self.misses[MISSES.get(done.miss, OTHER)] += 1  # a cause that a newer verifier knows

    def _share(self, drafter: str) -> gateway_pb2.DrafterStatistics:
        known = self.shares.get(drafter)
        if known is None:
            name = drafter if len(self.shares) < MOST_DRAFTERS else OTHER
            known = self.shares.setdefault(name, gateway_pb2.DrafterStatistics(name=name))
        return known
