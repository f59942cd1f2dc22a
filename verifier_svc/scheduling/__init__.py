"""The step loop: which sessions have KV, what the next step verifies, and what it decided."""
