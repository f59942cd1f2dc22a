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
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch

from slipstream.engine.attention.packed import NAME
from slipstream.engine.forward import Forward
from slipstream.engine.kvcache.store import AttentionLayer
from slipstream.engine.model_info import ModelInfo
from slipstream.engine.models.attention_layers import probe_layers
from slipstream.engine.models.excerpt import Excerpt, UnknownFormat, is_quantised
from slipstream.engine.models.lean_decoder import LeanDecoder
from slipstream.engine.models.library_forward import LibraryForward
from slipstream.engine.models.older_attention import attention_is_older, knows_positions_by_order
from slipstream.engine.models.passed_trials import keep_report, report_of, trial_question
from slipstream.engine.models.rehearsal import LONGEST_NEAR, Played, Player, Rehearsal, play, recite
from slipstream.errors import FailedPrecondition

log = logging.getLogger(__name__)

SEEDS = (20260, 20261)
"""Seeds of rehearsals. A pass is another function if it differs in both: a router's near-tie may fall either way in
one."""
TYPICAL, WORST = 1e-4, 3e-3
"""Float32 distances of the median row and of the worst row, below which two passes are one function. Another function
is off by 0.01 to 1; real models of 30 layers by 1e-5, a row with large activations by 4e-4."""
TIMES = 3.0
FLOORS = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.003}
"""A pass may lose TIMES as much as the library's, and this, five of the type's units."""
SHARES = (0.5, 0.75)
"""Shares of rows, from the best one, whose quantiles are compared. The worst ones are a matter of chance: a model that
the project was tried on loses 3 times its own spread at one token in the library's bf16, and not at others."""
LOOSE = 0.5
"""Distance of the median row below which two passes in one type pass for one function where there is no reference:
of weights in a format that is not unpacked here."""


class Tried(NamedTuple):
    """The forward pass that is to serve."""

    forward: Forward
    notice: str = ""
    """Why a lean pass that could be had is left out, and what that costs, for people; empty if it is not."""


SLOWER = "Passes take longer on a CPU"
UNPROMISED = ", and the same tokens with speculation and without it are not promised (docs/exactness.md)"


