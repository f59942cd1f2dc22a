"""The candidate tree against a model that keeps absolute token paths and recomputes everything from scratch."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slipstream.candidates import ROOT, CandidateTree, Frame, Limits, Selection, check
from slipstream.errors import FailedPrecondition, InvalidArgument, OutOfRange
from slipstream.proposal import Proposal

Path = tuple[int, ...]
PROMPT = (9, 8, 7)


def chain(base: int, *tokens: int, generation: int = 0, first_node: int = 1, source: int = 0) -> Frame:
    return Frame(base, generation, first_node, tokens, tuple(-0.1 for _ in tokens), source=source)


def paths(tree: CandidateTree) -> set[Path]:
    selection = tree.select(10_000)
    return {selection.path(index) for index in range(len(selection))}


# --- the model ---


class Named:
    """What one source's generation named: number -> absolute path."""

    def __init__(self) -> None:
        self.generation, self.base = -1, -1
        self.names: dict[int, Path] = {}


class Naive:
    def __init__(self, committed: Path, limits: Limits) -> None:
        self.committed, self.limits = committed, limits
        self.sources: dict[int, Named] = {}
        self.scores: dict[Path, float] = {}  # live paths, oldest first

    def recompute(self) -> None:
        size = len(self.committed)
        for named in self.sources.values():
            named.names = {
                number: path
                for number, path in named.names.items()
                if path[:size] == self.committed or self.committed[: len(path)] == path
            }
        live = {path for named in self.sources.values() for path in named.names.values() if len(path) > size}
        self.scores = {path: score for path, score in self.scores.items() if path in live}

    def graft(self, frame: Frame) -> Counter[str]:
        named = self.sources.setdefault(frame.source, Named())
        if frame.generation < named.generation:
            return Counter(stale=len(frame.token_ids))
        if frame.base_length > len(self.committed):
            raise FailedPrecondition("ahead")
        if frame.generation > named.generation or named.base < 0:
            named.generation, named.base, named.names = frame.generation, frame.base_length, {}
            self.recompute()
        if frame.base_length != named.base:
            raise InvalidArgument("moved")
        return Counter(self.place(frame, index, named) for index in range(len(frame.token_ids)))

    def place(self, frame: Frame, index: int, named: Named) -> str:
        number, parent_number = frame.first_node + index, frame.parent_of(index)
        parent = named.names.get(parent_number) if parent_number else self.committed[: named.base]
        if number in named.names:
            return "duplicate"
        if parent is None:
            return "orphan"
        if len(named.names) >= self.limits.nodes + self.limits.window:
            return "full"
        path = (*parent, frame.token_ids[index])
        fate = self.fate(path)
        if fate in ("added", "merged"):
            named.names[number] = path
        if fate == "added" or path in self.scores:
            self.scores[path] = max(self.scores.get(path, -math.inf), frame.log_probs[index])
        return fate

    def fate(self, path: Path) -> str:
        if len(path) <= len(self.committed):
            return "merged" if self.committed[: len(path)] == path else "diverged"
        if path in self.scores:
            return "merged"
        if len(path) - len(self.committed) > self.limits.depth:
            return "deep"
        return "added" if len(self.scores) < self.limits.nodes else "full"

    def commit(self, tokens: Path) -> None:
        self.committed += tokens
        self.recompute()

    def rollback(self, length: int) -> None:
        self.committed = self.committed[:length]
        for named in self.sources.values():
            named.generation += named.base >= 0
            named.base, named.names = -1, {}
        self.recompute()

    def select(self, budget: int, max_depth: int) -> list[tuple[Path, float]]:
        size = len(self.committed)
        sums = {self.committed: 0.0}
        order = list(self.scores)
        picked: list[tuple[Path, float]] = []
        while len(picked) < budget:
            open_paths = [
                path for path in order if path not in sums and path[:-1] in sums and len(path) - size <= max_depth
            ]
            if not open_paths:
                break
            best = max(open_paths, key=lambda path: sums[path[:-1]] + self.scores[path])  # max keeps the earliest
            sums[best] = sums[best[:-1]] + self.scores[best]
            picked.append((best[size:], sums[best]))
        return picked


