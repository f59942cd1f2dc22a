"""A drafter's session against a model that knows only token lists, and its frames against the candidate tree."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from drafter_svc.session import Policy, Session
from drafter_svc.tree import Node
from slipstream.candidates import CandidateTree, Frame
from slipstream.errors import OutOfRange
from slipstream.sampling import Sampling

PROMPT = [3, 1, 2]
TOKENS = st.integers(0, 2)
RUNS = st.lists(TOKENS, min_size=1, max_size=4)


def new_session(tokens: list[int] | None = None, max_length: int = 1000) -> Session:
    return Session(
        epoch=1,
        sampling=Sampling(),
        policy=Policy(100, 0.0),
        tokens=list(tokens or PROMPT),
        prompt_length=len(PROMPT),
        max_length=max_length,
    )


def path_of(session: Session, node: Node) -> tuple[int, ...]:
    """The guessed tokens from below the root down to a live node."""
    tokens: list[int] = []
    while node is not session.tree.root:
        tokens.append(node.token)
        assert node.parent is not None
        node = node.parent
    return tuple(reversed(tokens))


def live_paths(session: Session) -> dict[tuple[int, ...], Node]:
    return {path_of(session, node): node for node in session.tree.nodes()}


class Drafting(RuleBasedStateMachine):
    """The model: committed tokens, the guessed paths beyond them, and what each KV row was computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.session = new_session()
        self.committed = list(PROMPT)
        self.paths: set[tuple[int, ...]] = set()
        self.rows: list[int] = []
        self.numbers: dict[int, tuple[int, ...]] = {}
        """By node number: the whole sequence it stands for, in this generation."""

    @rule(room=st.integers(1, 5))
    def step(self, room: int) -> None:
        session = self.session
        start, end = session.computed, len(session.tokens)
        stop = min(end, start + room)
        assert self.rows[:start] == session.tokens[:start]
        self.rows = session.tokens[:stop]
        session.computed = stop if stop < end else end - 1

    @rule(pick=st.integers(0, 100), token=TOKENS)
    def guess(self, pick: int, token: int) -> None:
        session = self.session
        places = [session.tree.root, *session.tree.nodes()]
        parent = places[pick % len(places)]
        path = (*path_of(session, parent), token)
        node = session.tree.add(parent, token, -0.5)
        assert (node is None) == (path in self.paths)
        self.paths.add(path)
        if node is not None:
            assert node.number not in self.numbers
            self.numbers[node.number] = (*self.committed, *path)

    @rule(tokens=RUNS)
    def commit_anything(self, tokens: list[int]) -> None:
        generation = self.session.tree.generation
        self.session.commit(len(self.committed), tokens)
        self.committed += tokens
        inside = tuple(tokens) in self.paths
        size = len(tokens)
        self.paths = {path[size:] for path in self.paths if path[:size] == tuple(tokens) and len(path) > size}
        assert (self.session.tree.generation == generation) == inside
        if not inside:
            assert not self.paths and self.session.tree.base_length == len(self.committed)
            self.numbers.clear()

    @precondition(lambda self: self.paths)
    @rule(pick=st.integers(0, 100))
    def commit_inside_the_tree(self, pick: int) -> None:
        self.commit_anything(list(sorted(self.paths)[pick % len(self.paths)]))

    @rule(gap=st.sampled_from([-1, 1, 7]))
    def commit_with_a_gap(self, gap: int) -> None:
        with pytest.raises(OutOfRange):
            self.session.commit(len(self.committed) + gap, [1])

    @rule(keep=st.integers(1, 40), more=st.lists(TOKENS, max_size=3))
    def replace(self, keep: int, more: list[int]) -> None:
        tokens = self.committed[:keep] + more
        generation = self.session.tree.generation
        self.session.replace(list(tokens))
        assert self.session.tree.generation > generation
        self.committed, self.paths = list(tokens), set()
        self.numbers.clear()

    @invariant()
    def mirrors_the_model(self) -> None:
        session = self.session
        assert session.tokens == self.committed
        assert set(live_paths(session)) == self.paths
        assert session.tree.node_count == len(self.paths)

    @invariant()
    def numbers_stand_for_what_they_stood_for(self) -> None:
        for path, node in live_paths(self.session).items():
            assert self.numbers[node.number] == (*self.committed, *path)

    @invariant()
    def believes_no_row_that_was_not_computed_from_its_tokens(self) -> None:
        computed = self.session.computed
        assert self.rows[:computed] == self.session.tokens[:computed]
        assert computed <= len(self.rows)
        assert self.session.pending > 0


Drafting.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestDrafting = Drafting.TestCase


