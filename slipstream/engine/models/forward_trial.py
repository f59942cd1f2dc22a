"""The trial of a forward pass before it serves: is it the library's function, and what does its type lose?

Whether two passes are one function is a question for float32, where they are 1e-5 apart or 1: in bf16 a model of 28
layers is further from itself in float32 than from another function. So an excerpt of the model (`excerpt`) answers a
rehearsal (`rehearsal`) in float32, by the library's eager attention and by the pass that is to serve. A library model
that packed attention makes another function of is refused; a lean pass that is another function is left out.

What the type loses is asked beside the library's own loss: the distances of both, each in the type that serves, from
the float32 reference. A pass that loses several times as much has a fault that only this type shows.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from slipstream.engine.attention.packed import NAME
from slipstream.engine.model_info import ModelInfo
from slipstream.engine.models.attention_layers import probe_layers
from slipstream.engine.models.excerpt import Excerpt, UnknownFormat, is_quantised
from slipstream.engine.models.forward import Forward, LibraryForward
from slipstream.engine.models.lean_decoder import LeanDecoder
from slipstream.engine.models.rehearsal import LONGEST_NEAR, Played, Player, Rehearsal, play, recite
from slipstream.errors import FailedPrecondition

log = logging.getLogger(__name__)

SEEDS = (20260, 20261)
"""Of rehearsals. A pass is another function if it differs in both: a router's near-tie may fall either way in one."""
TYPICAL, WORST = 1e-4, 3e-3
"""Float32 distances of the median row and of the worst row, below which two passes are one function. Another function
is off by 0.01 to 1; real models of 30 layers by 1e-5, a row with large activations by 4e-4."""
TIMES = 3.0
FLOORS = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.003}
"""A pass may lose TIMES as much as the library's, and this, five of the type's units."""
LOOSE = 0.5
"""Distance of the median row below which two passes in one type pass for one function where there is no reference:
of weights in a format that is not unpacked here."""


@dataclass(frozen=True)
class Verdict:
    """A model that may serve."""

    lean: bool
    """The lean pass may."""
    notice: str = ""
    """Why a lean pass that could be had is left out, for people; empty if it is not."""


