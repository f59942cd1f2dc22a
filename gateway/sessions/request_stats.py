"""Sums and times of a session's rounds, as its client receives them in Finished, and the details of each round
if it asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from gateway.requests.resolved_request import ResolvedRequest
from gateway.routing.drafters import pool_of
from gateway.sessions.arithmetic_spans import Spans, messages
from slipstream.rpc import proto_conversion
from slipstream.telemetry.metrics_collector import OTHER
from slipstream.v1 import gateway_pb2, verifier_pb2

MISSES = {
    verifier_pb2.MISS_CAUSE_NO_DRAFTER: "no_drafter",
    verifier_pb2.MISS_CAUSE_OPENING: "opening",
    verifier_pb2.MISS_CAUSE_DIVERGED: "diverged",
    verifier_pb2.MISS_CAUSE_EXHAUSTED: "exhausted",
}
MOST_DRAFTERS = 64
"""Drafters that are counted apart; the others share the name `other`."""

MOST_LENGTHS = 1024
"""Longest accepted path that is counted by its length."""


@dataclass(slots=True)
class RoundCounters:
    """Sums over rounds, of one run of a session (a resumed one starts at 0) or of all sessions of one kind.

    A hit is a round whose candidates were waiting when the round before ended; a miss is one where they were not. Where
    no candidates are wanted there are neither.
    """

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
    """By the drafter's name in the configuration."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Rounds with candidates, by how many of them were accepted."""

    def add_round(self, done: verifier_pb2.Round, *, speculates: bool) -> None:
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
            self._count_hit_or_miss(done)
        for share in done.drafters:
            counted = self._share_of(pool_of(share.drafter))
            counted.drafted += share.drafted
            counted.accepted += share.accepted
            counted.rounds += share.drafted > 0

    def reached(self) -> Iterator[tuple[int, int]]:
        """Pairs (depth below the last committed token, from 1; rounds that accepted a candidate there)."""
        rounds = 0
        for depth in range(max(self.lengths, default=0), 0, -1):
            rounds += self.lengths[depth]
            yield depth, rounds

    def histogram(self) -> list[int]:
        """Rounds with candidates that accepted none of them, one, two, and so on."""
        longest = min(max(self.lengths, default=-1), MOST_LENGTHS)  # a number that a verifier sent
        return [self.lengths[length] for length in range(longest + 1)]

    def _count_hit_or_miss(self, done: verifier_pb2.Round) -> None:
        if done.miss == verifier_pb2.MISS_CAUSE_UNSPECIFIED:
            self.hits += 1
        elif done.miss != verifier_pb2.MISS_CAUSE_NOT_WANTED:
            self.misses[MISSES.get(done.miss, OTHER)] += 1  # OTHER: a cause that only a newer verifier has

    def _share_of(self, drafter: str) -> gateway_pb2.DrafterStatistics:
        share = self.shares.get(drafter)
        if share is None:
            name = drafter if len(self.shares) < MOST_DRAFTERS else OTHER
            share = self.shares.setdefault(name, gateway_pb2.DrafterStatistics(name=name))
        return share


@dataclass(slots=True)
class RequestStats:
    clock: Callable[[], float]
    """Monotonic seconds."""
    arrived_at: float
    max_draft_tokens: int = 1
    """Most candidates verified in one round; 0 for a session that wants none."""
    prompt_tokens: int = 0
    predicts: Callable[[str], bool] = lambda drafter: False
    """Whether the drafter of this name proposes from the request's prediction."""
    sums: RoundCounters = field(default_factory=RoundCounters)
    lossy: bool = False
    """True under a lossy acceptance rule."""
    detailed: bool = False
    """True if each round is counted on its own as well."""
    steps: list[tuple[int, int]] = field(default_factory=list)
    """Candidates verified, and accepted, in each round with candidates; empty unless `detailed`."""
    cached_tokens: int = 0
    """Leading tokens of the session whose KV its first verifier had already."""
    rehomed: int = 0
    """Times that the session was opened again on a verifier."""
    arithmetics: Spans = ()
    """Which arithmetic wrote which output tokens, over the session's whole life."""
    first_token_at: float | None = None
    last_token_at: float = 0.0
    ended_at: float | None = None

    @classmethod
    def of_request(
        cls,
        resolved: ResolvedRequest,
        clock: Callable[[], float],
        arrived_at: float,
        predicts: Callable[[str], bool],
    ) -> RequestStats:
        limit, prompt = resolved.max_draft_tokens, len(resolved.prompt)
        lossy = resolved.sampling.lossy and limit > 0
        return cls(clock, arrived_at, limit, prompt, predicts, lossy=lossy, detailed=resolved.rounds)

    @property
    def speculates(self) -> bool:
        """True if the session wants candidates at all."""
        return self.max_draft_tokens > 0

    def add_round(self, done: verifier_pb2.Round) -> None:
        if done.token_ids:
            self.last_token_at = self.clock()
            if self.first_token_at is None:
                self.first_token_at = self.last_token_at
        self.sums.add_round(done, speculates=self.speculates)
        if self.detailed and done.drafted:
            self.steps.append((done.drafted, done.accepted))
        if not self.rehomed:
            self.cached_tokens += done.cached_tokens

    def close(self) -> None:
        """Fix the end of the session's time at now, the first time this is called."""
        if self.ended_at is None:
            self.ended_at = self.clock()

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token; where there is none, to the end or until now."""
        return (self._until if self.first_token_at is None else self.first_token_at) - self.arrived_at

    @property
    def e2e_s(self) -> float:
        """Seconds from arrival to the end, or until now."""
        return self._until - self.arrived_at

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token behind the first one; None where there is no such token."""
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
            accepted_lengths=sums.histogram(),
            max_draft_tokens=self.max_draft_tokens,
            cached_prompt_tokens=min(self.cached_tokens, self.prompt_tokens),
            step_drafted=[drafted for drafted, _ in self.steps],
            step_accepted=[accepted for _, accepted in self.steps],
            lossy=self.lossy,
            arithmetics=messages(self.arithmetics),
        )

    @property
    def _until(self) -> float:
        return self.clock() if self.ended_at is None else self.ended_at


def describe_rounds(
    rounds: Sequence[verifier_pb2.Round], stats: RequestStats, offset: int
) -> Iterator[gateway_pb2.RoundDetails]:
    """Describe the rounds that committed tokens, without their texts. `stats`: the request's, before these rounds.
    `offset`: output tokens before them."""
    at_us = proto_conversion.microseconds(stats.e2e_s)
    for number, done in enumerate(rounds, stats.sums.rounds + 1):
        if not done.token_ids:
            continue
        details = gateway_pb2.RoundDetails(
            number=number,
            offset=offset,
            drafted=done.drafted,
            accepted=min(done.accepted, len(done.token_ids)),
            bonus=done.bonus,
            drafters=done.drafters,
            drafts=done.drafts,
            wait_us=done.wait_us,
            verify_us=done.verify_us,
            bubble_us=done.bubble_us,
            at_us=at_us,
        )
        # The names that requests use, not those of replicas.
        for share in details.drafters:
            share.drafter = pool_of(share.drafter)
        for span in details.drafts:
            span.drafter = pool_of(span.drafter)
        yield details
        offset += len(done.token_ids)
