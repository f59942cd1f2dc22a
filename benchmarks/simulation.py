"""How many tokens a target pass gives in an ideal system: a simulation from the models' own logits.

usage: python -m benchmarks.simulation [--prompts N] [--tokens M] [--target FOLDER] [--draft FOLDER]

In every round exactly n candidates are verified: the n best that the drafters would have found with unlimited time on
the true prefix, by the system's own choice. No network, and nothing ever comes late: what the live system gives at the
same n lies below by what latency costs it. Prompts by the rule of `benchmarks.prompts`, fp32. Texts, trees, choice and
acceptance come from the system's own code; `simulation_texts`, `_trees` and `_choice` explain how.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable

import torch

from benchmarks.processes import MODELS
from benchmarks.simulation_choice import (
    MOST,
    Chooser,
    Forest,
    Kept,
    Yield,
    accepted,
    calibrated,
    claimed,
    kept,
    ranked,
    sharpened,
    tokens_per_pass,
)
from benchmarks.simulation_report import Belief, Report, Row
from benchmarks.simulation_texts import Text, Walk, natural, sampled
from benchmarks.simulation_trees import Grown, grow
from drafter_svc.config import DrafterConfig
from slipstream.engine.factory import open_engine
from slipstream.errors import Internal
from slipstream.proposers.base import Proposer, open_proposer
from slipstream.proposers.draft_model import ModelProposer
from slipstream.proposers.expansion import FEWEST
from slipstream.speculation.selection import ROOT

TEMPERATURES = (0.0, 0.7, 1.0)
SIZES = (0, 4, 8, 16, 32)
WIDTH = 8
"""Guesses below a node; narrower trees are parts of these."""
ENOUGH = 2 * MOST
"""Nodes that every tree is grown to: other scores and narrower trees reach deeper than the plain choice."""
TAUGHT = 16
"""Candidates verified in the rounds that calibration learns from, and in those whose confidence is reported."""
DEFAULTS = DrafterConfig(method="suffix")
MIXTURES = (
    ("model",),
    ("suffix",),
    ("model", "suffix"),
)
CALIBRATED = (
    (("model",), False),
    (("model", "suffix"), False),
    (("model", "suffix"), True),
)
"""Drafters, and whether nodes are calibrated by drafter."""


class Simulation:
    """The texts, what the drafters guess in them, and the rows of the tables."""

    def __init__(self, target: str, draft: str, prompts: int, tokens: int) -> None:
        self.engine = open_engine(target, "float32")
        greedy = natural(self.engine, target, prompts, tokens)
        self.texts = {t: sampled(self.engine, greedy, t) if t else greedy for t in TEMPERATURES}
        everything = [text for texts in self.texts.values() for text in texts]
        trees = {name: grow(proposer, everything, ENOUGH, FEWEST) for name, proposer in _proposers(draft).items()}
        self.forest = Forest(trees)

    def row(self, temperature: float, choose: Chooser) -> list[Yield]:
        return tokens_per_pass(self.texts[temperature], choose, SIZES)

    def mixtures(self) -> Iterable[Row]:
        """The yardstick: what each set of drafters gives."""
        for temperature in TEMPERATURES:
            yield Row("model, a chain", temperature, self.row(temperature, self.forest.chooser(["chain"], claimed)))
            for drafters in MIXTURES:
                row = self.row(temperature, self.forest.chooser(drafters, claimed))
                yield Row(" + ".join(drafters), temperature, row)

    def choices(self) -> Iterable[Row]:
        """Candidates of all drafters, selected by other scores."""
        scorings = {"as claimed": claimed, "by rank": ranked} | {
            f"to the power {p}": sharpened(p) for p in (1.2, 1.5, 2)
        }
        for temperature, texts in self.texts.items():
            for name, scoring in scorings.items():
                row = self.row(temperature, self.forest.chooser(["model"], scoring))
                yield Row(f"model, {name}", temperature, row)
            for drafters, merged in CALIBRATED:
                choose = calibrated(self.forest, drafters, texts, merged, TAUGHT)
                name = " + ".join(drafters) + ", calibrated " + ("by who sent it" if merged else "all alike")
                yield Row(name, temperature, self.row(temperature, choose))

    def settings(self) -> Iterable[Row]:
        """The model drafter's own settings."""
        limits = {f"width {width}": kept(_narrow(width)) for width in (1, 2, 3, 4, 6, 8)}
        limits |= {f"min_path_probability {least}": kept(_likely(least)) for least in (0.005, 0.02, 0.05)}
        limits |= {f"after {p} drafting passes of {FEWEST} nodes": kept(_early(p)) for p in (1, 2, 3, 4, 6, 8)}
        for temperature in TEMPERATURES:
            for name, scoring in limits.items():
                yield Row(name, temperature, self.row(temperature, self.forest.chooser(["model"], scoring)))

    def belief(self) -> Iterable[Belief]:
        """What became of the model's guesses, `TAUGHT` nodes a round."""
        choose = self.forest.chooser(["model"], claimed)
        for temperature, texts in self.texts.items():
            seen: dict[tuple[int, bool], list[tuple[float, bool]]] = {}
            for text in texts:
                _observe(text, choose, seen)
            for (depth, first), seen_there in sorted(seen.items()):
                count = len(seen_there)
                confidence, right = sum(c for c, _ in seen_there) / count, sum(r for _, r in seen_there) / count
                yield Belief(temperature, depth, first, count, confidence, right)

    def check(self, temperature: float) -> int:
        """How many texts the real target writes with these candidates; raises Internal unless it is all of them."""
        choose = self.forest.chooser(["model", "suffix"], claimed)
        for text in self.texts[temperature]:
            end = text.rounds.stop
            prompt = text.tokens[: text.prompt_length]
            with Walk(self.engine, [prompt], [text.sampling], len(text.rounds) + 2 * MOST) as walk:
                while len(walk.tokens[0]) < end:
                    walk.round([choose(text, len(walk.tokens[0]) - text.prompt_length).head(TAUGHT)])
            if walk.tokens[0][:end] != text.tokens[:end]:
                raise Internal(f"prompt {text.prompt}: the target writes another text when it verifies candidates.")
        return len(self.texts[temperature])