def distances(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Each row's distance [R] as a share of how far its numbers lie from their mean; [R, N] each."""
    spread = (expected - expected.mean(dim=1, keepdim=True)).norm(dim=1)
    off: torch.Tensor = (found - expected).norm(dim=1) / spread
    return off


def same_function(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if float32 rows differ by rounding alone; NaN equals nothing."""
    off = distances(found, expected)
    return bool(off.median() < TYPICAL) and bool((off < WORST).all())


def judge(model: Any, info: ModelInfo, device: torch.device, *, lean: bool) -> Verdict:
    """`lean`: the model fits the lean pass. It is left as it is. Raises FailedPrecondition for a model that packed
    attention makes another function of."""
    if info.max_length < LONGEST_NEAR:
        log.warning("%s: %d positions are too few for a trial of its forward pass", info.name, info.max_length)
        return Verdict(lean)
    began = time.monotonic()
    trial = _Trial(model, info, device)
    notice = ""
    if lean:
        notice = trial.problem(lean=True)
    if notice or not lean:
        problem = trial.problem(lean=False)
        if problem:
            raise FailedPrecondition(
                f"{info.name} ({model.config.model_type}) cannot be served: {problem} from the library's eager "
                "attention. Choose a decoder of full and sliding attention.",
                reason="MODEL_UNSUPPORTED",
            )
    log.info("%s: the forward pass was tried in %.2f s: %s", info.name, time.monotonic() - began, trial.report)
    if notice:
        notice = f"the lean forward pass differs from the library's and is left out: {notice}"
        log.warning("%s: %s", info.name, notice)
    return Verdict(lean and not notice, notice)


class _Trial:
    def __init__(self, model: Any, info: ModelInfo, device: torch.device) -> None:
        self._info, self._device = info, device
        self._excerpt = Excerpt(model)
        types = [each.dtype for each in model.parameters() if each.is_floating_point()]
        self._dtype = types[0] if types else torch.float32
        self._changed = self._dtype is not torch.float32 or any(map(is_quantised, model.modules()))
        """Whether the model that serves differs from its float32 reference."""
        self._expected: dict[int, Played] = {}
        self.report = f"{self._excerpt.depth} layers"

    def problem(self, *, lean: bool) -> str:
        """In which type, from which layer on and by how much the pass differs, as the middle of a sentence; empty if
        it does not."""
        try:
            found = self._another_function(lean)
            return found or (self._loses_more(lean) if self._changed else "")
        except UnknownFormat:
            return self._far_apart()

    def _another_function(self, lean: bool) -> str:
        """Asked in float32."""
        found = ""
        for seed in SEEDS:
            model, rehearsal = self._excerpt.copy(floats=True), self._rehearsal(seed)
            if seed not in self._expected:
                self._expected[seed] = _by_library(model, rehearsal, self._device)
            expected = self._expected[seed]
            for invariant in (True, False):
                found = _difference(play(self._player(model, lean), rehearsal, batch_invariant=invariant), expected)
                if found or lean or self._dtype is not torch.float32:
                    break
            if not found:
                break
        return found

    def _loses_more(self, lean: bool) -> str:
        """Asked in the type that serves, beside the library."""
        model, rehearsal = self._excerpt.copy(floats=False), self._rehearsal(SEEDS[0])
        by_library = _by_library(model, rehearsal, self._device)
        found = play(self._player(model, lean), rehearsal)
        exact = self._expected[SEEDS[0]].logits
        off, theirs = distances(found.logits, exact), distances(by_library.logits, exact)
        name = self._info.dtype
        path = "lean" if lean else "packed"
        figures = f"{name} loses {off.median():.2g} of a row's spread ({path}), the library's own {theirs.median():.2g}"
        self.report += f"; {figures}"
        for group, rows in rehearsal.groups.items():
            most = TIMES * theirs[rows].median() + FLOORS.get(self._dtype, 0.0)
            if not off[rows].median() <= most:
                return (
                    f"in {name} it is {off[rows].median():.2g} of a row's spread away at {group}, more than {most:.2g}"
                )
        return ""

    def _far_apart(self) -> str:
        """Without a reference, in the type that serves."""
        model, rehearsal = self._excerpt.copy(floats=False), self._rehearsal(SEEDS[0])
        expected = _by_library(model, rehearsal, self._device)
        off = distances(play(self._player(model, lean=False), rehearsal).logits, expected.logits).median()
        self.report += f"; {self._info.dtype} without a reference: {off:.2g} of a row's spread between both"
        return "" if off < LOOSE else f"in {self._info.dtype} it is {off:.2g} of a row's spread away"

    def _rehearsal(self, seed: int) -> Rehearsal:
        size = self._excerpt.vocabulary_size
        return Rehearsal(size, self._info.max_length, seed)

    def _player(self, model: Any, lean: bool) -> Player:
        """Takes the model's weights if `lean`."""
        model.set_attn_implementation(NAME)
        layers = probe_layers(model, self._device)
        windows = {layer.index: layer.window for layer in layers}
        ours: Forward = LibraryForward(model)
        if lean:
            ours = LeanDecoder(model, [windows[index] for index in range(len(layers))])
        info = replace(self._info, vocabulary_size=self._excerpt.vocabulary_size)
        return Player(ours, layers, info, self._device)


def _by_library(model: Any, rehearsal: Rehearsal, device: torch.device) -> Played:
    model.set_attn_implementation("eager")
    return recite(model, rehearsal, device)


def _difference(found: Played, expected: Played) -> str:
    if same_function(found.logits, expected.logits):
        return ""
    where = "behind the last layer"
    for number, (ours, theirs) in enumerate(zip(found.states, expected.states, strict=False)):
        if not same_function(ours, theirs):
            where = f"from layer {number} on"
            break
    worst = float(distances(found.logits, expected.logits).max())
    return f"in float32 it differs {where}, by up to {worst:.2g} of a row's spread,"
