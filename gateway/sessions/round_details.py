"""What a client is told of each round if it asks: where its tokens came from, and how long it took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gateway.routing.drafters import pool_of
from gateway.sessions.request_stats import RequestStats
from slipstream.rpc import proto_conversion
from slipstream.v1 import gateway_pb2, verifier_pb2


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