LOG_PROBS = st.sampled_from([0.0, -0.25, -0.5, -1.0, -2.0])


class TreeAgainstModel(RuleBasedStateMachine):
    """Frames of two sources, stale, duplicated and reordered, between commits inside and outside the tree, and
    rollbacks.
    """

    limits = Limits(nodes=10, depth=5, window=64)

    def __init__(self) -> None:
        super().__init__()
        self.tree = CandidateTree(PROMPT, self.limits)
        self.model = Naive(PROMPT, self.limits)
        self.sent: list[Frame] = []

    def send(self, frame: Frame) -> None:
        error: type[Exception] | None = None
        expected: Counter[str] = Counter()
        try:
            expected = self.model.graft(frame)
        except (FailedPrecondition, InvalidArgument) as raised:
            error = type(raised)
        if error is not None:
            with pytest.raises(error):
                self.tree.graft(frame)
            return
        grafted = self.tree.graft(frame)
        assert Counter(added=grafted.added, merged=grafted.merged) + Counter(grafted.dropped) == expected

    @rule(data=st.data(), source=st.integers(0, 1), ahead=st.integers(-2, 1), keep=st.integers(0, 4))
    def frame(self, data: st.DataObject, source: int, ahead: int, keep: int) -> None:
        named = self.model.sources.get(source, Named())
        generation, base = named.generation, named.base
        if keep == 0 or generation < 0 or base < 0:
            generation = max(0, generation + data.draw(st.integers(-1, 2)))
            base = max(0, len(self.model.committed) + ahead)
        size = data.draw(st.integers(0, 5))
        first = data.draw(st.integers(1, 1 + max(named.names, default=0)))
        tokens = tuple(data.draw(st.integers(0, 2)) for _ in range(size))
        scores = tuple(data.draw(LOG_PROBS) for _ in range(size))
        parents: tuple[int, ...] = ()
        if data.draw(st.booleans()):
            parents = tuple(data.draw(st.integers(0, first + index - 1)) for index in range(size))
        frame = Frame(base, generation, first, tokens, scores, parents, source=source)
        self.sent.append(frame)
        self.send(check(frame, 10, self.limits))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def again(self, data: st.DataObject) -> None:
        self.send(data.draw(st.sampled_from(self.sent)))

    @rule(tokens=st.lists(st.integers(0, 2), max_size=2))
    def commit_anything(self, tokens: list[int]) -> None:
        self.tree.commit(tokens)
        self.model.commit(tuple(tokens))

    @precondition(lambda self: self.model.scores)
    @rule(data=st.data())
    def commit_inside(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(self.model.scores)))[len(self.model.committed) :]
        self.tree.commit(path)
        self.model.commit(path)

    @rule(back=st.integers(0, 3))
    def rollback(self, back: int) -> None:
        length = max(0, len(self.model.committed) - back)
        self.tree.rollback(length)
        self.model.rollback(length)

    @rule(source=st.integers(0, 1))
    def forget(self, source: int) -> None:
        self.tree.forget(source)
        self.model.sources.pop(source, None)
        self.model.recompute()

    @invariant()
    def agrees(self) -> None:
        tree, model, size = self.tree, self.model, len(self.model.committed)
        assert tree.base_length == size
        assert tree.node_count == len(model.scores) <= self.limits.nodes
        assert tree.empty == (not model.scores)
        assert tree.depth == max((len(path) - size for path in model.scores), default=0) <= self.limits.depth
        for budget, max_depth in ((10, 5), (3, 5), (10, 2)):
            selection = tree.select(budget, max_depth)
            rows = zip(range(len(selection)), selection.path_log_probs, strict=True)
            assert [(selection.path(index), score) for index, score in rows] == model.select(budget, max_depth)
            assert_well_formed(selection)
        for source, named in model.sources.items():
            assert tree._sources[source].names.keys() == named.names.keys()


TestTreeAgainstModel = TreeAgainstModel.TestCase
TestTreeAgainstModel.settings = settings(max_examples=120, stateful_step_count=25, deadline=None)


