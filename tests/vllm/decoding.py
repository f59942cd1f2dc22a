"""Decodes sessions on any executor step by step, with candidates of a test's choice; no clock, no network."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from slipstream.engine.sampler.token_history import TokenHistory
from slipstream.errors import SlipstreamError
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.sampling_params import SamplingParams, TokenLogprobs
from slipstream.speculation.selection import Selection
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.tokenizer.vocabulary import load_tokenizer
from tests.support.enumeration import chain
from tests.support.grammars import END, compiled
from tests.support.instant_masks import AT_ONCE
from verifier_svc.acceptance.result import AcceptanceResult
from verifier_svc.execution.executor import ScheduledSequence, StepExecutor
from verifier_svc.grammar.constraints import GrammarConstraint
from verifier_svc.grammar.token_constraint import TokenConstraint, TokenRules
from verifier_svc.session import Session, SessionRequest

ROOT = Path(__file__).resolve().parents[2]
TARGET, DRAFT = str(ROOT / "models/target"), str(ROOT / "models/draft")
VOCABULARY = 4096
CHUNK = 16
"""Prompt tokens of one session in one step."""


@dataclass(frozen=True, eq=False)
class Case:
    prompt: tuple[int, ...]
    sampling: SamplingParams
    tokens: int = 40
    top_logprobs: int | None = None
    structure: StructuredOutput | None = None
    rules: TokenRules | None = None
    salt: str = ""


@dataclass
class Decoded:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    error: SlipstreamError | None = None


Guess = Callable[[Case, int, random.Random], list[int]]
"""Candidates behind the first so many tokens of a case's output."""


def no_guess(case: Case, at: int, chance: random.Random) -> list[int]:
    return []


def guesses(texts: dict[Case, list[int]], right: float, most: int = 8) -> Guess:
    """Candidates from known texts, each right with this probability and else another token; chains of random length."""

    def guess(case: Case, at: int, chance: random.Random) -> list[int]:
        known = texts[case][at : at + chance.randint(0, most)]
        return [token if chance.random() < right else other_than(token, chance) for token in known]

    return guess


def other_than(token: int, chance: random.Random) -> int:
    return (token + chance.randrange(1, VOCABULARY)) % VOCABULARY


def session(case: Case, output: Sequence[int] = ()) -> Session:
    """A session that was opened with the prompt and the beginning of its output."""
    tokens, length = [*case.prompt, *output], len(case.prompt)
    history = None
    if case.sampling.penalised:
        history = TokenHistory(case.prompt)
        history.append(output)
    request = SessionRequest(
        id="s",
        number=1,
        epoch=1,
        sampling=case.sampling,
        prompt_length=length,
        max_length=length + case.tokens,
        stop_token_ids=frozenset() if case.structure is None else frozenset({END}),
        max_draft_tokens=32,
        cache_salt=case.salt,
        top_logprobs=case.top_logprobs,
    )
    opened = Session(
        request,
        tokens=tokens,
        credit=None,
        tree=CandidateTree(tokens),
        history=history,
    )
    if case.structure is not None:
        opened.constraint = GrammarConstraint(
            compiled(case.structure), tokens[length:], drawn=not case.sampling.coupled, workers=AT_ONCE
        )
    if case.rules is not None:
        opened.constraint = TokenConstraint(case.rules, tokens, length, drawn=not case.sampling.coupled)
    return opened


