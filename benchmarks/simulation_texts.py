"""The target's texts that a simulation replays.

Under the coupled rule (greedy is its T = 0) a text is a function of target and seed alone, whatever was drafted. So it
is generated once, plainly, and afterwards "verify these candidates" means "walk down them along the text".
`Walk` does it on the real target, to show that the two are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.prompts import held_out
from measurement.pairs.loops import DISTINCT, distinct_share
from slipstream.engine.engine import Engine
from slipstream.engine.segment import Segment
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.speculation.selection import Selection
from slipstream.tokenizer.vocabulary import load_tokenizer
from verifier_svc.acceptance.judge import VerifyInput, judge
from verifier_svc.acceptance.result import AcceptanceResult, BrokenNumbers

LOOKAHEAD = 32
"""Tokens generated behind those that count, so that the last rounds are not cut short."""
BATCH = 16
"""Prompts tried at once."""
NOTHING = Selection()
Key = tuple[float, int]
"""Temperature and prompt of a text."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and what the target makes of it."""

    prompt: int
    """Which one: the same at every temperature."""
    sampling: SamplingParams
    prompt_length: int
    tokens: list[int]
    """Prompt first; the last `LOOKAHEAD` ones do not count."""

    @property
    def key(self) -> Key:
        return self.sampling.temperature, self.prompt

    @property
    def rounds(self) -> range:
        """The lengths of the committed prefix at which a round may start."""
        return range(self.prompt_length, len(self.tokens) - LOOKAHEAD)


class Walk:
    """Several sequences of the target side by side, one pass for each round."""

    def __init__(self, engine: Engine, prompts: list[list[int]], samplings: list[SamplingParams], room: int) -> None:
        """`room` for so many tokens behind each prompt, candidates included."""
        self.tokens = [[*prompt] for prompt in prompts]
        self._engine = engine
        self._samplings = samplings
        self._sequences = [engine.kv.begin_unshared(len(prompt) + room) for prompt in prompts]

    def __enter__(self) -> Walk:
        return self

    def __exit__(self, *_: object) -> None:
        for sequence in self._sequences:
            self._engine.kv.close(sequence)

    @torch.inference_mode()
    def round(self, selections: list[Selection]) -> list[AcceptanceResult]:
        """One target pass by the real rule; what it accepts is committed. Raises RuntimeError for broken numbers."""
        segments, cases, row = [], [], 0
        for number, chosen in enumerate(selections):
            sequence, tokens = self._sequences[number], self.tokens[number]
            pending = tokens[sequence.length :]
            segments.append(Segment(sequence, pending, list(chosen.token_ids), list(chosen.parents)))
            cases.append(VerifyInput(chosen, row, self._samplings[number], len(tokens)))
            row += segments[-1].logit_rows
        outcomes: list[AcceptanceResult] = []
        for outcome in judge(cases, self._engine.forward(segments).logits):
            if isinstance(outcome, BrokenNumbers):
                raise RuntimeError("the target's numbers are broken; use a sound checkpoint.")
            outcomes.append(outcome)
        for segment, chosen, outcome, tokens in zip(segments, selections, outcomes, self.tokens, strict=True):
            self._engine.kv.keep(segment, list(outcome.path))
            tokens += [*(chosen.token_ids[node] for node in outcome.path), outcome.next_token]
        return outcomes


def natural(engine: Engine, model: str, count: int, tokens: int) -> list[Text]:
    """Greedy texts of the first `count` held-out prompts whose greedy text does not loop (`benchmarks.prompts`)."""
    tokenizer = load_tokenizer(model)
    kept: list[Text] = []
    seed = 1
    while len(kept) < count:
        prompts = [tokenizer.encode(prompt).ids for prompt in held_out(BATCH, seed=seed)]
        for text in _write(engine, prompts, [SamplingParams(temperature=0.0)] * BATCH, tokens):
            if distinct_share(text.tokens[text.rounds.start : text.rounds.stop]) >= DISTINCT:
                kept.append(Text(len(kept), text.sampling, text.prompt_length, text.tokens))
        seed += 1
    return kept[:count]


def sampled(engine: Engine, texts: list[Text], temperature: float) -> list[Text]:
    """Texts of these prompts, drawn at this temperature with the prompt's number as seed."""
    prompts = [text.tokens[: text.prompt_length] for text in texts]
    samplings = [SamplingParams(temperature=temperature, seed=text.prompt) for text in texts]
    return _write(engine, prompts, samplings, len(texts[0].rounds))


def _write(engine: Engine, prompts: list[list[int]], samplings: list[SamplingParams], tokens: int) -> list[Text]:
    """Plain decoding of all prompts side by side."""
    length = tokens + LOOKAHEAD
    with Walk(engine, prompts, samplings, length) as walk:
        for _ in range(length):
            walk.round([NOTHING] * len(prompts))
    return [
        Text(number, sampling, len(prompt), written)
        for number, (sampling, prompt, written) in enumerate(zip(samplings, prompts, walk.tokens, strict=True))
    ]
