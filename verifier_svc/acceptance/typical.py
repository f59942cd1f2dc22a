"""Typical acceptance, the lossy rule `typical` of Medusa (Cai et al. 2024, arXiv 2401.10774, section 2.3.1).

A candidate x below a node with the target's p is accepted if it is no unlikely token there:

    p(x) > min(EPSILON, ALPHA exp(-H(p)))      with the entropy H(p) in nats

so that where the target is unsure of what follows, rarer tokens pass. Of the accepted paths the longest is taken, of
equally long ones the likeliest. The token behind it is the target's own choice, as under `coupled`.

The output is NOT distributed as the target's: which tokens were tried decides what is written, so that a bad drafter
makes other texts, not only slower ones. At temperature 0 p is one-hot, and the rule is exact greedy acceptance.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import numpy as np

from slipstream.speculation.selection import ROOT, Selection
from verifier_svc.acceptance.result import AcceptanceResult, Choose, Distribution, FloatArray

EPSILON, ALPHA = 0.09, 0.3
"""Medusa's defaults; its rule of thumb is ALPHA = sqrt(EPSILON)."""


def typical(selection: Selection) -> Generator[Choose | Distribution, Any, AcceptanceResult]:
    """Visits the accepted nodes, parents first."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for index, parent in enumerate(selection.parents):
        children[parent].append(index)
    accepted: list[tuple[int, ...]] = [()]
    sure: dict[tuple[int, ...], float] = {(): 0.0}
    """Log-probability of each accepted path."""
    for path in accepted:
        node = path[-1] if path else ROOT
        if not children[node]:
            continue
        p: FloatArray = yield Distribution(node)
        least = threshold(p)
        for child in children[node]:
            probability = float(p[selection.token_ids[child]])
            if probability > least:
                accepted.append((*path, child))
                sure[*path, child] = sure[path] + math.log(probability)
    best = max(accepted, key=lambda path: (len(path), sure[path]))
    token: int = yield Choose(best[-1] if best else ROOT)
    return AcceptanceResult(best, token)


def threshold(p: FloatArray) -> float:
    """Probability above which a token is typical where the target has p, float64 [V]."""
    possible = p[p > 0.0]
    entropy = -float((possible * np.log(possible)).sum())
    return min(EPSILON, ALPHA * math.exp(-entropy))
