"""Texts of the vLLM executor are the embedded executor's, whatever is drafted, and however sessions come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
from scipy.stats import chisquare

from slipstream.engine.engine import EngineLost
from slipstream.engine.models.checkpoint import describe_checkpoint
from slipstream.engine.sampler.logits_processor import SampledRow, process
from slipstream.errors import FailedPrecondition
from slipstream.rpc.proto_conversion import model_to_proto
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.tokenizer.grammar import Cursor
from slipstream.tokenizer.structured_output import StructuredOutput
from tests.support.grammars import LANGUAGES
from tests.vllm.conftest import HANGING_S
from tests.vllm.decoding import (
    SAMPLINGS,
    TARGET,
    VOCABULARY,
    Case,
    Decoded,
    Decoding,
    decode,
    guesses,
    no_guess,
    prompts,
    texts,
)
from tests.vllm.system import gone, until
from verifier_svc.estimators.cost_curve import BUCKETS, CostCurve
from verifier_svc.estimators.cost_measurement import REPEATS
from verifier_svc.estimators.cost_measurement import SESSIONS as MEASURED_SESSIONS
from verifier_svc.execution.vllm.messages import StepMasks
from verifier_svc.execution.vllm.requests import RequestStep
from verifier_svc.grammar.token_constraint import ReasoningBound, TokenRules

SESSIONS = 16
CASES = [
    Case(prompt, sampling, top_logprobs=3 if index % 3 == 0 else None)
    for index, (prompt, sampling) in enumerate(zip(prompts(SESSIONS), SAMPLINGS * 2, strict=True))
]


@pytest.fixture(scope="module")
def expected(embedded: Any) -> dict[Case, Decoded]:
    return decode(embedded, CASES)


@pytest.mark.parametrize("right", [None, 1.0, 0.8, 0.0], ids=["plain", "true", "half-wrong", "garbage"])
def test_texts_are_the_embedded_executor_s(executor: Any, expected: dict[Case, Decoded], right: float | None) -> None:
    """Every sampling parameter; prompts in chunks, chains of random length, a fifth of the sequences left out of each
    step."""
    guess = no_guess if right is None else guesses(texts(expected), right)
    decoded = decode(executor, CASES, guess, seed=3, skipped=0.2)
    assert texts(decoded) == texts(expected)
    accepted, drafted = (sum(getattr(each, name) for each in decoded.values()) for name in ("accepted", "drafted"))
    assert (drafted == 0) == (right is None)
    if right is not None:
        assert (accepted == drafted) == (right == 1.0) and (accepted == 0) == (right == 0.0)
    for case in CASES:
        ours, theirs = decoded[case].logprobs, expected[case].logprobs
        assert len(ours) == len(theirs) == (case.tokens if case.top_logprobs is not None else 0)
        assert [each.logprob for each in ours] == pytest.approx([each.logprob for each in theirs], abs=1e-4)
        assert [[token for token, _ in each.top] for each in ours] == [[t for t, _ in each.top] for each in theirs]
    assert executor.kv.blocks_free == executor.kv.blocks_total


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_grammars_hold_and_give_the_embedded_executor_s_text(executor: Any, embedded: Any, rule: str) -> None:
    """In steps with a session that has a least length: masks of both kinds come together."""
    cases = [
        Case(prompt, SamplingParams(temperature=0.7, seed=seed, acceptance=rule), 24, structure=language.structure)
        for seed, (prompt, language) in enumerate(zip(prompts(len(LANGUAGES)), LANGUAGES.values(), strict=True))
    ]
    rules = TokenRules(VOCABULARY, len(CASES[0].prompt) + 20, range(0, VOCABULARY, 3))
    cases.append(Case(CASES[0].prompt, SamplingParams(temperature=0.7, acceptance=rule), 24, rules=rules))
    plain = texts(decode(embedded, cases))
    ours, theirs = (decode(each, cases, guesses(plain, 0.8), seed=2) for each in (executor, embedded))
    assert texts(ours) == texts(theirs)
    assert rule == "rejection" or texts(ours) == plain
    assert sum(each.accepted for each in ours.values()) > 0


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_tokens_that_the_rules_of_a_session_forbid_are_never_chosen(
    executor: Any, embedded: Any, expected: dict[Case, Decoded], rule: str
) -> None:
    """A least length, bad words and a limit of reasoning. Candidates are also what the text would be without them."""
    cases, free = list[Case](), dict[Case, list[int]]()
    for near in CASES[:4]:
        text, prompt = expected[near].token_ids, near.prompt
        least, words = len(prompt) + 12, [(text[4],), tuple(text[8:10])]
        thinking = ReasoningBound(6, begin=prompt[-1], end=max(text) + 1)
        for rules in (TokenRules(VOCABULARY, least, text[:3], words), TokenRules(VOCABULARY, reasoning=thinking)):
            case = Case(prompt, replace(near.sampling, acceptance=rule), 24, rules=rules)
            cases.append(case)
            free[case] = text
    plain = texts(decode(embedded, cases))
    for known in (plain, free):
        ours, theirs = (decode(each, cases, guesses(known, 0.8), seed=2) for each in (executor, embedded))
        assert texts(ours) == texts(theirs)
        assert rule == "rejection" or texts(ours) == plain
        assert sum(each.accepted for each in ours.values()) > 0
        for case in cases:
            output, rules = ours[case].token_ids, case.rules
            assert rules is not None and output != free[case][: len(output)]
            assert not set(output[:12]) & set(rules.stop_token_ids)
            for word in rules.bad_words:
                assert word not in {tuple(output[at : at + len(word)]) for at in range(len(output))}
            assert rules.reasoning is None or rules.reasoning.end in output[:7]


def test_a_grammar_that_cannot_be_followed_ends_its_session_alone(
    executor: Any, embedded: Any, expected: dict[Case, Decoded], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(CASES[0].prompt, SamplingParams(temperature=0.0), structure=StructuredOutput("regex", "[a-f ]{30,60}"))
    mask, least = Cursor.mask, 5

    def limited(cursor: Cursor, path: list[int]) -> Any:
        if len(cursor._committed) + len(path) > least:
            raise FailedPrecondition("the grammar cannot be followed any further.", reason="GRAMMAR_GAVE_UP")
        return mask(cursor, path)

    plain = texts(decode(embedded, [case]))
    monkeypatch.setattr(Cursor, "mask", limited)
    decoded = decode(executor, [case, *CASES[:3]], guesses(plain | texts(expected), 1.0))
    failed = decoded.pop(case)
    assert failed.error is not None and failed.error.reason == "GRAMMAR_GAVE_UP"
    assert failed.token_ids == plain[case][: len(failed.token_ids)] and len(failed.token_ids) > 0
    assert texts(decoded) == {each: expected[each].token_ids for each in CASES[:3]}


def test_the_ratio_rule_judges_chains_as_the_embedded_executor_does(
    executor: Any, embedded: Any, expected: dict[Case, Decoded]
) -> None:
    """The same candidates with the same q, so the same coins: what is accepted is equal, too."""
    samplings = [
        SamplingParams(temperature=0.0, acceptance="rejection"),
        SamplingParams(temperature=0.8, seed=3, acceptance="rejection"),
        SamplingParams(temperature=0.9, seed=4, top_k=20, repetition_penalty=1.2, acceptance="rejection"),
        SamplingParams(temperature=1.0, seed=5, frequency_penalty=0.5, acceptance="rejection"),
    ]
    cases = [Case(case.prompt, sampling, 20) for case, sampling in zip(CASES, samplings, strict=False)]
    likely = {case: expected[near].token_ids for case, near in zip(cases, CASES, strict=False)}
    for case in cases:  # a session's step draws its candidates from the test's own chance
        ours, theirs = (decode(each, [case], guesses(likely, 0.9), seed=9)[case] for each in (executor, embedded))
        assert (ours.token_ids, ours.drafted, ours.accepted) == (theirs.token_ids, theirs.drafted, theirs.accepted)
    assert sum(decode(executor, [case], guesses(likely, 1.0))[case].accepted for case in cases) > 0


def test_a_session_moves_between_the_executors_in_mid_text(
    executor: Any, embedded: Any, expected: dict[Case, Decoded]
) -> None:
    for first, second in ((executor, embedded), (embedded, executor)):
        beginning = Decoding(first, guesses(texts(expected), 0.8))
        for case in CASES[:8]:
            beginning.open(case)
        for _ in range(12):
            beginning.step()
        ending = Decoding(second, guesses(texts(expected), 0.8))
        for case in list(beginning.live):
            ending.open(case, beginning.decoded[case].token_ids)
            beginning.close(case)
        assert ending.live and any(each.token_ids for each in ending.decoded.values())
        decoded = beginning.decoded | ending.run()
        assert texts(decoded) == {case: expected[case].token_ids for case in CASES[:8]}


def test_sessions_share_the_blocks_of_a_prefix_under_one_salt(executor: Any, expected: dict[Case, Decoded]) -> None:
    text = expected[CASES[1]]
    known = (*CASES[1].prompt, *text.token_ids)
    first, again, apart = (Case(known, CASES[1].sampling, 20, salt=salt) for salt in ("a", "a", "b"))
    plain = decode(executor, [first])[first].token_ids
    sequences = [executor.kv.begin(list(known), case.salt) for case in (again, apart)]
    assert sequences[0].length >= executor.kv.block_size and sequences[1].length == 0
    for sequence in sequences:
        executor.kv.close(sequence)
    for case in (again, apart):
        assert decode(executor, [case])[case].token_ids == plain


def test_a_rollback_into_a_shared_block_copies_it(executor: Any, expected: dict[Case, Decoded]) -> None:
    """The KV of a block that other sequences read is copied by the workers before it is written."""
    case, size = CASES[8], executor.kv.block_size
    shared = Case(case.prompt, case.sampling, case.tokens, salt="rollback")
    running = Decoding(executor)
    running.open(shared)
    while len(running.live[shared].tokens) < 2 * size + 8:
        running.step()
    session = running.live[shared]
    reader = executor.kv.begin(session.tokens, "rollback")
    keep = 2 * size - 2  # inside a block that the reader has, too
    assert reader.length >= 2 * size and keep > len(case.prompt)
    del session.tokens[keep:], running.decoded[shared].token_ids[keep - len(case.prompt) :]
    executor.kv.rollback(session.sequence, keep - 1)
    session.computed = keep - 1
    assert running.run()[shared].token_ids == expected[case].token_ids
    executor.kv.close(reader)
    assert executor.kv.blocks_free == executor.kv.blocks_total


@pytest.mark.parametrize("where", ["before the workers", "in the model", "in the sampler"])
def test_a_step_that_failed_may_run_again(
    executor: Any, expected: dict[Case, Decoded], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    running = Decoding(executor, guesses(texts(expected), 0.8))
    for case in CASES[:4]:
        running.open(case)
    requests = executor.requests
    schedule = requests.schedule

    def failing(step: list[RequestStep], **options: bool) -> Any:
        output = schedule(step, **options)
        if where == "before the workers":
            raise RuntimeError("a bug")
        output.num_scheduled_tokens["nobody"] = 1
        return output

    def wrong_masks(*args: Any) -> StepMasks:
        return StepMasks(["nobody"], *np.zeros((2, 1), np.int64), np.zeros((1, 512), np.uint8))

    broken = (executor, "_masks", wrong_masks) if where == "in the sampler" else (requests, "schedule", failing)
    for number in range(20):
        if number in (0, 3, 8):
            with monkeypatch.context() as patch, pytest.raises(RuntimeError):
                patch.setattr(*broken)
                running.step()
        running.step()
    assert texts(running.run()) == {case: expected[case].token_ids for case in CASES[:4]}


def test_tokens_follow_the_target_distribution(executor: Any, embedded: Any) -> None:
    """Chi-square of where each token fell in the target's own distribution, under candidates that are often wrong."""
    sampling = [SamplingParams(temperature=1.0, seed=seed, top_k=20) for seed in range(24)]
    cases = [Case(prompt, each) for prompt, each in zip(prompts(24), sampling, strict=True)]
    plain = texts(decode(embedded, cases))
    decoded = decode(executor, cases, guesses(plain, 0.7))
    assert sum(each.accepted for each in decoded.values()) > 200
    chance, where = np.random.default_rng(1), list[float]()
    for case in cases:
        where += _places(embedded, case, decoded[case].token_ids, chance)
    observed = np.bincount((np.array(where) * 20).astype(int), minlength=20)
    assert chisquare(observed).pvalue > 1e-3


