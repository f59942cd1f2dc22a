"""Drafters with other vocabularies than the target's: how often their guesses are right.

usage: python -m benchmarks.translation [DRAFT ...]      (DRAFT: folders of further draft models, each translated)

Token by token along the shipped target's own continuations of held-out prompts, in fp32: `first` is how often the best
guess is the target's next token, `any` how often one of the four guesses is; both repeat exactly. `ms a turn` is CPU
time of this process for one turn of one session with one node, and does not.

Drafters: the shipped one; the shipped one with its token ids permuted; then each DRAFT. `intersection`: token-level
intersection alone (TLI, Timor et al. 2025): log q of draft tokens whose text is a target token's, and nothing else.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from benchmarks import records
from benchmarks.processes import MODELS
from benchmarks.prompts import held_out
from drafter_svc.config import DrafterConfig
from drafter_svc.drafter import open_configured
from slipstream.engine.engine import Engine
from slipstream.engine.factory import open_engine
from slipstream.engine.sampler import coupled_sampling
from slipstream.engine.segment import Segment
from slipstream.proposers import model_factory
from slipstream.proposers.base import UNLIMITED, Proposal, Proposer
from slipstream.proposers.cross_vocabulary import translated, translation
from slipstream.proposers.drafting.session import DraftPolicy, DraftSession
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.tokenizer.vocabulary import load_tokenizer

TARGET = str(MODELS / "target")
TEMPERATURES = (0.0, 1.0)
PROMPTS = 24
TOKENS = 48


@dataclass(frozen=True, slots=True)
class Run:
    """A prompt and the target's text after it."""

    tokens: list[int]
    prompt_length: int
    sampling: SamplingParams


def permuted(folder: Path, out: Path, seed: int = 0) -> Path:
    """The checkpoint in `folder` with its token ids shuffled, tokenizer included: the same function of text."""
    shutil.copytree(folder, out)
    state = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    places = list(range(len(state["model"]["vocab"])))
    random.Random(seed).shuffle(places)
    state["model"]["vocab"] = {token: places[index] for token, index in state["model"]["vocab"].items()}
    for added in state["added_tokens"]:
        added["id"] = places[added["id"]]
    (out / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")
    weights = load_file(folder / "model.safetensors")
    origin = torch.tensor(places).argsort()
    rows = {name: w[origin] if w.shape[0] == len(places) else w for name, w in weights.items()}
    save_file(rows, out / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        ends = {key: places[content[key]] for key in ("bos_token_id", "eos_token_id") if content.get(key) is not None}
        (out / name).write_text(json.dumps(content | ends))
    return out


def runs(target: Engine, prompts: Sequence[str], temperature: float, tokens: int) -> list[Run]:
    tokenizer = load_tokenizer(TARGET)
    samplings = [SamplingParams(temperature=temperature, seed=seed) for seed in range(len(prompts))]
    return [
        _continued(target, tokenizer.encode(p).ids, sampling, tokens)
        for p, sampling in zip(prompts, samplings, strict=True)
    ]


def _continued(target: Engine, prompt: list[int], sampling: SamplingParams, count: int) -> Run:
    sequence = target.kv.begin_unshared(len(prompt) + count)
    tokens, pending = list(prompt), list(prompt)
    for _ in range(count):
        segment = Segment(sequence, pending)
        output = target.forward([segment]).logits / (sampling.temperature or 1.0)
        target.kv.keep(segment, [])
        choice, _ = coupled_sampling.choose(output, [sampling.greedy], [sampling.seed], [len(tokens)])
        pending = choice.tolist()
        tokens += pending
    target.kv.close(sequence)
    return Run(tokens, len(prompt), sampling)


def agreement(proposer: Proposer, some: Sequence[Run]) -> tuple[float, float]:
    """How often the first guess, and how often any guess, is the target's next token."""
    first = anywhere = total = 0
    for run in some:
        prompt = run.tokens[: run.prompt_length]
        session = DraftSession(1, run.sampling, DraftPolicy(8, 0.0), prompt, run.prompt_length, len(run.tokens) + 1)
        for place in range(run.prompt_length, len(run.tokens)):
            (answer,) = proposer.propose([session.context([], [session.tree.root], UNLIMITED)])
            assert isinstance(answer, Proposal), answer
            guesses = [node.token for node in answer.nodes]
            first += guesses[:1] == [run.tokens[place]]
            anywhere += run.tokens[place] in guesses
            total += 1
            session.commit(place, [run.tokens[place]])
        proposer.close_sequence(session)
    return first / total, anywhere / total


class Intersection(translation.Translation):
    """A draft token is the target token of the same text, or nothing."""

    def _follow(self, last: bytes, rest: bytes) -> int:
        return self._spelled(self.target.encode(rest), rest)

    def _spelled(self, tokens: list[int], data: bytes) -> int:
        return tokens[0] if len(tokens) == 1 and self.target.word(tokens[0]) == data else -1


@contextmanager
def intersection() -> Iterator[None]:
    """Nothing is taken back, nothing is drafted on."""
    with patch.multiple(translated, HEALED=0, LOOKAHEAD=0), patch.object(model_factory, "Translation", Intersection):
        yield


def opened(draft: str) -> Proposer:
    return open_configured(DrafterConfig(model=draft, translate_for=TARGET, dtype="float32")).proposer


def main(drafts: Sequence[str]) -> None:
    torch.set_num_threads(1)
    prompts = held_out(PROMPTS, seed=5)
    target = open_engine(TARGET, "float32")
    target_runs = {temperature: runs(target, prompts, temperature, TOKENS) for temperature in TEMPERATURES}
    with tempfile.TemporaryDirectory() as scratch:
        shuffled = str(permuted(MODELS / "draft", Path(scratch) / "permuted"))
        named = {"shipped": str(MODELS / "draft"), "permuted": shuffled} | {Path(d).name: d for d in drafts}
        rows: list[records.Row] = []
        for name, folder in named.items():
            for kind in ("translated", "intersection") if name != "shipped" else ("same vocabulary",):
                for temperature in TEMPERATURES:
                    rows.append(_row(name, folder, kind, target_runs[temperature], temperature))
    names = " ".join(Path(draft).name for draft in drafts)
    records.write("translation", f"python -m benchmarks.translation {names}".rstrip(), rows)


def _row(name: str, folder: str, kind: str, target_runs: Sequence[Run], temperature: float) -> records.Row:
    with intersection() if kind == "intersection" else nullcontext():
        proposer = opened(folder)
        started = time.process_time()
        first, anywhere = agreement(proposer, target_runs)
        turns = sum(len(run.tokens) - run.prompt_length for run in target_runs)
        row: records.Row = {"draft": name, "read by": kind, "T": temperature, "first": first, "any of 4": anywhere}
        row["ms a turn"] = (time.process_time() - started) * 1e3 / turns
    return row


if __name__ == "__main__":
    main(sys.argv[1:])
