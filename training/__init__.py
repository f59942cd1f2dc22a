"""Training a small target and its distilled drafter from scratch on one CPU core, inside a fixed time budget.

corpus -> vocabulary -> target (cross-entropy) -> drafter (KL to the target) -> evaluation -> card (README.md)
"""