class Wire(RuleBasedStateMachine):
    """A verifier's tree and a drafter's session, with both directions of the stream delayed as hypothesis likes."""

    def __init__(self) -> None:
        super().__init__()
        self.session = new_session()
        self.committed = list(PROMPT)
        self.tree = CandidateTree(PROMPT)
        self.source = 0
        self.frames: deque[tuple[int, Frame]] = deque()
        self.commands: deque[tuple[int, list[int] | None, int]] = deque()
        self.opened = 0
        self.held: set[tuple[int, ...]] = set()

    @rule(pick=st.integers(0, 100), token=TOKENS)
    def guess(self, pick: int, token: int) -> None:
        session = self.session
        places = [session.tree.root, *session.tree.nodes()]
        parent = places[pick % len(places)]
        node = session.tree.add(parent, token, -0.1)
        if node is None:
            return
        session.computed = len(session.tokens) - 1
        frame = Frame(
            session.tree.base_length,
            session.tree.generation,
            node.number,
            (token,),
            (-0.1,),
            (parent.number,),
            source=self.opened,
        )
        self.frames.append((self.opened, frame))
        self.held.add((*session.tokens, *path_of(session, node)))

    @precondition(lambda self: self.frames)
    @rule()
    def frame_arrives(self) -> None:
        source, frame = self.frames.popleft()
        if source == self.source:
            self.tree.graft(frame)

    @precondition(lambda self: len(self.frames) > 1)
    @rule(index=st.integers(0, 10))
    def frame_overtakes(self, index: int) -> None:
        self.frames.rotate(index)

    @rule(inside=st.booleans(), tokens=RUNS)
    def verifier_commits(self, inside: bool, tokens: list[int]) -> None:
        if inside:
            tokens = list(self.tree.select_chain(2).token_ids) + tokens[:1]
        self.commands.append((len(self.committed), tokens, self.source))
        self.committed += tokens
        self.tree.commit(tokens)

    @rule(back=st.integers(0, 5))
    def verifier_rolls_back(self, back: int) -> None:
        length = max(len(PROMPT), len(self.committed) - back)
        del self.committed[length:]
        self.tree.rollback(length)
        self.tree.forget(self.source)
        self.source += 1
        self.commands.append((0, None, self.source))
        self.commands.append((0, list(self.committed), self.source))

    @precondition(lambda self: self.commands)
    @rule()
    def command_arrives(self) -> None:
        base, tokens, source = self.commands.popleft()
        if tokens is None:
            _, tokens, source = self.commands.popleft()
            self.session, self.opened = new_session(tokens), source
        elif source == self.opened:
            self.session.commit(base, tokens)

    @invariant()
    def every_path_was_really_drafted(self) -> None:
        """A candidate path stands for a sequence that the drafter held when it sent the path's last node."""
        chosen = self.tree.select(256)
        for node in range(len(chosen)):
            path = tuple(self.committed) + chosen.path(node)
            assert path in self.held


Wire.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestWire = Wire.TestCase


def grown(session: Session, *tokens: int) -> list[Node]:
    """A chain of guesses below the root."""
    nodes = [session.tree.root]
    for token in tokens:
        node = session.tree.add(nodes[-1], token, -0.5)
        assert node is not None
        nodes.append(node)
    return nodes[1:]


def test_a_tree_that_is_used_up_goes_on_in_its_generation() -> None:
    session = new_session()
    assert [node.number for node in grown(session, 5, 6)] == [1, 2]
    session.commit(3, [5, 6])
    assert (session.tree.generation, session.tree.base_length, session.tree.node_count) == (1, 3, 0)
    assert [node.number for node in grown(session, 7)] == [3]


def test_a_bonus_token_beyond_the_tree_starts_a_generation_on_it() -> None:
    session = new_session()
    grown(session, 5)
    session.commit(3, [5, 9])
    assert (session.tree.generation, session.tree.base_length, session.tokens) == (2, 5, [*PROMPT, 5, 9])
    assert [node.number for node in grown(session, 7)] == [1]


def test_the_frontier_is_the_likeliest_unexpanded_nodes_first() -> None:
    session = new_session()
    root = session.tree.root
    unlikely, likely = session.tree.add(root, 1, -2.0), session.tree.add(root, 2, -0.1)
    assert likely is not None
    root.expanded = True
    below = session.tree.add(likely, 3, -0.1)
    assert session.frontier(9) == [likely, below, unlikely]
    likely.expanded = True
    assert session.frontier(1) == [below]


def test_a_dead_node_gets_no_children() -> None:
    session = new_session()
    first, second = grown(session, 5, 6)
    session.commit(3, [5, 9])
    assert session.tree.add(first, 7, -0.1) is None
    assert session.tree.add(second, 7, -0.1) is None


@pytest.mark.parametrize(
    ("nodes", "probability", "wants"),
    [(0, 0.0, False), (1, 0.0, False), (2, 0.0, True), (9, 0.5, True), (9, 0.7, False)],
)
def test_a_session_wants_no_more_than_its_policy(nodes: int, probability: float, wants: bool) -> None:
    session = new_session()
    session.tree.root.expanded = True
    grown(session, 5)
    session.policy = Policy(nodes, probability)
    assert bool(session.frontier(4)) is wants


def test_a_session_never_guesses_beyond_its_length() -> None:
    session = new_session(max_length=5)
    session.tree.root.expanded = True
    (first,) = grown(session, 5)
    assert session.frontier(4) == [first]
    first.expanded = True
    session.tree.add(first, 6, -0.1)
    assert session.frontier(4) == []
