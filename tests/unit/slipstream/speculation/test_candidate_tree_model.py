"""The candidate tree against a model that keeps absolute token paths and recomputes everything from scratch."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slipstream.errors import FailedPrecondition, InvalidArgument
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.frame import Frame, TreeLimits, check
from slipstream.speculation.selection import ROOT, Selection

Path = tuple[int, ...]
PROMPT = (9, 8, 7)


class Named:
    """What one source's generation named: number -> absolute path."""

    def __init__(self) -> None:
        self.generation, self.base = -1, -1
        self.names: dict[int, Path] = {}


class Naive:
    def __init__(self, committed: Path, limits: TreeLimits) -> None:
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
        if fate in ("added", "merged", "committed"):
            named.names[number] = path
        if fate == "added" or path in self.scores:
            self.scores[path] = max(self.scores.get(path, -math.inf), frame.log_probs[index])
        return fate

    def fate(self, path: Path) -> str:
        if len(path) <= len(self.committed):
            return "committed" if self.committed[: len(path)] == path else "diverged"
        if path in self.scores:
            return "merged"
        if len(path) - len(self.committed) > self.limits.depth:
            return "deep"
        return "added" if len(self.scores) < self.limits.nodes else "full"

    def commit(self, tokens: Path) -> None:
        self.committed += tokens
        self.recompute()

    def select(self, budget: int) -> list[tuple[Path, float]]:
        size = len(self.committed)
        sums = {self.committed: 0.0}
        order = list(self.scores)
        picked: list[tuple[Path, float]] = []
        while len(picked) < budget:
            open_paths = [path for path in order if path not in sums and path[:-1] in sums]
            if not open_paths:
                break
            best = max(open_paths, key=lambda path: sums[path[:-1]] + self.scores[path])  # max keeps the earliest
            sums[best] = sums[best[:-1]] + self.scores[best]
            picked.append((best[size:], sums[best]))
        return picked


LOG_PROBS = st.sampled_from([0.0, -0.25, -0.5, -1.0, -2.0])


class TreeAgainstModel(RuleBasedStateMachine):
    """Frames of two sources, stale, duplicated and reordered, between commits inside and outside the tree."""

    limits = TreeLimits(nodes=10, depth=5, window=64)

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
        fates = Counter(added=grafted.added, merged=grafted.merged, committed=grafted.committed)
        assert fates + Counter(grafted.dropped) == expected

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
        for budget in (10, 3):
            selection = tree.select_likeliest(budget)
            rows = zip(range(len(selection)), selection.path_log_probs, strict=True)
            assert [(selection.path(index), score) for index, score in rows] == model.select(budget)
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
