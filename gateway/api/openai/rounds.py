"""What a chunk says about rounds, for a request with `speculation: {"rounds": true}`."""

from __future__ import annotations

from typing import Any

from slipstream.v1 import gateway_pb2

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
