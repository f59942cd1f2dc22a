"""The texts that a drafter learns from and is measured on: those that are given, and the target's own answers."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound
from training.corpus import DISTINCT, TrainingBatch, distinct_share, is_held_out, read_corpus
from training.progress import StageProgress
from training.request import TrainRequest
from training.target import Target

MOST_OWN = 0.5
"""Share of rows of the target's own texts where others were given."""
MOST_WORKLOADS = 6
MOST_ASKED = 10
"""Answers that are asked for at most for each one to measure on, where most of them loop."""
AT_ONCE = {"cpu": 32, "cuda": 256}
"""Answers that are written at once, by the kind of the target's device."""


@dataclass(frozen=True)
class SourceText:
    """A text to learn, or a prompt to answer (then `text` is the answer that came with it, or empty)."""

    key: str
    """Decides whether it is held out."""
    workload: str
    text: str
    prompt: str = ""
    messages: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Sample:
    """Token ids, of which those from number `first` on are learned; at most one window of them."""

    tokens: list[int]
    first: int
    workload: str


@dataclass(frozen=True)
class Samples:
    """Rows for training, in an order that the seed and the epoch decide, and what is measured on."""

    given: list[Sample]
    own: list[Sample]
    """Rows of the target's own texts."""
    held_out: list[Sample]
    """Greedy texts of the target's own."""
    own_share: float
    """Share of the rows that are the target's own texts."""
    looping: int = 0
    """Greedy answers that were left out for looping."""

    def batch(self, step: int, rows: int, seed: int) -> TrainingBatch:
        """`rows` samples, given and own texts evenly mixed, padded to the longest with tokens that are not learned."""
        chosen = []
        for pick in range(step * rows, (step + 1) * rows):
            own = int(pick * self.own_share)  # of those before
            mine = int((pick + 1) * self.own_share) > own
            pool, number = (self.own, own) if mine else (self.given, pick - own)
            epoch, index = divmod(number, len(pool))
            chosen.append(pool[int(_order(seed, mine, epoch, len(pool))[index])])
        return padded(chosen)

    def frequency(self, vocabulary: int) -> torch.Tensor:
        """int64 [vocabulary]: how often each token is learned."""
        counts = torch.zeros(vocabulary, dtype=torch.int64)
        for each in (*self.given, *self.own):
            counts += torch.bincount(torch.tensor(each.tokens[each.first :]), minlength=vocabulary)
        return counts


