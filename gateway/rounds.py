"""The ledger of a session's rounds, and the measurements its client is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slipstream.v1 import gateway_pb2, verifier_pb2


@dataclass(slots=True)
class Ledger:
    clock: Callable[[], float]
    """Monotonic seconds."""
    arrived_at: float
    rounds: int = 0
    rounds_with_drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    wait_us: int = 0
    verify_us: int = 0
    rehomed: int = 0
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

    def close(self) -> None:
        if self.ended_at is None:
            self.ended_at = self.clock()

    def statistics(self) -> gateway_pb2.Statistics:
        until = self.clock() if self.ended_at is None else self.ended_at
        first = until if self.first_token_at is None else self.first_token_at
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
        )
