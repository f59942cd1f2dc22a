"""Spans and metrics of a verifier."""
