"""The ledger of a session's rounds, and the measurements its client is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.drafters import pool_of
from slipstream.v1 import gateway_pb2, verifier_pb2

MISSES = {
    verifier_pb2.MISS_CAUSE_NO_DRAFTER: "no_drafter",
    verifier_pb2.MISS_CAUSE_OPENING: "opening",
    verifier_pb2.MISS_CAUSE_DIVERGED: "diverged",
    verifier_pb2.MISS_CAUSE_EXHAUSTED: "exhausted",
}


@dataclass(slots=True)
class Ledger:
    """A hit is a round whose candidates were waiting when the round before ended; a miss is one where they were not.
    Where no candidates are wanted there are neither."""

    clock: Callable[[], float]
    """Monotonic seconds."""
    arrived_at: float
    speculates: bool = True
    """Whether candidates are wanted at all."""
    predicts: Callable[[str], bool] = lambda drafter: False
    """Whether a drafter guesses from the request's prediction."""
    rounds: int = 0
    rounds_with_drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    wait_us: int = 0
    verify_us: int = 0
    bubble_us: int = 0
    rehomed: int = 0
    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    shares: dict[str, gateway_pb2.DrafterStatistics] = field(default_factory=dict)
    """By the name that clients know; its replicas together."""
    first_token_at: float | None = None
    ended_at: float | None = None

    def add(self, done: verifier_pb2.Round) -> None:
        if self.first_token_at is None and done.token_ids:
            self.first_token_at = self.clock()
        self.rounds += 1
        self.rounds_with_drafts += done.drafted > 0
        self.drafted += done.drafted
        self.accepted += done.accepted
        self.wait_us += done.wait_us
        self.verify_us += done.verify_us
        self.bubble_us += done.bubble_us
        if self.speculates:
            self._find(done)
        for share in done.drafters:
            name = pool_of(share.drafter)
            known = self.shares.setdefault(name, gateway_pb2.DrafterStatistics(name=name))
            known.drafted += share.drafted
            known.accepted += share.accepted

    def close(self) -> None:
        if self.ended_at is None:
            self.ended_at = self.clock()

    def statistics(self) -> gateway_pb2.Statistics:
        until = self.clock() if self.ended_at is None else self.ended_at
        first = until if self.first_token_at is None else self.first_token_at
        shares = [self.shares[name] for name in sorted(self.shares)]
        predicted = [share for share in shares if self.predicts(share.name)]
        return gateway_pb2.Statistics(
            rounds=self.rounds,
            rounds_with_drafts=self.rounds_with_drafts,
            drafted=self.drafted,
            accepted=self.accepted,
            ttft_s=first - self.arrived_at,
            e2e_s=until - self.arrived_at,
            wait_s=self.wait_us / 1e6,
            verify_s=self.verify_us / 1e6,
            rehomed=self.rehomed,
            hits=self.hits,
            misses=self.misses,
            bubble_s=self.bubble_us / 1e6,
            accepted_prediction_tokens=sum(share.accepted for share in predicted),
            rejected_prediction_tokens=sum(share.drafted - share.accepted for share in predicted),
            drafters=shares,
        )

    def _find(self, done: verifier_pb2.Round) -> None:
        if done.miss == verifier_pb2.MISS_CAUSE_UNSPECIFIED:
            self.hits += 1
        elif done.miss != verifier_pb2.MISS_CAUSE_NOT_WANTED:
            self.misses[MISSES.get(done.miss, "other")] += 1  # a cause that a newer verifier knows
