"""Targets with heads that know them, and sessions that decode with the candidates of the executor's own speculator."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.engine.factory import open_engine
from slipstream.proposers.eagle_checkpoint import save_head
from slipstream.speculation.sampling_params import SamplingParams
from tests.support.checkpoints import VOCABULARY
from tests.support.eagle_heads import LAYERS, knowing_head, save_easy_target
from tests.support.mtp_targets import EASY
from tests.vllm.decoding import Case, Decoded, Decoding, Guess, guesses, no_guess
from verifier_svc.draft_feed import StepDraft
from verifier_svc.execution.embedded import EmbeddedExecutor
from verifier_svc.session import DraftedSession

DEPTH, TOKENS = 3, 48
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=0.8, seed=2**63 + 5),
    SamplingParams(temperature=0.9, seed=3, top_k=40, top_p=0.9),
    SamplingParams(temperature=0.8, seed=5, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7),
    SamplingParams(temperature=0.0, repetition_penalty=1.2),
)
CASES = [
    Case(tuple((3 + at * number) % 190 for at in range(20 + 9 * number)), sampling, TOKENS)
    for number, sampling in enumerate(SAMPLINGS, 1)
]


def save_pair(folder: Path) -> tuple[str, str]:
    """A target, and an EAGLE 3 head that knows it."""
    target, head = folder / "target", folder / "head"
    save_easy_target(target, **EASY)
    save_head(knowing_head(target, LAYERS), head, str(target))
    return str(target), str(head)


def setting(method: str, model: str | None = None, depth: int = DEPTH) -> str:
    """VERIFIER_VLLM_SPECULATOR"""
    named = {} if model is None else {"model": model}
    return json.dumps({"method": method, "num_speculative_tokens": depth} | named)


def embedded(target: str) -> EmbeddedExecutor:
    return EmbeddedExecutor(open_engine(target, "float32", 8192))


class Speculated(Decoding):
    """Each step verifies the speculator's chain, or where `guess` says something else by chance that."""

    def __init__(self, executor: Any, guess: Guess = no_guess, *, seed: int = 1, skipped: float = 0.0) -> None:
        super().__init__(executor, self._candidates, seed, skipped)
        self._feed, self._other = executor.draft_feed, guess
        self._drafts: dict[DraftedSession, StepDraft] = {}
        self.drafted: list[int] = []
        """Tokens of each draft."""

    def open(self, case: Case, output: Sequence[int] = ()) -> None:
        super().open(case, output)
        self._feed.subscribe(self.live[case], wanting=True)

    def close(self, case: Case) -> None:
        self._feed.unsubscribe(self.live[case])
        super().close(case)

    def step(self) -> None:
        super().step()
        taken = self._feed.take()
        self._drafts |= taken
        self.drafted += [len(each.token_ids) for each in taken.values()]

    def rollback(self, case: Case, tokens: int) -> None:
        """Drops this many tokens of the output, as after an edit."""
        opened = self.live[case]
        assert opened.sequence is not None
        del opened.tokens[-tokens:]
        del self.decoded[case].token_ids[-tokens:]
        opened.computed = min(opened.computed, len(opened.tokens) - 1)
        self._executor.kv.rollback(opened.sequence, opened.computed)

    def _candidates(self, case: Case, at: int, chance: random.Random) -> list[int]:
        if self._other is not no_guess and chance.random() < 0.5:
            return self._other(case, at, chance)
        opened = self.live[case]
        draft = self._drafts.get(opened)
        return list(draft.token_ids) if draft is not None and draft.base == len(opened.tokens) else []


def near(texts: dict[Case, list[int]], right: float) -> Guess:
    """`guesses` of the toy targets' few tokens."""
    found = guesses(texts, right)
    return lambda case, at, chance: [token % VOCABULARY for token in found(case, at, chance)]


def speculate(executor: Any, cases: Sequence[Case], guess: Guess = no_guess, **options: Any) -> dict[Case, Decoded]:
    decoding = Speculated(executor, guess, **options)
    for case in cases:
        decoding.open(case)
    return decoding.run()
