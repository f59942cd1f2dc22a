"""Number of nodes of one sequence's tree that a draft model expands in a pass.

More nodes find more of what the target may write. On a GPU a pass takes no longer with them; on a CPU it does, and what
is found late is worth less. So a pass of each size is timed before the drafter serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from slipstream.proposers.base import ROOT, Proposal, Proposer, ProposerContext
from slipstream.speculation.sampling_params import SamplingParams

FEWEST = 4
SIZES = (FEWEST, 8, 16)
LONGER = 1.2
"""Times a pass of FEWEST nodes that one of more may take. One session of `benchmarks.virtual` decodes faster at 0 to
20 ms with 16 nodes in 2.5 ms (`World(expand=16, draft=LinearCost(0.0025))`) than with 4 in 2 ms."""
PASSES = 7
"""Passes of each size that are timed, of which the shortest counts: other programs on the machine make a pass
longer, never shorter."""
HANDLE, PROMPT = "expansion", [0, 0, 0]


def measured_expansion(proposer: Proposer, clock: Callable[[], float] = time.perf_counter) -> int:
    """The largest of SIZES whose passes are worth it; FEWEST where the KV cache has no room to try. Runs on the model's
    thread, before anything is served."""
    shortest = dict.fromkeys(SIZES, float("inf"))
    try:
        for _ in range(PASSES):
            for size in SIZES:
                context = _context(size)
                began = clock()
                (answer,) = proposer.propose([context])
                seconds = clock() - began
                if not isinstance(answer, Proposal) or answer.no_room:
                    return FEWEST
                shortest[size] = min(shortest[size], seconds)
    finally:
        proposer.close_sequence(HANDLE)
    return max(size for size in SIZES if shortest[size] <= LONGER * shortest[FEWEST])


def _context(nodes: int) -> ProposerContext:
    return ProposerContext(
        handle=HANDLE,
        tokens=PROMPT,
        length=len(PROMPT),
        prompt_length=len(PROMPT),
        max_length=len(PROMPT) + 2,
        sampling=SamplingParams(temperature=0.0),
        node_tokens=[0] * nodes,
        parents=[ROOT] * nodes,
        expand=list(range(nodes)),
    )
