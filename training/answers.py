"""The target's own answers, written in batches by its engine together with the hidden states that heads learn from.

Sessions share every pass: as one answer ends the next prompt takes its place, so the batch stays full. The states of
each token come from the very pass that computed it; no second pass over the answers is needed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from slipstream.engine.engine import Engine, HiddenRequest, HiddenStates
from slipstream.engine.segment import Segment
from training.target import MOST_ROWS, Target

AT_ONCE = {"cpu": 32, "cuda": 256}
"""Answers that are written at once, by the kind of the target's device."""


TRIED_PASSES = 5


@dataclass(frozen=True)
class TargetAnswer:
    index: int
    """The prompt's index."""
    tokens: list[int]
    """Up to the most that were asked for, with the token that ends the text."""
    states: Tensor
    """bfloat16 [prompt + answer - 1, (1 + layers) * hidden]: the last state, then those of the layers, of all tokens
    but the last one, which no pass computed."""


@dataclass(frozen=True)
class AnswerSettings:
    length: int
    """Most tokens of an answer."""
    temperature: float
    """0: greedy."""
    seed: int
    layers: tuple[int, ...] = ()
    """The target's layers whose states are kept beside the last one."""
    at_once: int = 0
    """Answers that are written at once; 0: AT_ONCE."""


@dataclass
class _Open:
    index: int
    segment: Segment
    answer: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)


@torch.inference_mode()
def write_answers(
    target: Target, prompts: Sequence[Sequence[int]], settings: AnswerSettings
) -> Generator[TargetAnswer]:
    """An answer to each prompt, as they end, in any order."""
    engine, request = target.engine, HiddenRequest(settings.layers)
    at_once, length = settings.at_once or AT_ONCE[target.device.type], settings.length
    noise = torch.Generator(target.device).manual_seed(settings.seed)
    waiting, writing = deque(enumerate(prompts)), list[_Open]()
    try:
        while waiting or writing:
            _begin(engine, waiting, writing, at_once, length)
            output = engine.forward([each.segment for each in writing], request)
            assert output.hidden is not None
            chosen, begin, going = _choose(output.logits, settings.temperature, noise), 0, list[_Open]()
            rows = _side_by_side(output.hidden, settings.layers)
            ended: list[_Open] = []
            for each, token in zip(writing, chosen, strict=True):
                engine.kv.keep(each.segment, [])
                each.states.append(rows[begin : begin + each.segment.tokens].clone())
                begin += each.segment.tokens
                each.answer.append(token)
                over = token in target.end or len(each.answer) == length
                (ended if over else going).append(each)
                each.segment = Segment(each.segment.sequence, [token])
            writing = going
            for each in ended:
                engine.kv.close(each.segment.sequence)
            for each in ended:
                yield TargetAnswer(each.index, each.answer, torch.cat(each.states))
    finally:
        for each in writing:
            engine.kv.close(each.segment.sequence)


@torch.inference_mode()
def answer_speed(target: Target, prompt: int, settings: AnswerSettings) -> float:
    """Tokens of answers in a second where all answers have their full length, from some passes of a full batch in the
    middle of its answers and one over prompts of `prompt` tokens."""
    engine, request = target.engine, HiddenRequest(settings.layers)
    at_once, middle = settings.at_once or AT_ONCE[target.device.type], prompt + settings.length // 2
    noise = torch.Generator(target.device).manual_seed(settings.seed)
    token = 7 % target.vocabulary
    sequences = [engine.kv.begin_unshared(middle + 1) for _ in range(at_once)]

    def seconds(segments: list[Segment]) -> float:
        began = time.perf_counter()
        output = engine.forward(segments, request)
        assert output.hidden is not None
        _choose(output.logits, settings.temperature, noise)
        _side_by_side(output.hidden, settings.layers)
        return time.perf_counter() - began

    try:
        some = [Segment(each, [token] * prompt) for each in sequences[: max(1, min(at_once, MOST_ROWS // prompt))]]
        seconds(some)  # the first pass lays out what later ones use
        reading_s = seconds(some) / len(some)
        step = max(1, MOST_ROWS // middle)
        for begin in range(0, at_once, step):
            segments = [Segment(each, [token] * middle) for each in sequences[begin : begin + step]]
            engine.forward(segments)
            for segment in segments:
                engine.kv.keep(segment, [])
        writing = [Segment(each, [token]) for each in sequences]
        writing_s = median(seconds(writing) for _ in range(TRIED_PASSES)) / at_once
    finally:
        for each in sequences:
            engine.kv.close(each)
    return settings.length / (reading_s + settings.length * writing_s)


def _begin(
    engine: Engine, waiting: deque[tuple[int, Sequence[int]]], writing: list[_Open], at_once: int, length: int
) -> None:
    """Opens sessions for the next prompts: as many as there may be, the KV cache holds and one pass reads well. Raises
    ResourceExhausted for a prompt and an answer that not even an empty cache could hold."""
    fresh = 0
    while waiting and len(writing) < at_once:
        index, prompt = waiting[0]
        blocks = -(-(len(prompt) + length) // engine.kv.block_size)
        if writing and (blocks > engine.kv.blocks_free or fresh + len(prompt) > MOST_ROWS):
            return
        waiting.popleft()
        sequence = engine.kv.begin_unshared(len(prompt) + length)
        writing.append(_Open(index, Segment(sequence, list(prompt))))
        fresh += len(prompt)


def _choose(logits: Tensor, temperature: float, noise: torch.Generator) -> list[int]:
    if not temperature:
        return [int(each) for each in logits.argmax(-1)]
    shares = (logits.to(noise.device) / temperature).softmax(-1)
    return [int(each) for each in torch.multinomial(shares, 1, generator=noise)[:, 0]]


def _side_by_side(hidden: HiddenStates, layers: Sequence[int]) -> Tensor:
    """bfloat16 [tokens, (1 + layers) * hidden] on the CPU."""
    return torch.cat([hidden.last, *(hidden.layers[each] for each in layers)], dim=-1).to("cpu", torch.bfloat16)
