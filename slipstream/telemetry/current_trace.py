"""The trace that the running code belongs to, for logs and exemplars."""

from __future__ import annotations

from opentelemetry import trace


def trace_id() -> str:
    """32 hex digits; empty outside of a sampled span."""
    context = trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid and context.trace_flags.sampled else ""


def exemplar() -> dict[str, str] | None:
    """For an observation: where it can be looked at more closely."""
    found = trace_id()
    return {"trace_id": found} if found else None
