"""What was measured: cost of a step, probability of acceptance."""
