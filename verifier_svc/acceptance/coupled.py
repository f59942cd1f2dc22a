"""Coupled acceptance, the default: exact for any draft whatsoever. At temperature 0 it is greedy acceptance.

The target chooses y = argmax(log p + g) with noise g keyed by (seed, position); a candidate is accepted iff it is y.
What is emitted never depends on the tree, so the text is a function of seed and target alone. A drafter that perturbs
its log q with the same noise is accepted with probability sum_i 1 / sum_j max(p_j/p_i, q_j/q_i) (Daliri, Musco and
Suresh, "Coupling without communication and drafter-invariant speculative decoding", 2024, arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Generator

from slipstream.speculation.selection import ROOT, Selection
from verifier_svc.acceptance.result import AcceptanceResult, Choose


def coupled(selection: Selection) -> Generator[Choose, int, AcceptanceResult]:
    """Walks down while the tree holds the target's own choice."""
    node, path = ROOT, list[int]()
    while True:
        token = yield Choose(node)
        child = selection.child(node, token)
        if child is None:
            return AcceptanceResult(tuple(path), token)
        path.append(child)
        node = child