def assert_well_formed(selection: Selection) -> None:
    for index, (token, parent, depth) in enumerate(
        zip(selection.token_ids, selection.parents, selection.depths, strict=True)
    ):
        assert ROOT <= parent < index
        assert depth == selection.depth(parent) + 1 == selection.depth(index)
        assert selection.child(parent, token) == index
    assert list(selection.path_log_probs) == sorted(selection.path_log_probs, reverse=True)


# --- examples ---


def test_a_chain_needs_no_parents_and_grows_by_frames() -> None:
    tree = CandidateTree(PROMPT)
    assert tree.graft(chain(3, 1, 2)).added == 2
    assert tree.graft(chain(3, 3, first_node=3)).added == 1
    assert tree.select(9).token_ids == (1, 2, 3)
    assert (tree.node_count, tree.depth, tree.empty) == (3, 3, False)


def test_a_commit_inside_the_tree_keeps_what_hangs_on_it_and_its_numbers() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(chain(3, 1, 2, 3))
    tree.commit([1, 2])
    assert paths(tree) == {(3,)}
    assert tree.graft(chain(3, 4, first_node=4)).added == 1
    assert tree.graft(Frame(3, 0, 5, (5,), (-1.0,), (2,))).added == 1
    assert paths(tree) == {(3,), (3, 4), (5,)}


def test_a_commit_outside_the_tree_empties_it_and_orphans_what_comes_later() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(chain(3, 1, 2))
    tree.commit([1, 5])
    assert tree.empty
    assert tree.graft(chain(3, 6, first_node=3)).dropped == {"orphan": 1}


def test_a_frame_on_an_older_prefix_catches_up_with_the_commits() -> None:
    tree = CandidateTree(PROMPT)
    tree.commit([1, 2])
    grafted = tree.graft(chain(3, 1, 2, 3))
    assert (grafted.added, grafted.merged) == (1, 2)
    assert paths(tree) == {(3,)}


def test_a_frame_whose_past_was_not_committed_dies_from_there_on() -> None:
    tree = CandidateTree(PROMPT)
    tree.commit([1, 2])
    assert tree.graft(chain(3, 1, 7, 3)).dropped == {"diverged": 1, "orphan": 1}


def test_candidates_beyond_the_committed_prefix_are_a_protocol_error_that_changes_nothing() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(chain(3, 1))
    with pytest.raises(FailedPrecondition):
        tree.graft(chain(4, 1, generation=1))
    assert paths(tree) == {(1,)}


def test_a_generation_cannot_move_its_root() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(chain(3, 1))
    with pytest.raises(InvalidArgument):
        tree.graft(chain(2, 1, first_node=2))


def test_a_new_generation_drops_what_only_the_old_one_vouched_for() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(chain(3, 1, 2))
    tree.graft(chain(3, 1, source=1))
    tree.graft(chain(3, 5, generation=1))
    assert paths(tree) == {(1,), (5,)}
    assert tree.graft(chain(3, 6)).dropped == {"stale": 1}


def test_two_drafters_share_a_node_and_the_surer_one_counts() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(Frame(3, 0, 1, (1,), (-2.0,)))
    grafted = tree.graft(Frame(3, 0, 1, (1, 2), (-1.0, -3.0), source=1))
    assert (grafted.added, grafted.merged) == (1, 1)
    assert tree.select(2).log_probs == (-1.0, -3.0)


def test_frames_of_a_rolled_back_generation_are_stale() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(chain(3, 1, 2))
    tree.commit([1])
    tree.rollback(2)
    assert tree.empty
    assert tree.graft(chain(3, 3, first_node=3)).dropped == {"stale": 1}
    assert tree.graft(chain(2, 3, generation=1)).added == 1


def test_a_rollback_beyond_the_prefix_is_refused() -> None:
    with pytest.raises(OutOfRange):
        CandidateTree(PROMPT).rollback(4)