@lru_cache(maxsize=4)
def _order(seed: int, mine: bool, epoch: int, size: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng((seed, mine, epoch)).permutation(size)


def padded(samples: Sequence[Sample]) -> TrainingBatch:
    """One row for each; tokens behind its end are 0 and not learned."""
    length = max(len(each.tokens) for each in samples)
    tokens = torch.zeros(len(samples), length, dtype=torch.int64)
    learned = torch.zeros(len(samples), length, dtype=torch.bool)
    for row, each in enumerate(samples):
        tokens[row, : len(each.tokens)] = torch.tensor(each.tokens)
        learned[row, each.first : len(each.tokens)] = True
    return TrainingBatch(tokens, learned)


def read_texts(data: str, held_out: float) -> tuple[list[SourceText], list[SourceText]]:
    """(for training, held out). Raises NotFound without the data, InvalidArgument for data without one of both."""
    if not data:
        corpus = read_corpus(None)  # held out are the files that the shipped pair has not seen either
        parts = [[_of_file(each.path, each.text) for each in part] for part in (corpus.train, corpus.held_out)]
        return parts[0], parts[1]
    path, texts = Path(data).expanduser(), dict[str, SourceText]()
    if not path.exists():
        raise NotFound(f"There is no file or folder {data}.", reason="FILE_MISSING")
    for file in [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file()):
        place = file.name if file == path else file.relative_to(path).as_posix()
        for text in _read(file, place, lines=path.is_file()):
            texts.setdefault(f"{text.prompt}\0{text.messages}\0{text.text}", text)
    split: tuple[list[SourceText], list[SourceText]] = ([], [])
    for text in texts.values():
        split[is_held_out(text.key, 1000 * held_out)].append(text)
    if not all(split):
        raise InvalidArgument(
            f"{data} has {len(split[0])} texts to learn and {len(split[1])} held out; give more, or another held_out."
        )
    return split


def _read(file: Path, place: str, *, lines: bool) -> Iterator[SourceText]:
    """`lines`: a file that is not JSONL holds one prompt in each line, else it is one text."""
    try:
        content = file.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return
    filled = [(number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
    if file.suffix == ".jsonl":
        yield from (_of_line(f"{place}:{number}", line) for number, line in filled)
    elif lines:
        yield from (SourceText(_digest(line), file.stem, "", prompt=line) for _, line in filled)
    elif filled:
        yield _of_file(place, content)


def _of_file(place: str, content: str) -> SourceText:
    """The workload is the folder, of files without one their suffix."""
    folder, _, name = place.rpartition("/")
    return SourceText(place, folder.partition("/")[0] or Path(name).suffix.lstrip(".") or "text", content)


def _of_line(place: str, line: str) -> SourceText:
    """`{"text"}`, `{"prompt", "answer"}` or `{"messages"}`, perhaps with a `workload`."""
    try:
        fields = json.loads(line)
        workload = str(fields.get("workload", "all"))
        if messages := fields.get("messages"):
            given = messages[-1]["role"] == "assistant"  # the target answers itself
            return SourceText(_digest(line), workload, "", messages=tuple(messages[:-1] if given else messages))
        if prompt := fields.get("prompt"):
            return SourceText(_digest(line), workload, str(fields.get("answer", "")), prompt=str(prompt))
        return SourceText(_digest(line), workload, fields["text"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(
            f'{place}: a line has "text", "prompt" with "answer", or "messages" ({error}).'
        ) from error


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class SampleMaker:
    """Makes samples of texts; the target's answers are kept in a file, so that a resumed run reads the same."""

    def __init__(self, request: TrainRequest, target: Target) -> None:
        self._request, self._target = request, target
        self._encoded: dict[str, list[int]] = {}
        """Tokens of texts, by their keys."""

    def make(self) -> Samples:
        request = self._request
        train, held_out = read_texts(request.data, request.held_out)
        kept = request.workplace / "answers.json"
        key = _digest(repr([request.target, request.data, request.seed, request.answers, request.answer_tokens,
                            request.prompt_tokens, request.temperature, request.held_out, request.held_out_answers,
                            [_digest(text.text + text.prompt) for text in train + held_out]]))  # fmt: skip
        if kept.is_file() and (stored := json.loads(kept.read_text()))["key"] == key:
            own, measured = ([Sample(*each) for each in stored[part]] for part in ("train", "held_out"))
            looping = stored["looping"]
        else:
            own = self._answers(train, request.answers, request.temperature)
            measured, looping = self._measured(held_out)
            if not measured:
                raise FailedPrecondition("every greedy answer of the target loops; nothing can be measured on them.")
            kept.parent.mkdir(parents=True, exist_ok=True)
            parts = {"train": own, "held_out": measured}
            listed = {name: [[each.tokens, each.first, each.workload] for each in part] for name, part in parts.items()}
            kept.write_text(json.dumps(listed | {"key": key, "looping": looping}))
        random.Random(request.seed).shuffle(train)
        given: list[Sample] = []
        for text in train:
            if len(given) < request.steps * request.rows:  # more than the run reads need not be encoded
                given += self._windows(text) if text.text else []
        written = [row for each in own for row in _cut(each, request.window)]
        if not given and not written:
            raise InvalidArgument("there is nothing to learn: prompts alone need `answers`, which is 0.")
        share = min(MOST_OWN, request.answer_epochs * len(written) / (request.steps * request.rows)) if given else 1.0
        return Samples(given, written, _few_workloads(measured), share, looping)

    def _windows(self, text: SourceText) -> list[Sample]:
        """Rows of a text as it was given; a prompt has some only where the target does not answer it itself."""
        if text.prompt and self._request.answers:
            return []
        prompt = self._target.encode(text.prompt) if text.prompt else []
        tokens = prompt + self._tokens(text) + self._target.end
        return _cut(Sample(tokens, max(1, len(prompt)), text.workload), self._request.window)

    def _tokens(self, text: SourceText) -> list[int]:
        if text.key not in self._encoded:
            self._encoded[text.key] = self._target.encode(text.text)
        return self._encoded[text.key]

    def _measured(self, texts: Sequence[SourceText]) -> tuple[list[Sample], int]:
        """Greedy answers that do not loop, and how many did. Small targets mostly do: it asks again elsewhere until
        there are enough to measure on, or no more come, or MOST_ASKED times as many were asked for."""
        wanted, asked = self._request.held_out_answers, 0
        measured: list[Sample] = []
        while asked < MOST_ASKED * wanted and len(measured) < wanted:
            # As many as will do if they loop as often as those before.
            count = math.ceil((wanted - len(measured)) * max(1, asked) / max(1, len(measured)))
            written = self._answers(texts, min(count, MOST_ASKED * wanted - asked), 0.0, asked)
            if not written:
                break
            asked += len(written)
            measured += [each for each in written if distinct_share(each.tokens[each.first :]) >= DISTINCT]
        return measured[:wanted], asked - len(measured)

    def _answers(self, texts: Sequence[SourceText], count: int, temperature: float, before: int = 0) -> list[Sample]:
        """Up to `count`: to each prompt once, without the `before` first ones, and to pieces of texts at places that
        the seed and `before` decide."""
        chance, size = random.Random(self._request.seed + before), self._request.prompt_tokens
        asked = [text for text in texts if text.prompt or text.messages]
        asked = asked[before : before + count]
        prompts = [(self._target.prompt(text.prompt, text.messages), text.workload) for text in asked]
        plain = [text for text in texts if not (text.prompt or text.messages)]
        chance.shuffle(plain)
        plain = [text for text in plain[:count] if len(self._tokens(text)) > 1]
        while plain and len(prompts) < count:
            for text in plain[: count - len(prompts)]:
                tokens = self._tokens(text)
                at = chance.randrange(max(1, len(tokens) - size))
                prompts.append((tokens[at : at + size], text.workload))
        prompts.sort(key=lambda each: len(each[0]))
        samples: list[Sample] = []
        with StageProgress("answers of the target") as progress:
            at_once = self._request.answers_at_once or AT_ONCE[self._target.device.type]
            for begin in range(0, len(prompts), at_once):
                part = prompts[begin : begin + at_once]
                written = self._target.answer(
                    [each for each, _ in part], self._request.answer_tokens, temperature, self._request.seed + begin
                )
                samples += [
                    Sample(prompt + answer, len(prompt), workload)
                    for (prompt, workload), answer in zip(part, written, strict=True)
                ]
                progress.show(len(samples) / len(prompts), f"{len(samples)} of {len(prompts)}")
        return samples


def _cut(sample: Sample, window: int) -> list[Sample]:
    """Rows of at most `window` tokens, which have something to learn."""
    rows = []
    for at in range(0, len(sample.tokens), window):
        tokens = sample.tokens[at : at + window]
        first = max(1, sample.first - at)
        if len(tokens) - first > 1:
            rows.append(Sample(tokens, first, sample.workload))
    return rows


def _few_workloads(samples: list[Sample]) -> list[Sample]:
    """The rare ones together."""
    names = [each.workload for each in samples]
    frequent = sorted(set(names), key=lambda name: (-names.count(name), name))[:MOST_WORKLOADS]
    return [Sample(s.tokens, s.first, s.workload if s.workload in frequent else "other") for s in samples]
