"""The ledger of a session's rounds, and the measurements its client is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.telemetry.request_metrics import RequestSeries
from gateway.telemetry.round_counters import RoundCounters
from slipstream.v1 import gateway_pb2, verifier_pb2


@dataclass(slots=True)
class RequestStats:
    clock: Callable[[], float]
    """Monotonic seconds."""
    arrived_at: float
    speculates: bool = True
    """Whether candidates are wanted at all."""
    predicts: Callable[[str], bool] = lambda drafter: False
    """Whether a drafter guesses from the request's prediction."""
    sums: RoundCounters = field(default_factory=RoundCounters)
    series: RequestSeries | None = None
    """What sessions of this kind are counted in together."""
    rehomed: int = 0
    first_token_at: float | None = None
    last_token_at: float = 0.0
    ended_at: float | None = None

    def add(self, done: verifier_pb2.Round) -> None:
        if done.token_ids:
            self._timed(self.clock())
        self.sums.add(done, speculates=self.speculates)
        if self.series is not None:
            self.series.sums.add(done, speculates=self.speculates)

    def close(self) -> None:
        if self.ended_at is None:
            self.ended_at = self.clock()

    @property
    def ttft_s(self) -> float:
        """Until now, or the end, where no token came."""
        return (self._until if self.first_token_at is None else self.first_token_at) - self.arrived_at

    @property
    def e2e_s(self) -> float:
        return self._until - self.arrived_at

    @property
    def tpot_s(self) -> float | None:
        """For each token but the first one; None where there are no others."""
        return (self.e2e_s - self.ttft_s) / (self.sums.emitted - 1) if self.sums.emitted > 1 else None

    def statistics(self) -> gateway_pb2.Statistics:
        sums = self.sums
        shares = [sums.shares[name] for name in sorted(sums.shares)]
        predicted = [share for share in shares if self.predicts(share.name)]
        return gateway_pb2.Statistics(
            rounds=sums.rounds,
            rounds_with_drafts=sums.rounds_with_drafts,
            drafted=sums.drafted,
            accepted=sums.accepted,
            ttft_s=self.ttft_s,
            e2e_s=self.e2e_s,
            wait_s=sums.wait_us / 1e6,
            verify_s=sums.verify_us / 1e6,
            rehomed=self.rehomed,
            hits=sums.hits,
            misses=sums.misses,
            bubble_s=sums.bubble_us / 1e6,
            accepted_prediction_tokens=sum(share.accepted for share in predicted),
            rejected_prediction_tokens=sum(share.drafted - share.accepted for share in predicted),
            drafters=shares,
            emitted=sums.emitted,
        )

    @property
    def _until(self) -> float:
        return self.clock() if self.ended_at is None else self.ended_at

    def _timed(self, now: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = now
            if self.series is not None:
                self.series.began(now - self.arrived_at)
        elif self.series is not None:
            self.series.gap.observe(now - self.last_token_at)
        self.last_token_at = now