def test_a_rollback_past_the_window_starts_over_there() -> None:
    tree = CandidateTree(list(range(100)), Limits(window=4))
    tree.rollback(10)
    assert tree.base_length == 10
    assert tree.graft(chain(10, 1)).added == 1
    assert tree.graft(chain(9, 1, generation=1)).dropped == {"orphan": 1}


def test_memory_stays_bounded_however_long_a_generation_lives() -> None:
    limits = Limits(nodes=8, depth=8, window=6)
    tree = CandidateTree(PROMPT, limits)
    for number in range(1, 400):  # the drafter stays one token ahead
        assert tree.graft(chain(3, number % 5, first_node=number)).added == 1
        tree.commit([number % 5])
        assert len(tree._sources[0].names) <= limits.nodes + limits.window
        assert len(tree._trail) <= limits.window + 1
    assert tree.graft(Frame(3, 0, 400, (1,), (-1.0,), (5,))).dropped == {"orphan": 1}


def test_a_drafter_that_repeats_itself_under_new_numbers_runs_into_a_limit() -> None:
    limits = Limits(nodes=8, window=4)
    tree = CandidateTree(PROMPT, limits)
    fates = [tree.graft(Frame(3, 0, number, (1,), (-1.0,), (0,))) for number in range(1, 50)]
    assert sum(fate.merged for fate in fates) == limits.nodes + limits.window - 1
    assert fates[-1].dropped == {"full": 1}


def test_nodes_beyond_the_limits_are_dropped_and_counted() -> None:
    tree = CandidateTree(PROMPT, Limits(nodes=3, depth=2))
    assert tree.graft(chain(3, 1, 2, 3, 4)).dropped == {"deep": 1, "orphan": 1}
    assert tree.graft(Frame(3, 0, 9, (5, 6), (-1.0, -1.0), (0, 0))).dropped == {"full": 1}


def test_a_selection_prefers_likely_paths_and_a_chain_only_the_first_born() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(Frame(3, 0, 1, (1, 2, 3, 4), (-3.0, -0.5, -0.5, -0.1), (0, 0, 1, 2)))
    assert tree.select(2).token_ids == (2, 4)
    assert tree.select(9).head(2) == tree.select(2)
    assert tree.select_chain(9).token_ids == (1, 3)
    assert tree.select_chain(9, max_depth=1).token_ids == (1,)
    assert tree.select(0) == Selection() == tree.select_chain(0)


def test_a_selection_carries_the_distributions() -> None:
    tree, proposal = CandidateTree(PROMPT), Proposal((1, 2), (3, 4))
    tree.graft(replace(chain(3, 1, 2), distributions=(proposal, None)))
    assert tree.select(2).distributions == (proposal, None)


def test_a_chain_survives_being_accepted_token_by_token() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(chain(3, *range(6)))
    for token in range(6):
        assert tree.select_chain(1).token_ids == (token,)
        tree.commit([token])
    assert tree.empty


@pytest.mark.parametrize(
    "frame",
    [
        chain(3, 10),
        chain(3, -1),
        chain(3, 1, first_node=0),
        chain(-1, 1),
        chain(3, 1, generation=-1),
        chain(3, *([1] * 257)),
        Frame(3, 0, 1, (1,), ()),
        Frame(3, 0, 1, (1,), (0.1,)),
        Frame(3, 0, 1, (1,), (math.nan,)),
        Frame(3, 0, 1, (1,), (-math.inf,)),
        Frame(3, 0, 1, (1, 2), (0.0, 0.0), (0,)),
        Frame(3, 0, 1, (1, 2), (0.0, 0.0), (0, 2)),
        Frame(3, 0, 1, (1, 2), (0.0, 0.0), (0, -1)),
        Frame(3, 0, 1, (1, 2), (0.0, 0.0), distributions=(None,)),
    ],
)
def test_a_frame_that_no_correct_drafter_sends_is_refused(frame: Frame) -> None:
    with pytest.raises(InvalidArgument):
        check(frame, 10, Limits())


def test_rounding_above_zero_is_clamped() -> None:
    assert check(Frame(3, 0, 1, (1, 2), (1e-7, -1.0)), 10, Limits()).log_probs == (0.0, -1.0)
