"""Checkpoints that an earlier start found equal to what `slipstream.engine.models.lean_files` reads.

What that start found is kept under everything that decides it, like the trial that its forward pass passed
(`slipstream.engine.models.passed_trials`), with which it stands or falls.
"""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from slipstream.engine.kvcache.store import AttentionLayer
from slipstream.engine.model_info import ModelInfo
from slipstream.engine.models.description import describe
from slipstream.engine.models.lean_files import LeanParts, NotPlain, equal_parts, read_parts
from slipstream.engine.models.passed_trials import keep_report, report_of, trial_question
from slipstream.tokenizer.vocabulary import is_local, source_and_revision, tokenizer_file

log = logging.getLogger(__name__)


class KnownFiles:
    """The files of one checkpoint, on the CPU and in one type."""

    def __init__(self, name: str, revision: str, config: Any, dtype: torch.dtype) -> None:
        """`revision`: of the weights, by content."""
        source, _ = source_and_revision(name)
        self._folder = Path(source) if is_local(name) else tokenizer_file(name, "config.json").parent
        self._config, self._dtype = config, dtype
        generation = None
        with contextlib.suppress(OSError):  # many checkpoints have no file of it
            generation = GenerationConfig.from_pretrained(self._folder)
        precision = str(dtype).removeprefix("torch.")
        self._info = replace(describe(name, revision, config, generation, config.vocab_size, 0), dtype=precision)
        self._question = "files " + trial_question(self._info, torch.device("cpu"), lean=True)

    def read(self) -> tuple[LeanParts, ModelInfo] | None:
        """The checkpoint, if an earlier start found it equal."""
        try:
            windows = json.loads(report_of(self._question))
        except ValueError:
            return None
        if not isinstance(windows, list) or not all(window is None or type(window) is int for window in windows):
            return None
        try:
            parts = self._parts(windows)
        except NotPlain:
            return None
        return parts, self._described(parts)

    def equals(self, model: Any, layers: list[AttentionLayer], info: ModelInfo) -> bool:
        """True if reading gives the library's model, which has these attention layers and this description."""
        try:
            parts = self._parts([layer.window for layer in layers])
        except NotPlain as problem:
            log.info("%s: each start needs the library's code: %s", info.name, problem)
            return False
        return self._described(parts) == info and equal_parts(parts, model, layers)

    def keep(self, layers: list[AttentionLayer]) -> None:
        """Later starts read these files."""
        keep_report(self._question, json.dumps([layer.window for layer in layers]))

    def _parts(self, windows: list[int | None]) -> LeanParts:
        return read_parts(self._folder, self._config, self._dtype, windows)

    def _described(self, parts: LeanParts) -> ModelInfo:
        return replace(self._info, parameters=parts.parameters)
