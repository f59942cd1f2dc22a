"""Cost and speculation of an answer, in the shape that load tools read; and the rounds of a chunk, for a request with
`speculation: {"rounds": true}`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slipstream.v1 import gateway_pb2


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    statistics: Iterable[gateway_pb2.Statistics] = (),
    cached_tokens: int = 0,
) -> dict[str, Any]:
    """The root field `usage`. `cached_tokens`: those of the prompt tokens whose KV no session had to compute."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": accepted_and_rejected(statistics) | {"reasoning_tokens": 0},
    }


def accepted_and_rejected(statistics: Iterable[gateway_pb2.Statistics]) -> dict[str, int]:
    """Draft tokens of every drafter: those that became output, and those that were verified and did not."""
    sums = list(statistics)
    drafted, accepted = sum(each.drafted for each in sums), sum(each.accepted for each in sums)
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": max(0, drafted - accepted)}


def speculation_metrics(statistics: gateway_pb2.Statistics) -> dict[str, Any]:
    """The root field `metrics` of an answer with one choice; empty where nothing was to be drafted.

    A step is a round that verified candidates. `num_spec_tokens` is the longest path that a round can accept, for the
    histogram counts accepted paths; a tree may hold more candidates than that, all of which `num_draft_tokens` counts.
    The lists of single steps are there for requests that ask for rounds.
    """
    if not statistics.max_draft_tokens:
        return {}
    steps, accepted = statistics.rounds_with_drafts, statistics.accepted
    histogram = list(statistics.accepted_lengths)
    longest = max(statistics.max_draft_tokens, len(histogram) - 1)
    histogram += [0] * (longest + 1 - len(histogram))
    figures = {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / statistics.drafted if statistics.drafted else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": statistics.drafted,
        "num_spec_tokens": longest,
    }
    if statistics.lossy:
        figures["lossy"] = True
    if statistics.step_drafted:
        figures["per_step_accepted"] = list(statistics.step_accepted)
        figures["per_step_drafted"] = list(statistics.step_drafted)
    return {"speculative_decoding": figures}


def mixture(statistics: gateway_pb2.Statistics) -> dict[str, Any]:
    """The field `arithmetics` of a text that several arithmetics wrote, each from its offset in output tokens on; empty
    where one wrote it all."""
    spans = statistics.arithmetics
    if len(spans) < 2:
        return {}
    return {"arithmetics": [{"arithmetic": each.arithmetic, "offset": each.offset} for each in spans]}


BONUS, RECOVERED, PLAIN = "bonus", "recovered", "plain"
"""Origins of a round's last token: behind candidates that were all accepted, in the place of a rejected one, and where
no candidate was verified. All other tokens come from drafters."""


def round_fields(details: gateway_pb2.RoundDetails) -> dict[str, Any]:
    """One round as JSON; all times are milliseconds. `began_ms` and `ended_ms` of drafts count back from the end of the
    round's step."""
    return {
        "round": details.number,
        "offset": details.offset,
        "tokens": [_token(details, place, text) for place, text in enumerate(details.texts)],
        "drafted": details.drafted,
        "accepted": details.accepted,
        "wait_ms": details.wait_us / 1e3,
        "bubble_ms": details.bubble_us / 1e3,
        "verify_ms": details.verify_us / 1e3,
        "at_ms": details.at_us / 1e3,
        "drafters": [
            {"name": share.drafter, "drafted": share.drafted, "accepted": share.accepted} for share in details.drafters
        ],
        "drafts": [
            {
                "drafter": span.drafter,
                "began_ms": span.began_us / 1e3,
                "ended_ms": span.ended_us / 1e3,
                "candidates": span.candidates,
            }
            for span in details.drafts
        ],
    }


def _token(details: gateway_pb2.RoundDetails, place: int, text: str) -> dict[str, Any]:
    if place < details.accepted:
        drafters = [share.drafter for share in details.drafters if place in share.accepted_places]
        return {"text": text, "origin": "drafted", "drafters": drafters}
    last = PLAIN if not details.drafted else BONUS if details.bonus else RECOVERED
    return {"text": text, "origin": last, "drafters": []}