def test_the_measurement_times_every_step_that_chains_can_fill(executor: Any) -> None:
    measured: dict[tuple[int, int], Sequence[float]] = {}

    class Recorded(CostCurve):
        def record(self, tokens: int, sessions: int, durations: Sequence[float]) -> None:
            assert (tokens, sessions) not in measured
            measured[tokens, sessions] = durations
            super().record(tokens, sessions, durations)

    curve, longest = Recorded(), executor.limits.max_candidates
    executor.measure_costs(curve, 48, 3600.0)
    assert longest == 8 and MEASURED_SESSIONS[:3] == (1, 4, 16)
    most = {1: 8, 4: 32, 16: 48}  # at most 1 + longest for each session
    assert measured.keys() == {(tokens, each) for each in most for tokens in BUCKETS if each <= tokens <= most[each]}
    assert all(len(durations) == REPEATS and min(durations) > 0.0 for durations in measured.values())
    for row in curve.rows(MEASURED_SESSIONS):
        assert row[0] > 0.0 and row == sorted(row)
    assert executor.kv.blocks_free == executor.kv.blocks_total


def test_a_worker_that_hangs_is_given_up(executor: Any, expected: dict[Case, Decoded]) -> None:
    """The last test of this executor."""
    decode(executor, CASES[:1])
    (worker,) = [psutil.Process(pid) for pid in executor.core.worker_pids]
    worker.suspend()
    with pytest.raises(EngineLost, match=f"did not answer for {HANGING_S:g} s"):
        decode(executor, CASES[:1])
    until(lambda: gone([worker]))
    with pytest.raises(EngineLost):
        decode(executor, CASES[:1])


def _places(embedded: Any, case: Case, output: list[int], chance: np.random.Generator) -> list[float]:
    """Randomised probability integral transform (Smith 1985) of each token, by one pass of the embedded engine."""
    from slipstream.engine.segment import Segment

    engine = embedded.engine
    sequence = engine.kv.begin_unshared(len(case.prompt) + len(output))
    segment = Segment(sequence, list(case.prompt), output[:-1], [-1, *range(len(output) - 2)])
    logits = engine.forward([segment]).logits
    engine.kv.close(sequence)
    p = process(logits, [SampledRow(case.sampling)] * len(logits)).double().softmax(-1).numpy()
    below = p.cumsum(-1) - p
    return [float(below[row, token] + chance.random() * p[row, token]) for row, token in enumerate(output)]


def test_the_arithmetic_that_is_announced_names_the_weights_and_the_type_of_vllms_workers(executor: Any) -> None:
    weights = describe_checkpoint(TARGET).revision.removeprefix("local-")[:12]
    model = model_to_proto(executor.model)
    assert (model.arithmetic, model.batch_invariant) == (f"{weights}/float32/vllm", False)