def distances(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Each row's distance [R] as a share of how far its numbers lie from their mean; [R, N] each."""
    spread = (expected - expected.mean(dim=1, keepdim=True)).norm(dim=1)
    off: torch.Tensor = (found - expected).norm(dim=1) / spread
    return off


def same_function(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if float32 rows differ by rounding alone; NaN equals nothing."""
    off = distances(found, expected)
    return bool(off.median() < TYPICAL) and bool((off < WORST).all())


def try_forward(
    model: Any, layers: list[AttentionLayer], info: ModelInfo, device: torch.device, *, lean: bool
) -> Tried:
    """The lean pass, which has taken the model's weights, if the model fits it (`lean`) and it is the same function;
    else the library's. Raises FailedPrecondition for a model that packed attention makes another function of."""
    if info.max_length < LONGEST_NEAR:
        log.warning("%s: %d positions are too few to try a forward pass in", info.name, info.max_length)
        return Tried(LibraryForward(model))
    question = trial_question(info, device, lean=lean)
    if report := report_of(question):
        log.info("%s: the forward pass was tried at an earlier start: %s", info.name, report)
        return Tried(lean_decoder(model, layers) if lean else LibraryForward(model))
    began = time.monotonic()
    trial = _Trial(model, layers, info, device)
    notice = trial.problem(lean=True) if lean else ""
    if notice or not lean:
        problem = trial.problem(lean=False)
        if problem:
            raise FailedPrecondition(
                f"{info.name} ({model.config.model_type}) cannot be served: {problem} from the library's eager "
                "attention. Choose a decoder of full and sliding attention.",
                reason="MODEL_UNSUPPORTED",
            )
    log.info("%s: the forward pass was tried in %.2f s: %s", info.name, time.monotonic() - began, trial.report)
    if not notice:
        keep_report(question, trial.report)
        return Tried(trial.passed or (lean_decoder(model, layers) if lean else LibraryForward(model)))
    forward = trial.passed or LibraryForward(model)
    cost = SLOWER + (UNPROMISED if forward.uneven else "")
    notice = f"its fast forward pass is left out, because {notice} from the library's. {cost}."
    log.warning("%s: %s", info.name, notice)
    return Tried(forward, notice)


def lean_decoder(model: Any, layers: list[AttentionLayer]) -> LeanDecoder:
    """It takes the model's weights."""
    windows = {layer.index: layer.window for layer in layers}
    return LeanDecoder(model, [windows[index] for index in range(len(layers))])


class _Trial:
    def __init__(self, model: Any, layers: list[AttentionLayer], info: ModelInfo, device: torch.device) -> None:
        self._info, self._device = info, device
        self._excerpt = Excerpt(model)
        self._dtype = layers[0].dtype
        self._by_order = knows_positions_by_order(model)
        self._changed = self._dtype is not torch.float32 or any(map(is_quantised, model.modules()))
        """Whether the model that serves differs from its float32 reference."""
        self._expected: dict[int, Played] = {}
        self.report = f"{self._excerpt.depth} layers"
        self.passed: Forward | None = None
        """A pass that was tried and is all of the model: it may serve."""

    def problem(self, *, lean: bool) -> str:
        """In which type, from which layer on and by how much the pass differs, as the middle of a sentence; empty if
        it does not in one rehearsal at least."""
        asked = [self._another_function, *([self._loses_more] if self._changed else [])]
        found = ""
        for ask in asked:
            for seed in SEEDS:
                try:
                    found = ask(seed, lean)
                except UnknownFormat:
                    return self._far_apart()
                if not found:
                    break
            if found:
                break
        return found

    def _another_function(self, seed: int, lean: bool) -> str:
        """Asked in float32."""
        model, rehearsal = self._excerpt.copy(floats=True), self._rehearsal(seed)
        expected = self._reference(seed, model)
        player = self._player(model, lean)
        played = (play(each, rehearsal) for each in self._players(player))
        found = next(filter(None, (_difference(each, expected) for each in played)), "")
        if not found and not self._changed:
            self._may_serve(player)
        return found

    def _reference(self, seed: int, model: Any = None) -> Played:
        """By the library in float32; `model`: a copy in float32 that is there already."""
        if seed not in self._expected:
            model = self._excerpt.copy(floats=True) if model is None else model
            self._expected[seed] = _by_library(model, self._rehearsal(seed), self._device)
        return self._expected[seed]

    def _may_serve(self, player: Player) -> None:
        if self._excerpt.is_the_model:
            if isinstance(player.forward, LeanDecoder):
                player.forward.detach()
            self.passed = player.forward

    def _players(self, player: Player) -> list[Player]:
        """Ways in which the pass may be played: each is other code."""
        if player.forward.path == "kernels":
            return [player, replace(player, in_one_call=False)]
        # Attention of draft models need not be batch-invariant. In narrow types none is.
        return [player, *([replace(player, batch_invariant=False)] if self._dtype is torch.float32 else [])]

    def _loses_more(self, seed: int, lean: bool) -> str:
        """Asked in the type that serves, beside the library."""
        rehearsal, name = self._rehearsal(seed), self._info.dtype
        rows, groups = rehearsal.on_one_path, rehearsal.groups
        exact = self._reference(seed).logits[rows]
        model = self._excerpt.copy(floats=False)
        theirs = distances(_by_library(model, rehearsal, self._device, branches=False).logits, exact)
        player = self._player(model, lean)
        ours = distances(play(player, rehearsal).logits[rows], exact)
        path = "the lean pass" if lean else "packed attention"
        lost_by = f"{ours.median():.2g} of a row's spread in {path}, {theirs.median():.2g} in the library"
        self.report += f"; {name} loses {lost_by}"
        for group, share in product(groups, SHARES):
            some = [place for place, row in enumerate(rows) if row in groups[group]]
            lost = float(ours[some].quantile(share))
            most = TIMES * float(theirs[some].quantile(share)) + FLOORS.get(self._dtype, 0.0)
            if not lost <= most:
                return f"in {name} it loses {lost:.2g} of a row's spread at {group}, more than {most:.2g},"
        self._may_serve(player)
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
        return Rehearsal(size, self._info.max_length, seed, by_order=self._by_order)

    def _player(self, model: Any, lean: bool) -> Player:
        """Takes the model's weights if `lean`."""
        _use_attention(model, NAME)
        layers = probe_layers(model, self._device)
        forward = lean_decoder(model, layers) if lean else LibraryForward(model)
        return Player(forward, layers, self._device)


def _by_library(model: Any, rehearsal: Rehearsal, device: torch.device, *, branches: bool = True) -> Played:
    """Raises FailedPrecondition for a model that the library itself cannot compute."""
    _use_attention(model, "eager")
    try:
        return recite(model, rehearsal, device, branches=branches)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise FailedPrecondition(
            f"{model.config.model_type} cannot be served: the library's eager pass fails ({error}). Check config.json.",
            reason="MODEL_UNSUPPORTED",
        ) from error


def _use_attention(model: Any, name: str) -> None:
    if not attention_is_older(model):
        model.set_attn_implementation(name)


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
