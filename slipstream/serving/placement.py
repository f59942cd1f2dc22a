"""Placement of the roles on one machine: methods that draft in the verifier's process, and threads of its model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from slipstream.proposers.registry import METHODS
from slipstream.serving.options import EMBEDDED

FEW_CORES = 2


class Placement(NamedTuple):
    """Placement of the roles on one machine."""

    in_verifier: tuple[str, ...]
    """Methods that draft in the verifier's process."""
    threads: int
    """Threads of the verifier's model."""


def place(
    cores: int,
    methods: Sequence[str],
    draft_in_verifier: bool | None,
    threads: int,
    own_cores: bool,
    own_process: Collection[str] = (),
) -> Placement:
    """Chooses the user's placement, and where it is None or 0 the best one measured. `own_cores`: the target computes
    on these cores, not on a GPU nor in vLLM's workers. `own_process`: methods that draft in a process of their own
    whatever the user asked for.

    A lookup takes microseconds, less than a message to another process. On few cores a draft model's process takes the
    time of the verifier's threads, and its round trips wait for them. Elsewhere a core is left to it: more busy threads
    than cores slow every step down."""
    inside = draft_in_verifier
    if inside is None:
        inside = own_cores and cores <= FEW_CORES
    lookups = draft_in_verifier is not False
    placed = tuple(
        kind
        for kind in methods
        if kind not in own_process
        and (inside or METHODS[kind].in_verifier_only or (lookups and not METHODS[kind].needs_model))
    )
    apart = len(placed) < len(methods)
    return Placement(placed, threads or max(1, cores - apart))


def computes_on_own_cores(engine: str) -> bool:
    """True unless a GPU or vLLM's workers compute the target."""
    return engine == EMBEDDED and not any(Path("/dev").glob("nvidia[0-9]*"))
