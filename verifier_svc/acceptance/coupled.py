"""Coupled acceptance, the default rule: the same seed gives the same text, whatever was drafted.

The target picks its token at each position by itself: y = argmax(log p + g), where the noise g is a function of seed,
position and token id. A candidate is accepted if and only if it is that pick, so candidates decide how many passes the
text takes and never which text it is. This is why the same text is promised with any drafters, or with none. The pick
itself is `slipstream.engine.sampler.coupled_sampling.choose`, called by `judge` beside this file.

At temperature 0 there is no noise and the rule is greedy acceptance. A drafter that perturbs its log q with the same
noise is accepted with probability sum_i 1 / sum_j max(p_j/p_i, q_j/q_i) (Daliri, Musco and Suresh, "Coupling without
communication and drafter-invariant speculative decoding", 2024, arXiv 2408.07978).
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
