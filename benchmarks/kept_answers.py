"""A target's texts and hidden states that a run of `slipstream train` kept in its workplace: no target computes.

Greedy answers are those that the run measured on, which its head has not seen; sampled ones at temperature 1 are those
that it learned from. The files are only read.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from benchmarks.equality_steps import Text
from slipstream.engine.engine import HiddenStates
from training.answer_store import FINISHED, StoredAnswer
from training.samples import HELD_OUT, TRAIN

GREEDY, SAMPLED = "greedy", "T = 1"
PARTS = {HELD_OUT: GREEDY, TRAIN: SAMPLED}


class KeptAnswers:
    def __init__(self, workplace: Path, count: int) -> None:
        """The first `count` answers of each kind that have more than a token."""
        header, *lines = (json.loads(line) for line in (workplace / "answers.jsonl").read_text("utf-8").splitlines())
        self._states, self._columns = workplace / "states.bin", int(header["columns"])
        answers = [StoredAnswer(*each) for each in lines if each[0] != FINISHED]
        kept = [
            each
            for part in PARTS
            for each in [one for one in answers if one.part == part and len(one.tokens) > one.first + 1][:count]
        ]
        self._rows = {number: (each.row, each.end) for number, each in enumerate(kept)}
        self.texts = [
            Text(PARTS[each.part], each.tokens[: each.first], seed, plain=each.tokens[each.first :])
            for seed, each in enumerate(kept)
        ]

    def states(self, text: Text, layers: tuple[int, ...]) -> HiddenStates:
        """bfloat16 rows of all tokens but the last, for the layers that the run kept."""
        first, end = self._rows[text.seed]
        shape = (self._states.stat().st_size // (2 * self._columns), self._columns)
        rows = torch.from_numpy(np.memmap(self._states, np.int16, "r", shape=shape)[first:end].copy())
        last, *others = rows.view(torch.bfloat16).chunk(1 + len(layers), dim=-1)
        return HiddenStates(last, dict(zip(layers, others, strict=True)))
