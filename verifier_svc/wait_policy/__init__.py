"""Whether a step waits for candidates, and which candidates are worth sending."""
