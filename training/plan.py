"""The time and memory that a run will take, measured before it begins: `--dry-run`."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from training.acceptance import ROWS
from training.answers import AT_ONCE, AnswerSettings, answer_speed
from training.corpus import TrainingBatch
from training.eagle import layers_read
from training.run import ReadBatch, TrainingRun, open_drafter
from training.samples import SampleMaker, own_share
from training.split_model import ModuleLearner
from training.target import TargetStates
from training.texts import SourceText, read_texts
from training.trained_drafter import TrainedDrafter
from training.trainer import Trainer

TRIED_STEPS = 4
SEEN_PROMPTS = 128
"""Prompts whose lengths stand for all."""


@dataclass(frozen=True)
class Estimate:
    """The cost of a run, before it is begun."""

    target_parameters: int
    trained_parameters: int
    checkpoint_bytes: int
    steps: int
    tokens: int
    """Most of all steps together."""
    memory_bytes: int
    """Peak after some steps: of this process, or of its GPU."""
    answers: int
    """Answers that the target writes, those to measure on included."""
    answer_tokens_per_s: float
    answer_seconds: float
    """Seconds in which the target writes its answers, none of which ends before its last token."""
    training_seconds: float
    evaluation_seconds: float
    """Seconds for measuring on held-out answers on the way."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole run."""
        return self.answer_seconds + self.training_seconds + self.evaluation_seconds

    def summary(self, rows: int) -> str:
        """In a sentence; a step has `rows` rows."""
        length = self.tokens // self.steps // rows
        return (
            f"{self.trained_parameters / 1e6:.1f} M parameters for a target of {self.target_parameters / 1e6:.1f} M: "
            f"about {self.seconds / 60:.0f} minutes, of them {self.answer_seconds / 60:.0f} for up to {self.answers:,} "
            f"answers of the target ({self.answer_tokens_per_s:,.0f} tokens/s), {self.training_seconds / 60:.0f} for "
            f"{self.steps:,} steps of {rows} x {length} tokens and {self.evaluation_seconds / 60:.0f} for measuring; "
            f"{self.memory_bytes / 1e9:.1f} GB of memory, {self.checkpoint_bytes / 1e6:.0f} MB a checkpoint"
        )


class TrainingPlanner:
    """Measures parts of the run on made-up tokens of the data's lengths. Writes nothing."""

    def __init__(self, run: TrainingRun) -> None:
        self._run, self._request, self._target = run, run.request, run.target
        self._layers = layers_read(run.request, run.target)
        self._maker = SampleMaker(run.request, run.target, self._layers)

    def estimate(self) -> Estimate:
        request = self._request
        train, held_out = read_texts(request.data, request.held_out)
        written = len(self._maker.prompts(train, request.answers, request.seed))
        measured = len(self._maker.prompts(held_out, request.held_out_answers, request.seed))
        self._target.check_logits()
        prompt = self._prompt_length(train)
        speed = self._answer_speed(prompt)
        given = any(text.text and not (text.prompt and request.answers) for text in train)
        share = own_share(request, written) if given else 1.0
        answered = prompt + request.answer_tokens
        length = min(request.window, round(share * answered + (1.0 - share) * request.window))
        drafter = open_drafter(request, self._target, torch.ones(self._target.vocabulary, dtype=torch.int64))
        trainer, step_s = self._steps(drafter, length, round((1.0 - share) * request.rows))
        learned = sum(each.numel() for each in trainer.network.masters)
        steps = max(1, round(60.0 * request.minutes / step_s)) if request.minutes else request.steps
        measuring_s = self._measuring(drafter, answered) * math.ceil(measured / ROWS)
        most_s = 60.0 * request.answer_minutes or math.inf
        return Estimate(
            target_parameters=self._target.engine.model.parameters,
            trained_parameters=learned,
            checkpoint_bytes=4 * learned + trainer.optimiser.size(),
            steps=steps,
            tokens=steps * request.rows * length,
            memory_bytes=_peak_bytes(self._run.device),
            answers=written + measured,
            answer_tokens_per_s=speed,
            answer_seconds=min(most_s, written * request.answer_tokens / speed)
            + measured * request.answer_tokens / speed,
            training_seconds=step_s * steps,
            evaluation_seconds=measuring_s * (steps // request.evaluate_steps + 2),
        )

    def _prompt_length(self, texts: Sequence[SourceText]) -> int:
        """Mean of the first prompts'."""
        prompts = self._maker.prompts(texts[:SEEN_PROMPTS], SEEN_PROMPTS, self._request.seed)
        return max(1, round(sum(len(tokens) for tokens, _ in prompts) / max(1, len(prompts))))

    def _answer_speed(self, prompt: int) -> float:
        """Tokens of answers in a second: a full batch's, with its prompts read."""
        request = self._request
        at_once = min(request.answers_at_once or AT_ONCE[self._run.device.type], max(1, request.answers))
        settings = AnswerSettings(request.answer_tokens, 1.0, request.seed, self._layers, at_once)
        return answer_speed(self._target, prompt, settings)

    def _steps(self, drafter: TrainedDrafter, length: int, given: int) -> tuple[Trainer, float]:
        """Seconds of a step on rows of `length` tokens, `given` of which the target has to read."""
        request, target = self._request, self._target
        tokens = torch.arange(request.rows * length).reshape(request.rows, length) % target.vocabulary
        learned = torch.ones_like(tokens, dtype=torch.bool)
        texts = [row.tolist() for row in tokens[:given]]

        def batch(used: float, step: int) -> TrainingBatch:
            states = self._made_up(request.rows, length)
            if texts:
                target.read(texts, self._layers)
            return ReadBatch(tokens.to(target.device), learned.to(target.device), used, states)

        plan = replace(request, steps=TRIED_STEPS + 1, minutes=0.0)
        trainer = Trainer(plan, ModuleLearner(drafter.module), batch)
        loss_of = self._run.loss_of(drafter)
        seconds = [_seconds(lambda: trainer.step(loss_of)) for _ in range(TRIED_STEPS + 1)]
        return trainer, median(seconds[1:])

    @torch.no_grad()
    def _measuring(self, drafter: TrainedDrafter, length: int) -> float:
        """Seconds for the ranks of ROWS held-out answers."""
        tokens = torch.arange(ROWS * length, device=self._target.device).reshape(ROWS, length) % self._target.vocabulary
        batch = TrainingBatch(tokens, torch.ones_like(tokens, dtype=torch.bool))
        states = self._made_up(ROWS, length)
        with self._run.autocast():
            return min(_seconds(lambda: drafter.ranks(batch, states)) for _ in range(2))

    def _made_up(self, rows: int, length: int) -> TargetStates:
        target = self._target

        def random() -> torch.Tensor:
            return torch.randn(rows, length, target.output.shape[1], device=target.device).to(target.dtype)

        return TargetStates(random(), {layer: random() for layer in self._layers})


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
