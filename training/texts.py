"""The texts that a drafter learns from: the files of its data, and rows in the order that the seed decides."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slipstream.errors import InvalidArgument, NotFound
from training.corpus import TrainingBatch, is_held_out, read_corpus

MOST_WORKLOADS = 6


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
    rows: tuple[int, int] | None = None
    """Rows of the answers' file that hold the target's states of its tokens: of all, or of all but the last."""


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

    def pick(self, step: int, rows: int, seed: int) -> list[Sample]:
        """`rows` samples of one step, given and own texts evenly mixed."""
        chosen = []
        for pick in range(step * rows, (step + 1) * rows):
            own = int(pick * self.own_share)  # of those before
            mine = int((pick + 1) * self.own_share) > own
            pool, number = (self.own, own) if mine else (self.given, pick - own)
            epoch, index = divmod(number, len(pool))
            chosen.append(pool[int(_order(seed, mine, epoch, len(pool))[index])])
        return chosen

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
        yield from (SourceText(digest_of(line), file.stem, "", prompt=line) for _, line in filled)
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
            return SourceText(digest_of(line), workload, "", messages=tuple(messages[:-1] if given else messages))
        if prompt := fields.get("prompt"):
            return SourceText(digest_of(line), workload, str(fields.get("answer", "")), prompt=str(prompt))
        return SourceText(digest_of(line), workload, fields["text"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(
            f'{place}: a line has "text", "prompt" with "answer", or "messages" ({error}).'
        ) from error


def digest_of(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def cut(sample: Sample, window: int) -> list[Sample]:
    """Rows of at most `window` tokens, which have something to learn."""
    rows = []
    for at in range(0, len(sample.tokens), window):
        tokens = sample.tokens[at : at + window]
        first = max(1, sample.first - at)
        kept = sample.rows and (sample.rows[0] + at, min(sample.rows[1], sample.rows[0] + at + window))
        if len(tokens) - first > 1:
            rows.append(Sample(tokens, first, sample.workload, kept))
    return rows


def few_workloads(samples: list[Sample]) -> list[Sample]:
    """The rare ones together."""
    names = [each.workload for each in samples]
    frequent = sorted(set(names), key=lambda name: (-names.count(name), name))[:MOST_WORKLOADS]
    return [each if each.workload in frequent else replace(each, workload="other") for each in samples]
