"""Makes a run's rows: reads its texts, lets the target answer, and gives each row the target's hidden states."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from contextlib import closing

import torch

from measurement.pairs.loops import DISTINCT, distinct_share
from slipstream.errors import FailedPrecondition, InvalidArgument
from training.answer_store import AnswerStore, StoredAnswer
from training.answers import AnswerSettings, write_answers
from training.corpus import TrainingBatch
from training.progress import StageProgress
from training.request import TrainRequest
from training.target import Target, TargetStates
from training.texts import Sample, Samples, SourceText, cut, digest_of, few_workloads, padded, read_texts

MOST_OWN = 0.5
"""Share of rows of the target's own texts where others were given."""
MOST_ASKED = 10
"""Answers that are asked for at most for each one to measure on, where many of them loop."""
LEAST_TRIED = 16
"""Greedy answers that are looked at before a target is said to loop."""
LEAST_USABLE = 0.05
"""Share of them that must not loop: below it hundreds would be asked for, to be measured on a few odd ones."""
TRAIN, HELD_OUT = "train", "held_out"


class SampleMaker:
    """The target's answers are kept in a file, so that a run that was stopped reads the same."""

    def __init__(self, request: TrainRequest, target: Target, layers: Sequence[int]) -> None:
        """`layers`: the target's layers whose states are kept beside the last one."""
        self._request, self._target, self._layers = request, target, tuple(layers)
        self._encoded: dict[str, list[int]] = {}
        """Tokens of texts, by their keys."""
        self._widths = [target.output.shape[1]] * (1 + len(self._layers))
        self._store: AnswerStore | None = None

    def make(self) -> Samples:
        request = self._request
        train, held_out = read_texts(request.data, request.held_out)
        self._store = AnswerStore(request.workplace, self.key(train + held_out), sum(self._widths))
        measured, looping = self._measured(held_out)
        own = self._answered(train)
        random.Random(request.seed).shuffle(train)
        given: list[Sample] = []
        for text in train:
            if len(given) < request.steps * request.rows:  # more than the run reads need not be encoded
                given += self._windows(text) if text.text else []
        written = [row for each in own for row in cut(each, request.window)]
        if not given and not written:
            raise InvalidArgument("there is nothing to learn: prompts alone need `answers`, which is 0.")
        share = own_share(request, len(written)) if given else 1.0
        return Samples(given, written, few_workloads(measured), share, looping)

    def key(self, texts: Sequence[SourceText]) -> str:
        """Names all that decides the answers to these texts."""
        request = self._request
        decides = [request.target, request.dtype, request.seed, request.answer_tokens, request.prompt_tokens,
                   request.temperature, request.held_out, self._layers]  # fmt: skip
        return digest_of(repr([decides, [digest_of(f"{each.text}{each.prompt}{each.messages}") for each in texts]]))

    def answer_all(self, prompts: Sequence[tuple[list[int], str]]) -> list[Sample]:
        """A greedy answer to each of these prompts with its workload, in their order, whether it loops or not."""
        key = digest_of(repr([self._request.target, self._request.dtype, self._request.answer_tokens, self._layers,
                              prompts]))  # fmt: skip
        self._store = AnswerStore(self._request.workplace, key, sum(self._widths))
        return [_sample(each) for each in self._write(HELD_OUT, prompts, 0.0)]

    def batch(self, samples: Sequence[Sample]) -> tuple[TrainingBatch, TargetStates]:
        """The samples as rows, padded to the longest with tokens that are not learned, and the target's states: those
        that were kept when it wrote them, and of texts that were given in one pass over them together."""
        batch = padded(samples)
        place, dtype, (count, length) = self._target.device, self._target.dtype, batch.tokens.shape
        given = [at for at, each in enumerate(samples) if each.rows is None]
        found = [torch.zeros(count, length, width, device=place, dtype=dtype) for width in self._widths]
        if given:
            states = self._target.read([samples[at].tokens for at in given], self._layers)
            for whole, part in zip(found, (states.last, *(states.layers[each] for each in self._layers)), strict=True):
                whole[given, : part.shape[1]] = part.to(dtype)
        for at, each in enumerate(samples):
            if each.rows is not None:
                assert self._store is not None
                first, end = each.rows
                for whole, part in zip(found, self._store.states(first, end, self._widths), strict=True):
                    whole[at, : end - first] = part.to(place, dtype)
        return batch.on(place), TargetStates(found[0], dict(zip(self._layers, found[1:], strict=True)))

    def _windows(self, text: SourceText) -> list[Sample]:
        """Rows of a text as it was given; a prompt has some only where the target does not answer it itself."""
        if text.prompt and self._request.answers:
            return []
        prompt = self._target.encode(text.prompt) if text.prompt else []
        tokens = prompt + self._tokens(text) + self._target.end
        return cut(Sample(tokens, max(1, len(prompt)), text.workload), self._request.window)

    def _tokens(self, text: SourceText) -> list[int]:
        if text.key not in self._encoded:
            self._encoded[text.key] = self._target.encode(text.text)
        return self._encoded[text.key]

    def _answered(self, texts: Sequence[SourceText]) -> list[Sample]:
        """The target's own texts to learn from."""
        request = self._request
        prompts = self.prompts(texts, request.answers, request.seed)
        assert self._store is not None
        if TRAIN in self._store.finished:
            return [_sample(each) for each in self._store.part(TRAIN) if each.index < len(prompts)]
        return [_sample(each) for each in self._write(TRAIN, prompts, request.temperature, request.answer_minutes)]

    def _measured(self, texts: Sequence[SourceText]) -> tuple[list[Sample], int]:
        """Greedy answers that do not loop, and how many did. Small targets often do: it asks again elsewhere until
        there are enough to measure on, or no more prompts come. Raises FailedPrecondition where almost all loop."""
        wanted = self._request.held_out_answers
        prompts = self.prompts(texts, MOST_ASKED * wanted, self._request.seed + 1)
        measured: list[Sample] = []
        asked = 0
        while asked < len(prompts) and len(measured) < wanted:
            # As many as will do if they loop as often as those before.
            count = math.ceil((wanted - len(measured)) * max(1, asked) / max(1, len(measured)))
            asked = min(len(prompts), asked + min(count, 2 * wanted))
            written = [_sample(each) for each in self._write(HELD_OUT, prompts[:asked], 0.0)]
            measured = [each for each in written if distinct_share(each.tokens[each.first :]) >= DISTINCT]
            if asked >= LEAST_TRIED and len(measured) < LEAST_USABLE * asked:
                break
        if len(measured) < LEAST_USABLE * asked or not measured:
            raise FailedPrecondition(
                f"{asked - len(measured)} of {asked} greedy answers of {self._request.target} loop (fewer than "
                f"{DISTINCT:.0%} of their 4-grams differ), and any drafter guesses a loop. Give prompts that it was "
                'trained to answer, an instruction model\'s as "messages"; or make answer_tokens smaller than '
                f"{self._request.answer_tokens}.",
                reason="TARGET_LOOPS",
            )
        return measured[:wanted], asked - len(measured)

    def prompts(self, texts: Sequence[SourceText], count: int, seed: int) -> list[tuple[list[int], str]]:
        """Up to `count` prompts with their workloads: each prompt once, then pieces of texts at places that the seed
        decides. A longer count begins with the same prompts."""
        size, chance = self._request.prompt_tokens, random.Random(seed)
        asked = [text for text in texts if text.prompt or text.messages][:count]
        prompts = [(self._target.prompt(text.prompt, text.messages), text.workload) for text in asked]
        plain = [text for text in texts if not (text.prompt or text.messages)]
        chance.shuffle(plain)
        plain = [text for text in plain[:count] if len(self._tokens(text)) > 1]
        while plain and len(prompts) < count:
            for text in plain[: count - len(prompts)]:
                tokens = self._tokens(text)
                at = chance.randrange(max(1, len(tokens) - size))
                prompts.append((tokens[at : at + size], text.workload))
        room = self._target.longest - self._request.answer_tokens
        return [(tokens, workload) for tokens, workload in prompts if 0 < len(tokens) <= room]

    def _write(
        self, part: str, prompts: Sequence[tuple[list[int], str]], temperature: float, minutes: float = 0.0
    ) -> list[StoredAnswer]:
        """The answers to these prompts, of which those that are in the file are not written again; at most for so many
        minutes, unless that is 0."""
        store, request = self._store, self._request
        assert store is not None
        done = {each.index for each in store.part(part) if each.index < len(prompts)}
        missing = [index for index in range(len(prompts)) if index not in done]
        if missing:
            self._target.check_logits()
        missing.sort(key=lambda index: -len(prompts[index][0]) // 64)  # the longest first: none of them is left alone
        if not missing:
            return [each for each in store.part(part) if each.index < len(prompts)]
        began, count = time.monotonic(), len(done)
        settings = AnswerSettings(
            request.answer_tokens, temperature, request.seed + count, self._layers, request.answers_at_once
        )
        writing = write_answers(self._target, [prompts[each][0] for each in missing], settings)
        with StageProgress("answers of the target") as progress, closing(writing):
            tokens = 0
            for answer in writing:
                index = missing[answer.index]
                prompt, workload = prompts[index]
                store.add(part, index, prompt + answer.tokens, len(prompt), workload, answer.states)
                count, tokens = count + 1, tokens + len(answer.tokens)
                spent = time.monotonic() - began
                used = max(count / len(prompts), spent / (60.0 * minutes) if minutes else 0.0)
                progress.show(min(1.0, used), f"{count} of {len(prompts)}  {tokens / spent:,.0f} tokens/s")
                if minutes and spent > 60.0 * minutes:
                    break
        if part == TRAIN:
            store.finish(part)
        return [each for each in store.part(part) if each.index < len(prompts)]


def own_share(request: TrainRequest, written: int) -> float:
    """Share of the target's own texts, of which there are so many rows, among rows of given ones."""
    return min(MOST_OWN, request.answer_epochs * written / (request.steps * request.rows))


def _sample(answer: StoredAnswer) -> Sample:
    return Sample(answer.tokens, answer.first, answer.workload, (answer.row, answer.end))
