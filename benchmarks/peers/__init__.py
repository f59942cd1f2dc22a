"""Slipstream beside what a user would take instead: the same weights, prompts and cores, in pairs of runs."""
