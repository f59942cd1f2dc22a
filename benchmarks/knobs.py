"""Values of drafting methods' settings on a target's own texts, by counts: tokens a pass, candidates, honest claims.

usage: python -m benchmarks.knobs [--target FOLDER] [--prompts FILE ...] [--count N] [--tokens N] [--dtype D]
                                  [--answers FILE | --kept FOLDER] [--drafter METHOD[=FOLDER] ...] [--only WORD ...]

The target answers prompts (first turns of JSON lines with the key `turns`, in its chat template; without files pieces
of source code) greedily and at T = 0.8; `--answers` keeps the answers for the next run, and `--kept` takes those of a
run of `slipstream train` from its workplace. Then each setting proposes
beside the known texts (`benchmarks.recorded`), a tree a pass, without a clock: `tokens a pass` counts the accepted
candidates and the bonus token, `claimed` is the sum of the candidates' own probabilities over what was accepted (1 is
honest), `distinct` the share of distinct 4-grams of the texts, for loops accept any draft. Rows of a lookahead window
count as candidates. `--drafter rows` asks what the target's own logits hold (`benchmarks.row_counts`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.equality_steps import SHIPPED, Decoding, Text
from benchmarks.kept_answers import KeptAnswers
from benchmarks.prediction import edited
from benchmarks.prompts import held_out
from benchmarks.recorded import Counts, Given, Way, walk, walk_windows
from benchmarks.records import Row, write
from benchmarks.row_counts import row_counts
from measurement.pairs.loops import distinct_share
from slipstream.engine.engine import Engine, HiddenRequest, HiddenStates
from slipstream.engine.factory import open_engine
from slipstream.engine.segment import Segment
from slipstream.proposers.base import HiddenNeed, ProposerSettings, open_proposer
from slipstream.tokenizer.vocabulary import load_tokenizer
from verifier_svc.execution.embedded import EmbeddedExecutor

ASKED = ("greedy", "T = 0.8")
LONGEST_PROMPT = 700
THRESHOLDS = (0.08, 0.25, 0.6)
"""Least path probabilities of candidates, some of `draft_threshold.LEVELS`."""
WINDOWS = ("2,3,3", "8,3,3", "4,2,3", "4,4,3", "4,3,1", "4,3,8", "4,3,16")
CHANGED = (0.1, 0.3, 1.0)
"""Shares of a text's sentences that are other ones in its prediction."""


