"""Acceptance: the exact rules that decide which candidates become tokens."""
