"""One of two ranks of a real group, a process of its own: `python -m tests.two_ranks FOLDER...`, each a checkpoint.

It prints a line for each thing that it saw: what `tests/integration/test_two_ranks.py` compares.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import torch

from slipstream.engine.engine import begin_unshared
from slipstream.engine.models.quantisation import silence_quantiser_logs

silence_quantiser_logs()

from slipstream.engine.models.checkpoint import load_checkpoint  # noqa: E402
from slipstream.engine.models.spread import Spread  # noqa: E402
from slipstream.engine.segment import Segment  # noqa: E402
from slipstream.engine.tensor_parallel.group import LEADER, Group, GroupLost, Rank  # noqa: E402
from slipstream.engine.tensor_parallel.parallel import FollowingEngine, LeadingEngine  # noqa: E402
from slipstream.engine.torch_engine import TorchEngine  # noqa: E402
from slipstream.errors import FailedPrecondition  # noqa: E402
from tests.checkpoints import VOCABULARY  # noqa: E402

TOKENS = 2048
TREE = [-1, 0, -1, 2, 1]
PENDING = (3, 17, 250)
"""Tokens of the steps' segments; five such segments are more than one broadcast holds."""


class Room:
    """The group, which outlives one engine after the other."""

    def __init__(self, group: Group) -> None:
        self.send, self.receive = group.send, group.receive

    def leave(self) -> None:
        pass


def compare(whole: TorchEngine, cut: LeadingEngine) -> float:
    """The largest difference of a logit, over steps of five sessions with rows that move and a rollback."""
    source, worst = random.Random(1), 0.0
    pairs = [(begin_unshared(whole, 300), begin_unshared(cut, 300)) for _ in range(5)]
    for length in PENDING:
        tokens = [[source.randrange(1, VOCABULARY) for _ in range(length + len(TREE))] for _ in pairs]
        steps = [
            [Segment(pair[side], text[:length], text[length:], TREE) for pair, text in zip(pairs, tokens, strict=True)]
            for side in (0, 1)
        ]
        logits = whole.forward(steps[0]).logits, cut.forward(steps[1]).logits
        worst = max(worst, float((logits[0] - logits[1]).abs().max()))
        for engine, segments in zip((whole, cut), steps, strict=True):
            for segment in segments:
                engine.keep(segment, [2, 3])
                engine.rollback(segment.sequence, segment.sequence.length - 1)
    return worst


def lead(room: Room, folder: str) -> None:
    whole = TorchEngine(load_checkpoint(folder), TOKENS)
    cut = LeadingEngine(load_checkpoint(folder, spread=Spread(ranks=2)), TOKENS, room)
    kept = [sum(group.nbytes for group in engine._store._groups) for engine in (whole, cut)]
    same = whole.model == cut.model
    print(f"family {Path(folder).name} {compare(whole, cut)} {same} {kept[0] / kept[1]}", flush=True)
    cut.end()


def differ(group: Group, place: Rank) -> None:
    group.agree(model="one", tokens=5)  # they do not
    try:
        group.agree(model="one", tokens=place.rank)
    except FailedPrecondition as error:
        print(f"differ {error.reason} {error.message}", flush=True)


def wait_in_vain(engine: FollowingEngine, group: Group) -> None:
    """For a leader that lives and does nothing: in the model's collectives, and for a message."""
    try:
        engine._run_pass([Segment(begin_unshared(engine, 8), [1])])
    except RuntimeError as error:
        print(f"pass {error}", flush=True)
    try:
        group.receive()
    except GroupLost as error:
        print(f"message {error}", flush=True)


def main(folders: list[str]) -> None:
    place = Rank.from_environment()
    group = Group.join(place, 60.0)
    engine: FollowingEngine | None = None
    for folder in folders:
        if place.rank == LEADER:
            lead(Room(group), folder)
        else:
            engine = FollowingEngine(load_checkpoint(folder, spread=Spread(ranks=2)), TOKENS, Room(group))
            engine.follow()
    differ(group, place)
    group.bound(1.0)
    if engine is None:
        sys.stdin.read()
    else:
        wait_in_vain(engine, group)
    os._exit(0)  # a broken group is not left in peace


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
