"""Which traces are kept: the rules of `deploy/otel/collector.yaml`. A gateway computes them too, so that its histograms
name traces that are kept (exemplars)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.telemetry import spans
from slipstream.telemetry.tracing import Trace, Value

REJECTED = 48
"""Rejected draft tokens from which a request has a span whatever was sampled, if they are REJECTED_PERCENT of those
drafted."""
REJECTED_PERCENT = 75
SALT = b"slipstream"
"""`hash_salt` of the collector's probabilistic policy."""
FNV_OFFSET, FNV_PRIME, HASHES = 0xCBF29CE484222325, 0x100000001B3, 1 << 64


def rejected(drafted: int, accepted: int) -> dict[str, Value]:
    """The attributes by which `remarkable` judges candidates."""
    count = drafted - accepted
    percent = 100 * count // drafted if drafted else 0
    return {
        spans.REJECTED: count,
        spans.REJECTED_PERCENT: percent,
        spans.OLD_REJECTED: count,
        spans.OLD_REJECTED_PERCENT: percent,
    }


def remarkable(attributes: Mapping[str, Value], failed: bool) -> bool:
    """Whether a request failed, was late, was moved to another verifier, or had most of many candidates rejected.
    `attributes`: those of its span."""

    def least(key: str, limit: int) -> bool:
        value = attributes.get(key)
        return isinstance(value, int) and value >= limit

    mostly = least(spans.REJECTED, REJECTED) and least(spans.REJECTED_PERCENT, REJECTED_PERCENT)
    return failed or attributes.get(spans.LATE) is True or mostly or least(spans.REHOMED, 1)


def kept_at_rate(trace_id: int, percent: float) -> bool:
    """Whether the collector's probabilistic policy keeps this trace: FNV-1a of the salt and the id, as in its
    `tail_sampling` processor."""
    found = FNV_OFFSET
    for byte in SALT + trace_id.to_bytes(16):
        found = (found ^ byte) * FNV_PRIME % HASHES
    return found <= int((HASHES - 1) * min(percent / 100.0, 1.0))


@dataclass(frozen=True, slots=True)
class ExemplarTrace:
    """The trace that observations of a request may name."""

    id: str
    kept: bool
    """True if the trace is kept however the request goes on."""

    @classmethod
    def of(cls, trace: Trace) -> ExemplarTrace:
        percent = trace.tracing.keep_percent
        return cls(trace.id, trace.sampled and (trace.asked or kept_at_rate(trace.root.trace_id, percent)))

    def labels(self, *, remarkable: bool) -> dict[str, str] | None:
        """An exemplar of a histogram; None where the trace may not be kept. `remarkable`: what is known already makes
        it worth keeping."""
        return {"trace_id": self.id} if self.kept or remarkable else None