@dataclass(frozen=True)
class Knobs:
    """One row of the table; the defaults are the product's."""

    name: str = "defaults"
    way: Way = field(default_factory=Way)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ProposerSettings`."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Values, by module below `slipstream.proposers` and name."""


def ways(what: str, name: str, values: Sequence[Any]) -> list[Knobs]:
    return [Knobs(f"{what} {value:g}", Way(**{name: value})) for value in values]


def settings(name: str, values: Sequence[Any]) -> list[Knobs]:
    return [Knobs(f"{name} {value:g}", settings={name: value}) for value in values]


def constants(place: str, values: Sequence[Any]) -> list[Knobs]:
    return [Knobs(f"{place.rpartition('.')[2]} {value:g}", constants={place: value}) for value in values]


def shared(tokens: int, chunk: int = 256) -> Knobs:
    """What texts write is found by those after them, and in pieces of `chunk` tokens by those beside them."""
    name = f"corpus of {tokens}, CHUNK {chunk}"
    return Knobs(name, settings={"corpus_tokens": tokens}, constants={"suffix.CHUNK": chunk})


def variations(method: str) -> list[Knobs]:
    """Defaults first."""
    asked = [Knobs(), *ways("max draft tokens", "nodes", (4, 8, 16, 64)), *settings("width", (1, 2, 8))]
    if method == "suffix":
        asked += constants("suffix.LEAST_PROBABILITY", (0.01, 0.1, 0.2, 0.4))
        asked += constants("lookup.DOUBT", (1.0, 4.0, 6.0, 8.0))
        asked += constants("lookup.NODES", (2, 4, 16))
        asked += ways("LOOKUP_PASSES", "passes", (1, 2, 8))
        asked += ways("threshold", "threshold", THRESHOLDS)
        asked += constants("suffix_automaton.COUNT_LIMIT", (4, 16))
        asked += [shared(tokens) for tokens in (1000, 4000, 100_000)]
        asked += [shared(100_000, chunk) for chunk in (32, 1024)]
    elif method == "prediction":
        asked += constants("predicted_output.GRAM", (2, 3, 6))
        asked += constants("predicted_output.WINDOW", (32, 128))
        asked += constants("predicted_output.NEAR", (4, 8, 32))
        asked += constants("predicted_output.PATIENCE", (2, 8))
        asked += constants("predicted_output.BEGINNING", (1, 4, 16))
    elif method == "lookahead":
        asked += [Knobs(f"W,N,G {size}", settings={"lookahead": size}) for size in WINDOWS]
    elif method == "eagle":
        asked += constants("eagle.PASSES", (1, 2, 3, 5))
        asked += constants("eagle.TREE", (8, 16, 64))
        asked += constants("eagle.LEAST", (-9.2, -4.6, -3.0))
        asked += ways("threshold", "threshold", THRESHOLDS)
    elif method == "model":
        asked += settings("sharpness", (1.0, 1.25, 2.0, 3.0))
        asked += ways("expand", "expand", (1, 2, 8))
        asked += constants("level_budget.MOST_LEVELS", (1, 2, 4))
    return asked


def turns(files: Sequence[str], count: int) -> list[str]:
    """First turns, spread over all files."""
    lines = [line for name in files for line in Path(name).read_text("utf-8").splitlines()]
    return [json.loads(line)["turns"][0] for line in lines[:: max(1, len(lines) // count)]][:count]


def prompts(target: str, files: Sequence[str], count: int) -> list[list[int]]:
    tokenizer = load_tokenizer(target)
    if not files:
        return [tokenizer.encode(text).ids for text in held_out(count, characters=1500)]
    from transformers import AutoTokenizer

    template = AutoTokenizer.from_pretrained(target)
    asked = [[{"role": "user", "content": turn}] for turn in turns(files, count)]
    written = [template.apply_chat_template(each, tokenize=False, add_generation_prompt=True) for each in asked]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in written]


@torch.inference_mode()
def answers(target: str, dtype: str, asked: list[list[int]], tokens: int, kept: Path | None) -> list[Text]:
    """Every prompt's text in both kinds, each up to where the model ends it; of the file if it has them."""
    texts = [Text(kind, prompt, seed, tokens) for seed, (prompt, kind) in enumerate(itertools.product(asked, ASKED))]
    if kept is not None and kept.exists():
        known = {each["seed"]: each for each in map(json.loads, kept.read_text("utf-8").splitlines())}
        for text in texts:
            if known[text.seed]["prompt"] != text.prompt:
                raise SystemExit(f"{kept} has answers to other prompts.")
            text.plain = known[text.seed]["plain"]
        return [text for text in texts if text.plain]
    torch.set_num_threads(1)
    room = sum(len(each) + tokens + 64 for each in asked) * len(ASKED)
    executor = EmbeddedExecutor(open_engine(target, dtype, kv_tokens=room))
    Decoding(executor, texts, random.Random(1)).plainly()
    ends = set(executor.model.eos_token_ids)
    for text in texts:
        text.plain = list(itertools.takewhile(lambda token: token not in ends, text.plain))
    if kept is not None:
        fields = ({"seed": text.seed, "prompt": text.prompt, "plain": text.plain} for text in texts)
        kept.write_text("".join(json.dumps(each) + "\n" for each in fields), "utf-8")
    return [text for text in texts if text.plain]


Predictions = Callable[[Text], Sequence[int]]


def predictions(target: str, texts: list[Text]) -> Iterator[tuple[str, Predictions]]:
    """The texts with some of their sentences changed; and the other answer to the same prompt, of which the most
    predictions of conversations are."""
    tokenizer = load_tokenizer(target)
    written = {text.seed: _sentences(tokenizer.decode(text.plain)) for text in texts}
    others = [piece for pieces in written.values() for piece in pieces]
    for share in CHANGED:
        chance = random.Random(1)
        known = {
            seed: tokenizer.encode(edited(pieces, share, chance, others), add_special_tokens=False).ids
            for seed, pieces in written.items()
        }
        yield f"{share:.0%} of sentences changed", lambda text, known=known: known[text.seed]  # type: ignore[misc]
    plain = {text.seed: text.plain for text in texts}
    if {text.kind for text in texts} == set(ASKED):  # both answers to a prompt stand side by side
        yield "another answer", lambda text: plain.get(text.seed ^ 1, [])


def _sentences(text: str) -> list[str]:
    return re.findall(r".+?(?:[.!?:;,]\s+|\n+|$)", text, re.DOTALL)


def rows(given: argparse.Namespace, texts: list[Text], kept: KeptAnswers | None) -> Iterator[Row]:
    for word in given.drafter:
        method, _, folder = word.partition("=")
        if method == "rows":
            yield from row_counts(open_engine(given.target, given.dtype, kv_tokens=4096), texts)
            continue
        target = KnownTarget(given.target, given.dtype, kept)
        kinds = list(dict.fromkeys(text.kind for text in texts))
        cases: list[tuple[str, Predictions | None]] = [("", None)]
        if method == "prediction":
            cases = list(predictions(given.target, texts))
        for knobs in variations(method):
            if given.only and not any(each in knobs.name for each in (*given.only, "defaults")):
                continue
            for (case, predicted), kind in itertools.product(cases, kinds if method != "lookahead" else kinds[:1]):
                some = [text for text in texts if text.kind == kind]
                row: Row = {"method": method, "setting": knobs.name, "texts": f"{kind}{case and ', '}{case}"}
                row |= figures(target.count(some, method, folder, knobs, predicted))
                print(row, flush=True)
                yield row


class KnownTarget:
    """The target, for methods that read it: hidden states of a text are computed once for every setting of a head."""

    def __init__(self, folder: str, dtype: str, kept: KeptAnswers | None) -> None:
        self._folder, self._dtype, self._kept = folder, dtype, kept
        self._size = load_tokenizer(folder).get_vocab_size()
        self._states: dict[int, HiddenStates] = {}

    @cached_property
    def _engine(self) -> Engine:
        torch.set_num_threads(1)
        return open_engine(self._folder, self._dtype, kv_tokens=1 << 16)

    def count(self, texts: list[Text], method: str, folder: str, knobs: Knobs, predicted: Predictions | None) -> Counts:
        with ExitStack() as stack:
            for place, value in knobs.constants.items():
                module, _, name = place.rpartition(".")
                stack.enter_context(patch.object(import_module(f"slipstream.proposers.{module}"), name, value))
            opened = open_proposer(method, ProposerSettings(model=folder, target=self._folder, **knobs.settings))
            if opened.open_window is not None:
                stack.enter_context(torch.inference_mode())
                return walk_windows(texts, opened, knobs.way, EmbeddedExecutor(self._engine))
            states = partial(self._hidden, opened.hidden) if opened.hidden is not None else None
            return walk(texts, opened, knobs.way, Given(predicted, states, self._size))

    def _hidden(self, need: HiddenNeed, text: Text) -> HiddenStates:
        """The target's states of a text's tokens, in one pass."""
        if self._kept is not None:
            return self._kept.states(text, need.layers)
        if text.seed not in self._states:
            tokens = text.prompt + text.plain
            sequence = self._engine.kv.begin_unshared(len(tokens))
            with torch.inference_mode():
                segment = Segment(sequence, tokens, want_logits=False)
                output = self._engine.forward([segment], HiddenRequest(need.layers))
            self._engine.kv.close(sequence)
            assert output.hidden is not None
            self._states[text.seed] = output.hidden
        return self._states[text.seed]


def figures(counts: Counts) -> Row:
    accepted, rows_run = counts.tokens - counts.passes, counts.candidates + counts.window_rows
    return {
        "tokens a pass": counts.tokens / counts.passes,
        "candidates a pass": rows_run / counts.passes,
        "accepted of candidates": accepted / rows_run if rows_run else None,
        "claimed": counts.claimed / accepted if accepted else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.knobs")
    parser.add_argument("--target", default=SHIPPED)
    parser.add_argument("--prompts", nargs="*", default=[])
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--answers", type=Path, help="file that keeps the target's answers")
    parser.add_argument("--kept", type=Path, help="workplace of a run of `slipstream train`")
    parser.add_argument("--drafter", nargs="*", default=["suffix"], help="methods, with =FOLDER where there is a model")
    parser.add_argument("--only", nargs="*", default=[], help="settings with one of these words in their names")
    given = parser.parse_args()
    kept = KeptAnswers(given.kept, given.count) if given.kept else None
    if kept is not None:
        texts = kept.texts
    else:
        asked = [each for each in prompts(given.target, given.prompts, given.count) if len(each) <= LONGEST_PROMPT]
        texts = answers(given.target, given.dtype, asked, given.tokens, given.answers)
    distinct = statistics.mean(distinct_share(text.plain) for text in texts)
    print(f"{len(texts)} texts, {sum(len(t.plain) for t in texts)} tokens, distinct 4-grams {distinct:.2f}", flush=True)
    found = list(rows(given, texts, kept))
    named = [Path(word).name if word in (*given.prompts, str(given.kept)) else word for word in sys.argv[1:]]
    methods = [word.partition("=")[0] for word in given.drafter if kept is not None or word != "suffix"]
    write(
        "_".join(["knobs", Path(given.target).name, *methods]), " ".join(["python -m benchmarks.knobs", *named]), found
    )


if __name__ == "__main__":
    main()
