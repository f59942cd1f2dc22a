"""Equality of tokens at the verifier's executor: plain texts, and the same under random candidates and batches.

usage: python -m benchmarks.equality_steps [TOKENS] [DTYPE] [MINUTES] [--target FOLDER] [--wave N]
                                                             (exit status 1 when a token differs)

Texts come in waves. In a wave some texts are decoded plainly, a token a pass, the first one alone and the others in
one batch. Then all of them are decoded again: prompts in pieces of random size, random sessions left out of each step,
each session under a random tree that holds its text wholly, in part or not at all, a new branch at every wrong turn.
Half of the prompts begin as others do and share their KV; blocks are taken again in whatever order sessions end. A text
counts as different once, at its first other token; the rest of it is not compared.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.processes import MODELS
from benchmarks.prompts import held_out
from benchmarks.records import Row, write
from slipstream.engine.engine import Engine
from slipstream.engine.factory import open_engine
from slipstream.engine.sampler.token_history import TokenHistory
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.speculation.selection import ROOT, Selection
from slipstream.tokenizer.vocabulary import load_tokenizer
from verifier_svc.acceptance.result import AcceptanceResult
from verifier_svc.execution.embedded import EmbeddedExecutor
from verifier_svc.execution.executor import ScheduledSequence
from verifier_svc.session import Session, SessionRequest

TEXT, WAVE, ALONE = 240, 60, 1
MOST_NODES = 16
UNLIMITED = 1e9
SALT = "equality"
SHIPPED = str(MODELS / "target")
KINDS = {
    "greedy": {"temperature": 0.0},
    "T = 0.8": {"temperature": 0.8},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "repetition penalty 1.2": {"temperature": 0.8, "repetition_penalty": 1.2},
}


@dataclass
class Text:
    kind: str
    prompt: list[int]
    seed: int
    length: int = TEXT
    """Tokens of it that are compared."""
    plain: list[int] = field(default_factory=list)

    def open(self, engine: Engine) -> Session:
        sampling = SamplingParams(seed=self.seed, **KINDS[self.kind])  # type: ignore[arg-type]
        tokens = list(self.prompt)
        request = SessionRequest(
            id=str(self.seed),
            number=0,
            epoch=1,
            sampling=sampling,
            prompt_length=len(tokens),
            max_length=len(tokens) + self.length,
            stop_token_ids=frozenset(),
            max_draft_tokens=MOST_NODES,
        )
        session = Session(
            request,
            tokens=tokens,
            credit=None,
            tree=CandidateTree(tokens),
            history=TokenHistory(tokens) if sampling.penalised else None,
        )
        session.sequence = engine.kv.begin(tokens, SALT)
        session.computed = session.sequence.length
        return session


class Decoding:
    """Sessions of some texts on one executor."""

    def __init__(self, executor: EmbeddedExecutor, texts: list[Text], chance: random.Random) -> None:
        self._executor, self._chance = executor, chance
        self._running = {text.open(executor.engine): text for text in texts}
        self.different: set[str] = set()
        self.compared = self.drafted = self.accepted = 0

    def plainly(self) -> None:
        """Every text, one token of each session a pass."""
        while self._running:
            step = [_scheduled(session, session.pending, Selection()) for session in self._running]
            for scheduled, tokens in self._run(step):
                text = self._running[scheduled.session]
                text.plain += tokens
                if len(text.plain) >= text.length:
                    self._end(scheduled.session)

    def with_candidates(self) -> None:
        """Every text again; `different` gets the kinds and seeds of those that come out otherwise."""
        while self._running:
            some = [session for session in self._running if self._chance.random() < 0.8]
            step = [self._random_part(session) for session in some]
            for scheduled, tokens in self._run(step) if step else ():
                self._compare(scheduled, tokens)

    def _random_part(self, session: Session) -> ScheduledSequence:
        size = session.pending
        if size > 1 and self._chance.random() < 0.7:
            size = self._chance.randint(1, size)
        if size < session.pending or self._chance.random() < 0.1:
            return _scheduled(session, size, Selection())
        output = len(session.tokens) - session.request.prompt_length
        return _scheduled(session, size, self._tree(self._running[session].plain[output:]))

    def _tree(self, rest: list[int]) -> Selection:
        """Wholly right, right at half of its turns, or wrong."""
        right, count = self._chance.choice((1.0, 0.5, 0.5, 0.0)), self._chance.randint(1, MOST_NODES)
        tokens, parents, depths, way = list[int](), list[int](), list[int](), [ROOT]
        taken: set[tuple[int, int]] = set()
        vocabulary = self._executor.model.vocabulary_size
        while len(tokens) < count:
            follows = len(way) <= len(rest) and self._chance.random() < right
            parent = way[-1] if follows else self._chance.choice((way[-1], self._chance.randrange(-1, len(tokens))))
            token = rest[len(way) - 1] if follows else self._chance.randrange(vocabulary)
            if (parent, token) in taken:
                continue
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depths.append(1 if parent == ROOT else 1 + depths[parent])
            if follows:
                way.append(len(tokens) - 1)
        return Selection(tuple(tokens), tuple(parents), tuple(depths), distributions=(None,) * len(tokens))

    def _run(self, step: list[ScheduledSequence]) -> list[tuple[ScheduledSequence, list[int]]]:
        """The parts that decided tokens, and those."""
        for scheduled in step:
            assert scheduled.session.sequence is not None
            self._executor.kv.grow(scheduled.session.sequence, scheduled.tokens)
        decided = []
        for scheduled, outcome in zip(step, self._executor.execute(step), strict=True):
            if outcome is None:
                scheduled.session.computed += len(scheduled.pending)
                continue
            assert isinstance(outcome, AcceptanceResult), outcome
            tokens = [*(scheduled.selection.token_ids[node] for node in outcome.path), outcome.next_token]
            scheduled.session.commit(tokens, scheduled.base + len(outcome.path))
            self.drafted += len(scheduled.selection)
            self.accepted += len(outcome.path)
            decided.append((scheduled, tokens))
        return decided

    def _compare(self, scheduled: ScheduledSequence, tokens: list[int]) -> None:
        session, text = scheduled.session, self._running[scheduled.session]
        at = scheduled.base - session.request.prompt_length
        expected = text.plain[at : at + len(tokens)]
        self.compared += len(expected)
        if tokens[: len(expected)] != expected:
            self.different.add(f"{text.kind} seed {text.seed}")
            self._end(session)
        elif at + len(tokens) >= text.length:
            self._end(session)

    def _end(self, session: Session) -> None:
        assert session.sequence is not None
        del self._running[session]
        self._executor.kv.close(session.sequence)


def _scheduled(session: Session, size: int, selection: Selection) -> ScheduledSequence:
    start = session.computed
    tokens = session.tokens[start : start + size]
    return ScheduledSequence(session, len(session.tokens), start, tokens, size == session.pending, selection)


def wave(number: int, size: int, prompts: list[list[int]], chance: random.Random) -> list[Text]:
    """Half of its texts have one of two prompts; most others are short, some reach over several blocks."""
    shared = chance.sample(prompts, 2)
    kinds = list(KINDS)
    texts = []
    for at in range(size):
        prompt = chance.choice(shared) if at % 2 else chance.choice(prompts)
        texts.append(Text(kinds[at % 4], prompt[: chance.choice((20, 90, 200, 500))], number * size + at))
    return texts


def compare(executor: EmbeddedExecutor, texts: list[Text], chance: random.Random, alone: int = ALONE) -> Decoding:
    """Decodes texts plainly, the first `alone` by themselves, and again under random candidates; the second decoding,
    with what it found."""
    for text in texts[:alone]:
        Decoding(executor, [text], chance).plainly()
    Decoding(executor, texts[alone:], chance).plainly()
    again = Decoding(executor, texts, chance)
    again.with_candidates()
    return again


@torch.inference_mode()
def main(count: int, dtype: str, minutes: float, target: str, size: int) -> int:
    torch.set_num_threads(1)
    executor = EmbeddedExecutor(open_engine(target, dtype, kv_tokens=size * 1024))
    tokenizer = load_tokenizer(target)
    prompts = [tokenizer.encode(text).ids for text in held_out(200, characters=1500)]
    chance = random.Random(1)
    ends = time.monotonic() + 60.0 * minutes
    totals = dict.fromkeys(("texts", "compared", "drafted", "accepted"), 0)
    different: list[str] = []
    number = 0
    while totals["compared"] < count and time.monotonic() < ends:
        again = compare(executor, wave(number, size, prompts, chance), chance)
        number += 1
        different += sorted(again.different)
        for name, more in zip(totals, (size, again.compared, again.drafted, again.accepted), strict=True):
            totals[name] += more
        print(f"{totals['compared']} tokens, {len(different)} of {totals['texts']} texts differ", flush=True)
    print("\n".join(f"different: {each}" for each in different))
    row: Row = {"arithmetic": executor.model.dtype, "tokens compared": totals["compared"], "texts": totals["texts"]}
    row |= {"candidates": totals["drafted"], "accepted": totals["accepted"], "texts that differ": len(different)}
    limit = f" {minutes:g}" if minutes < UNLIMITED else ""
    own = target == SHIPPED
    name = f"equality_steps_{dtype}" if own else f"equality_steps_{Path(target).name}_{dtype}"
    named = ("" if own else f" --target {target}") + ("" if size == WAVE else f" --wave {size}")
    write(name, f"python -m benchmarks.equality_steps {count} {dtype}{limit}{named}", [row])
    return 1 if different else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equality_steps")
    parser.add_argument("tokens", nargs="?", type=int, default=100_000)
    parser.add_argument("dtype", nargs="?", default="float32")
    parser.add_argument("minutes", nargs="?", type=float, default=UNLIMITED)
    parser.add_argument("--wave", type=int, default=WAVE, help="texts at a time, each with KV for 1024 tokens")
    parser.add_argument("--target", default=SHIPPED, help="a folder or a hub id; default: the shipped target")
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    sys.exit(main(given.tokens, given.dtype, given.minutes, given.target, given.wave))
