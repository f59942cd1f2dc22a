"""Training on CPUs: a small target with its drafter from nothing (`session.py`), and drafters for a given target.

corpus -> vocabulary -> target (cross-entropy) -> drafter (KL to the target) -> evaluation -> card (README.md)
request -> texts and the target's own answers -> draft, medusa or eagle -> best checkpoint -> export, report (`run.py`)
"""