def _proposers(draft: str) -> dict[str, Proposer]:
    proposers: dict[str, Proposer] = {}
    engine = open_engine(draft, "float32")
    for name, width in (("model", WIDTH), ("chain", 1)):
        proposers[name] = ModelProposer(engine, width=width, proposal_tokens=1)
    proposers["suffix"] = open_proposer("suffix", DEFAULTS.proposer_settings()).proposer
    return proposers


def _narrow(width: int) -> Kept:
    return lambda tree, index, path: tree.ranks[index] < width


def _early(passes: int) -> Kept:
    return lambda tree, index, path: tree.passes[index] <= passes


def _likely(least: float) -> Kept:
    """What a drafter adds under min_path_probability: likely paths, and the first guess below each likely node."""

    def allowed(tree: Grown, index: int, path: float) -> bool:
        above = path / math.exp(tree.log_probs[index])
        return path >= least or (above >= least and tree.ranks[index] == 0)

    return allowed


def _observe(text: Text, choose: Chooser, seen: dict[tuple[int, bool], list[tuple[float, bool]]]) -> None:
    position = 0
    while position < len(text.rounds):
        chosen = choose(text, position).head(TAUGHT)
        path = accepted(text, position, chosen)
        for node, parent in enumerate(chosen.parents):
            if parent == ROOT or parent in path:
                kind = min(chosen.depths[node], 5), chosen.first_child(parent) == node
                seen.setdefault(kind, []).append((math.exp(chosen.log_probs[node]), node in path))
        position += len(path) + 1


def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    simulation = Simulation(arguments.target, arguments.draft, arguments.prompts, arguments.tokens)
    report = Report(
        SIZES,
        sum(simulation.check(temperature) for temperature in TEMPERATURES),
        {
            "Drafters": list(simulation.mixtures()),
            "Scores by which candidates are chosen": list(simulation.choices()),
            "Settings of the model drafter": list(simulation.settings()),
        },
        list(simulation.belief()),
    )
    report.write(arguments.prompts, arguments.tokens)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--target", default=str(MODELS / "target"))
    parser.add_argument("--draft", default=str(MODELS / "draft"))
    return parser.parse_args()


if __name__ == "__main__":
    main(_arguments())
