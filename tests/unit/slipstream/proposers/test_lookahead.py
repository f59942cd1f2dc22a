"""Lookahead: the window's iterations, checked against a plain one by positions, its pool, and its place in a step."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest

from drafter_svc.config import DrafterConfig
from slipstream.engine.factory import open_engine
from slipstream.engine.segment import Segment
from slipstream.errors import InvalidArgument
from slipstream.proposers.base import ROOT, Proposal, ProposerContext, ProposerSettings, open_proposer
from slipstream.proposers.lookahead import LookaheadProposer, LookaheadText
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.frame import Frame
from slipstream.speculation.lookahead_window import REST, TRIAL, LookaheadSize, LookaheadWindow, NgramPool, WindowRows
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.v1 import types_pb2
from tests.support.checkpoints import save_checkpoint
from verifier_svc.acceptance.result import AcceptanceResult
from verifier_svc.config import VerifierConfig
from verifier_svc.estimators.cost_curve import CostCurve
from verifier_svc.execution.embedded import EmbeddedExecutor
from verifier_svc.execution.executor import ExecutorLimits, ScheduledSequence
from verifier_svc.scheduling.planner import Planner
from verifier_svc.scheduling.step_plan import StepLimits, StepPlan
from verifier_svc.session import Session, SessionRequest
from verifier_svc.sources.candidate_sources import CandidateSources

PROMPT = [5, 9, 14, 3, 8]
SIZE = LookaheadSize(4, 4, 3)


def target(text: list[int]) -> int:
    """A model's likeliest next token, which depends on the last three."""
    return (7 * text[-1] + 3 * text[-2] + text[-3] + 5) % 23


def open_window(tokens: list[int], size: LookaheadSize = SIZE, ends: frozenset[int] = frozenset()) -> LookaheadWindow:
    return LookaheadWindow(size, tokens, ends, NgramPool(size.guesses))


def newest_of(rows: WindowRows, tokens: list[int]) -> tuple[int, ...]:
    """What a pass over the rows gives, each of them seeing the text and the rows above it."""
    return tuple(target([*tokens, *path]) for path in paths_of(rows))


def paths_of(rows: WindowRows) -> list[list[int]]:
    """The tokens down to each of the newest rows."""
    paths: list[list[int]] = []
    for row in rows.newest:
        paths.append([])
        while row != ROOT:
            paths[-1].insert(0, rows.token_ids[row])
            row = rows.parents[row]
    return paths


def run_round(window: LookaheadWindow, accepted: int, room: int = 99) -> WindowRows:
    rows = window.rows(room, 0.0)
    newest = newest_of(rows, window.tokens)
    committed: list[int] = []
    for _ in range(accepted + 1):
        committed.append(target([*window.tokens, *committed]))
    window.tokens += committed
    window.advance(newest, len(rows), committed)
    return rows


def test_the_rows_are_a_chain_with_a_column_below_each_of_its_nodes() -> None:
    rows = open_window(list(PROMPT)).rows(99, 0.0)
    assert len(rows) == SIZE.width * (SIZE.gram - 1) - 1
    assert rows.parents == (-1, 0, 1, -1, 0, 1, 2, 3, 4, 5, 6)
    assert rows.newest == (7, 8, 9, 10)


def test_windows_iterate_as_a_plain_loop_over_positions_does() -> None:
    """The plain loop keeps what each level holds at each position, and knows nothing of columns that move."""
    tokens = list(PROMPT)
    window = open_window(tokens)
    for accepted in (0, 0, 2, 0, 1, 0, 3, 0, 0, 0, 0):
        root = len(tokens) - 1
        levels = [{root + level + at: token for at, token in enumerate(row)} for level, row in enumerate(window.levels)]
        levels[0][root] = tokens[-1]
        expected = []
        for at in range(SIZE.width):
            path = [levels[0][root + step] for step in range(1, at + 1)]
            path += [levels[level][root + at + level] for level in range(1, SIZE.gram - 1)]
            expected.append(target([*tokens, *path]))
        before = {key: window.pool.after(key) for key in range(23)}
        rows = run_round(window, accepted)
        assert list(newest_of(rows, tokens[: root + 1])) == expected
        moved = accepted
        for level, row in enumerate(window.levels):  # one iteration newer, and as far right as the text grew
            older = levels[level + 1] if level + 2 < SIZE.gram else dict(enumerate(expected, root + SIZE.gram - 1))
            kept = [older[root + 1 + moved + level + at] for at in range(SIZE.width - moved)]
            assert row[: SIZE.width - moved] == kept and len(row) == SIZE.width
        for at in range(SIZE.width if window.passes > SIZE.gram - 2 else 0):
            gram = (*(levels[level][root + at + level] for level in range(1, SIZE.gram - 1)), expected[at])
            assert any(gram == known for known, _ in window.pool.after(levels[0][root + at]))
        if window.passes <= SIZE.gram - 2:
            assert before == {key: window.pool.after(key) for key in range(23)}