class Decoding:
    """Sessions of some cases on one executor."""

    def __init__(self, executor: StepExecutor, guess: Guess = no_guess, seed: int = 1, skipped: float = 0.0) -> None:
        self._executor = executor
        self._guess = guess
        self._chance = random.Random(seed)
        self._skipped = skipped
        self.live: dict[Case, Session] = {}
        self.decoded: dict[Case, Decoded] = {}

    def open(self, case: Case, output: Sequence[int] = ()) -> None:
        opened = session(case, output)
        opened.sequence = self._executor.kv.begin(opened.tokens, case.salt)
        opened.computed = opened.sequence.length
        self.live[case], self.decoded[case] = opened, Decoded(list(output))

    def close(self, case: Case) -> None:
        opened = self.live.pop(case)
        assert opened.sequence is not None
        self._executor.kv.close(opened.sequence)

    def run(self) -> dict[Case, Decoded]:
        while self.live:
            self.step()
        return self.decoded

    def step(self) -> None:
        chosen = [case for case in self.live if self._chance.random() >= self._skipped]
        if not chosen:
            return
        step = [self.scheduled(case) for case in chosen]
        for each in step:
            assert each.session.sequence is not None
            self._executor.kv.grow(each.session.sequence, each.tokens)
        for case, each, outcome in zip(chosen, step, self._executor.execute(step), strict=True):
            if isinstance(outcome, SlipstreamError):
                self.decoded[case].error = outcome
                self.close(case)
            elif outcome is None:
                each.session.computed += len(each.pending)
            else:
                self._commit(case, each, outcome)

    def scheduled(self, case: Case) -> ScheduledSequence:
        opened = self.live[case]
        pending = opened.tokens[opened.computed :][:CHUNK]
        complete = len(pending) == opened.pending
        candidates = Selection()
        if complete and (room := opened.request.max_length - len(opened.tokens) - 1) > 0:
            at = len(opened.tokens) - opened.request.prompt_length
            candidates = _drawn(self._guess(case, at, self._chance)[:room], case, self._chance)
        if opened.constraint is not None:
            tokens = candidates.token_ids
            for depth, token in enumerate(tokens):  # as the candidate tree asks
                if opened.constraint.admits(tokens[:depth], token) is False:
                    # Under a ratio rule a forbidden candidate stays, and none below it; else masks end the chain.
                    candidates = candidates if case.sampling.coupled else candidates.head(depth)
                    break
        return ScheduledSequence(opened, len(opened.tokens), opened.computed, pending, complete, candidates)

    def _commit(self, case: Case, scheduled: ScheduledSequence, result: AcceptanceResult) -> None:
        opened, decoded = scheduled.session, self.decoded[case]
        path = [scheduled.selection.token_ids[node] for node in result.path]
        token_ids, _ = opened.clip([*path, result.next_token])
        opened.commit(token_ids, scheduled.base + len(path))
        decoded.token_ids += token_ids
        decoded.logprobs += result.logprobs[: len(token_ids)]
        decoded.drafted += len(scheduled.selection)
        decoded.accepted += len(path)
        ended = case.structure is not None and token_ids[-1] == END
        if ended or len(opened.tokens) >= opened.request.max_length:
            self.close(case)


def _drawn(token_ids: list[int], case: Case, chance: random.Random) -> Selection:
    """The candidates, under a ratio rule each with a distribution that it may have been drawn from."""
    if case.sampling.coupled:
        return chain(tuple(token_ids), lambda path: None)
    given: list[DraftDistribution] = []
    for token in token_ids:
        others = tuple({chance.randrange(VOCABULARY) for _ in range(4)} - {token})
        given.append(DraftDistribution((token, *others), (40000, *(chance.randint(1, 9000) for _ in others))))
    return chain(tuple(token_ids), lambda path: given[len(path)])


def decode(
    executor: StepExecutor, cases: Sequence[Case], guess: Guess = no_guess, **options: float
) -> dict[Case, Decoded]:
    decoding = Decoding(executor, guess, **options)  # type: ignore[arg-type]
    for case in cases:
        decoding.open(case)
    return decoding.run()


def texts(decoded: dict[Case, Decoded]) -> dict[Case, list[int]]:
    return {case: each.token_ids for case, each in decoded.items()}


def prompts(count: int) -> list[tuple[int, ...]]:
    """Prompts of 20 to 60 tokens that the shipped models were not trained on."""
    tokenizer = load_tokenizer(TARGET)
    words = (ROOT / "README.md").read_text().split()
    chance = np.random.default_rng(5)
    starts = chance.integers(0, len(words) - 60, count)
    found = [" ".join(words[start : start + 30]) for start in starts]
    return [tuple(tokenizer.encode(text).ids[: 20 + 5 * (index % 9)]) for index, text in enumerate(found)]


SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.0, seed=2**63 + 5),
    SamplingParams(temperature=0.9, seed=3, top_k=40, top_p=0.9),
    SamplingParams(temperature=0.9, seed=4, min_p=0.1),
    SamplingParams(temperature=0.8, seed=5, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, logit_bias={5: 3.0, 199: -5.0}),
    SamplingParams(temperature=1.0, seed=7, top_p=0.8, logit_bias={9: 2.0}, allowed_token_ids=tuple(range(0, 999, 3))),
)