def test_ngrams_are_what_the_target_itself_goes_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a target that looks at one token alone, every n-gram of the pool is a piece of text that it would write. Where
    the first column was guessed, the committed token stands in front instead."""
    monkeypatch.setattr(f"{__name__}.target", lambda text: (5 * text[-1] + 3) % 23)
    window = open_window(list(PROMPT))
    for _ in range(12):
        run_round(window, 0)
    grams = [(first, *gram) for first in range(23) for gram, _ in window.pool.after(first)]
    assert len(grams) > 8
    for gram in grams:
        assert list(gram[2:]) == [(5 * token + 3) % 23 for token in gram[1:-1]]
    assert sum(gram[1] == (5 * gram[0] + 3) % 23 for gram in grams) > 0.6 * len(grams)


def test_a_window_takes_whole_columns_and_no_row_that_others_need() -> None:
    window = open_window(list(PROMPT))
    for room in range(15):
        rows = window.rows(room, 0.0)
        assert (len(rows) <= room and (len(rows) + 1) % 3 == 0) or not rows.token_ids
    assert len(window.rows(7, 0.0).newest) == 2 and not len(window.rows(1, 0.0))
    for room in (99, 5, 0, 2, 8):
        run_round(window, 1, room)
        assert all(len(level) == SIZE.width for level in window.levels)
    assert len(LookaheadWindow(LookaheadSize(4, 2, 1), [1], frozenset(), NgramPool(1)).rows(9, 0.0)) == 3


def test_a_window_that_brings_less_than_it_costs_rests_and_is_tried_again() -> None:
    window = open_window(list(PROMPT))
    ran = []
    for _ in range(600):
        rows = window.rows(99, 0.01)
        window.tokens.append(1)
        window.advance((2,) * len(rows.newest), len(rows), [1])  # nothing that it finds is ever accepted
        ran.append(bool(len(rows)))
    assert ran[0] and window.gain < 0.01
    assert sum(ran[-2 * (REST + TRIAL) :]) == 2 * TRIAL
    for _ in range(60):  # two accepted tokens that its n-grams foretold, each round
        window.found.add(window.tokens[-1], (1, 1, 1))
        window.tokens += [1, 1, 1]
        window.advance((1,) * 4, 11, [1, 1, 1])
    assert window.gain > 0.1 and len(window.rows(99, 0.1)) == 11


def test_ends_of_text_and_broken_numbers_never_stay_in_a_window() -> None:
    window = open_window(list(PROMPT), ends=frozenset({22}))
    for _ in range(4):
        window.tokens.append(5)
        window.advance((-1, 22, 7, -1), 11, [5])
        assert all(0 <= token < 22 for level in window.levels for token in level)
    assert all(min(gram) >= 0 for key in range(23) for gram, _ in window.pool.after(key))


def test_guesses_of_one_first_token_are_one_tree_the_likeliest_child_with_more_hits() -> None:
    text = LookaheadText(LookaheadSize(4, 3, 2))
    text.read([7, 1, 2, 7, 1, 3, 7, 1, 3, 9, 7])
    found = text.look_up([], 8)
    assert [(node.parent, node.token) for node in found] == [(0, 1), (1, 3), (1, 2)]
    assert found[1].probability > found[2].probability
    assert sum(node.probability for node in found[1:]) < 1.0
    assert [node.token for node in text.look_up([4, 3], 1)] == [9]  # the newest
    assert text.look_up([11], 8) == []


def test_a_window_feeds_the_proposals_of_its_own_sequence_alone() -> None:
    proposer = LookaheadProposer(SIZE)
    tokens = [1, 2, 3]
    window = proposer.open_window("a", tokens, frozenset())
    window.pool.add(3, (8, 9, 10))
    here, there = (
        ProposerContext(handle, tokens, 3, 3, 50, SamplingParams(temperature=0.0), expand=[ROOT])
        for handle in ("a", "b")
    )
    first, second = proposer.propose([here, there])
    assert isinstance(first, Proposal) and [node.token for node in first.nodes] == [8, 9, 10]
    assert all(node.log_prob < 0 and math.isfinite(node.log_prob) for node in first.nodes)
    assert isinstance(second, Proposal) and not second.nodes
    proposer.close_sequence("a")
    assert not proposer._texts


@pytest.mark.parametrize("text", ["", "4,3", "4,1,3", "0,3,3", "65,3,3", "a,3,3", "4,3,3,3", "4,17,1"])
def test_a_size_that_no_window_has_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="lookahead window"):
        open_proposer("lookahead", ProposerSettings(lookahead=text))
    with pytest.raises(InvalidArgument, match="lookahead window"):
        VerifierConfig(model="m", lookahead=text)


def test_a_drafter_of_its_own_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"inside a verifier \(VERIFIER_LOCAL_DRAFTERS=lookahead\)"):
        DrafterConfig(method="lookahead")


def session(candidates: int, limit: int = 12) -> Session:
    request = SessionRequest(
        id="s",
        number=1,
        epoch=1,
        sampling=SamplingParams(temperature=0.0),
        prompt_length=len(PROMPT),
        max_length=64,
        stop_token_ids=frozenset(),
        max_draft_tokens=limit,
    )
    made = Session(
        request,
        tokens=list(PROMPT),
        credit=None,
        tree=CandidateTree(PROMPT),
        history=None,
        computed=len(PROMPT) - 1,
    )
    made.name_source(1, "model")
    if candidates:
        made.tree.graft(Frame(len(PROMPT), 0, 1, tuple(range(candidates)), (-0.01,) * candidates, source=1))
    made.window = open_window(made.tokens)
    return made


def planned(sessions: list[Session], limits: StepLimits) -> StepPlan:
    async def plan() -> StepPlan:
        return Planner(CandidateSources(types_pb2.ModelInfo(), 0.0), limits, CostCurve(free_candidates=True)).plan(
            sessions
        )

    return asyncio.run(plan())


LIMITS = StepLimits(512, 256, 0.0, always_speculate=True)


@pytest.mark.parametrize(("candidates", "rows"), [(0, 11), (1, 11), (3, 8), (8, 2), (11, 0), (12, 0)])
def test_window_rows_fill_what_other_candidates_leave_of_a_sessions_limit(candidates: int, rows: int) -> None:
    [scheduled] = planned([session(candidates)], LIMITS).step
    assert (len(scheduled.selection), len(scheduled.window)) == (candidates, rows)
    assert scheduled.tokens == 1 + candidates + rows <= 13
    assert scheduled.plain.tokens == 1


def test_window_rows_fill_what_a_step_has_left_and_no_more() -> None:
    step = planned([session(3), session(0), session(0)], replace(LIMITS, step_tokens=20)).step
    assert [len(each.window) for each in step] == [8, 5, 0] and sum(each.tokens for each in step) <= 20
    chains = replace(LIMITS, executor=ExecutorLimits(verifies_trees=False))
    assert not len(planned([session(0)], chains).step[0].window)


def test_the_embedded_executor_runs_a_window_beside_candidates(tmp_path: Path) -> None:
    """Each row of the window sees the text and what stands above it, no candidate, and changes no result."""
    engine = open_engine(str(save_checkpoint("llama", tmp_path, seed=0)), "float32", 1024)
    executor = EmbeddedExecutor(engine)

    def likeliest(path: list[int]) -> int:
        text = [*PROMPT, *path]
        sequence = engine.kv.begin_unshared(len(text))
        token = int(engine.forward([Segment(sequence, text)]).logits[0].argmax())
        engine.kv.close(sequence)
        return token

    made = session(0)
    right = likeliest([])
    made.tree.graft(Frame(len(PROMPT), 0, 1, (3, right, 4), (-0.1, -0.2, -0.3), (0, 0, 2), source=1))
    made.computed = 0
    made.sequence = engine.kv.begin((), None)
    assert made.window is not None
    selection, rows = made.tree.select_likeliest(3), made.window.rows(99, 0.0)
    scheduled = ScheduledSequence(made, len(PROMPT), 0, list(PROMPT), True, selection, rows)
    engine.kv.grow(made.sequence, scheduled.tokens)
    [outcome] = executor.execute([scheduled])
    assert isinstance(outcome, AcceptanceResult) and [selection.token_ids[node] for node in outcome.path] == [right]
    assert outcome.next_token == likeliest([right])
    assert list(outcome.window) == [likeliest(path) for path in paths_of(rows)] and len(set(outcome.window)) > 1
    assert made.sequence.length == len(PROMPT) + 1
