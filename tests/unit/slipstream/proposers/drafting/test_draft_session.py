"""A drafter's session against a model that knows only token lists, and its frames against the candidate tree."""

from __future__ import annotations

import gc
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slipstream.errors import OutOfRange
from slipstream.proposers.draft_tree import DEEPEST, ROOT, UNSENT, DraftNode
from slipstream.proposers.drafting.session import PREPARED, UNSENT_SHARE, DraftPolicy, DraftSession
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.frame import Frame
from slipstream.speculation.sampling_params import SamplingParams

PROMPT = [3, 1, 2]
TOKENS = st.integers(0, 2)
RUNS = st.lists(TOKENS, min_size=1, max_size=4)


def new_session(tokens: list[int] | None = None, max_length: int = 1000) -> DraftSession:
    return DraftSession(
        epoch=1,
        sampling=SamplingParams(),
        policy=DraftPolicy(100, 0.0),
        tokens=list(tokens or PROMPT),
        prompt_length=len(PROMPT),
        max_length=max_length,
    )


def path_of(session: DraftSession, node: DraftNode) -> tuple[int, ...]:
    """The guessed tokens from below the root down to a live node."""
    tokens: list[int] = []
    while node is not session.tree.root:
        tokens.append(node.token)
        assert node.parent is not None
        node = node.parent
    return tuple(reversed(tokens))


def told_paths(session: DraftSession) -> set[tuple[int, ...]]:
    return {path for path, node in live_paths(session).items() if node.number != UNSENT}


def held_by(tree: CandidateTree) -> set[tuple[int, ...]]:
    """The candidate paths of the receiver."""
    chosen = tree.select_likeliest(1000)
    return {chosen.path(node) for node in range(len(chosen))}


def frame_of(session: DraftSession, told: list[DraftNode], source: int = 0) -> Frame:
    assert all(node.parent is not None and node.parent.number < node.number for node in told)
    assert [node.number for node in told] == list(range(told[0].number, told[0].number + len(told)))
    return session.tree.frame(told, source)


def live_paths(session: DraftSession) -> dict[tuple[int, ...], DraftNode]:
    return {path_of(session, node): node for node in session.tree.nodes()}


class Drafting(RuleBasedStateMachine):
    """The model: committed tokens, the guessed paths beyond them, those that were told, and what each KV row was
    computed from. What is told reaches a verifier's tree at once, which must hold the same."""

    def __init__(self) -> None:
        super().__init__()
        self.session = new_session()
        self.receiver = CandidateTree(PROMPT)
        self.committed = list(PROMPT)
        self.paths: set[tuple[int, ...]] = set()
        self.told: set[tuple[int, ...]] = set()
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

    @rule(pick=st.integers(0, 100), token=TOKENS, log_prob=st.sampled_from([-2.0, -0.5, -0.01]))
    def guess(self, pick: int, token: int, log_prob: float) -> None:
        session = self.session
        places = [session.tree.root, *session.tree.nodes()]
        parent = places[pick % len(places)]
        path = (*path_of(session, parent), token)
        node = session.tree.add(parent, token, log_prob)
        assert (node is None) == (path in self.paths)
        assert node is None or node.number == UNSENT
        self.paths.add(path)

    @rule(max_nodes=st.sampled_from([0, 1, 5, 100]), probability=st.sampled_from([0.0, 0.1, 0.6]))
    def policy(self, max_nodes: int, probability: float) -> None:
        self.session.policy = DraftPolicy(max_nodes, probability)

    @rule(now=st.integers(0, 100), idle=st.booleans())
    def tell(self, now: int, idle: bool) -> None:
        session = self.session
        told = session.take_nodes_to_send(now / 1000.0, idle=idle)
        if not told:
            return
        frame = frame_of(session, told)
        assert self.receiver.graft(frame).added == len(told)
        for node in told:
            assert node.number not in self.numbers
            self.numbers[node.number] = (*self.committed, *path_of(session, node))
            self.told.add(path_of(session, node))

    @rule(tokens=RUNS)
    def commit_anything(self, tokens: list[int]) -> None:
        tree, generation, path, size = self.session.tree, self.session.tree.generation, tuple(tokens), len(tokens)
        self.session.commit(len(self.committed), tokens)
        self.receiver.commit(tokens)
        self.committed += tokens
        inside, guessed = path in self.told, path in self.paths
        self.paths = {path[size:] for path in self.paths if path[:size] == tuple(tokens) and len(path) > size}
        self.told = {path[size:] for path in self.told if path[:size] == tuple(tokens) and len(path) > size}
        assert (tree.generation == generation) == inside
        if not inside:
            assert (tree.base_length, tree.root.number) == (len(self.committed), ROOT)
            assert not self.told and (guessed or not self.paths)
            self.numbers.clear()

    @precondition(lambda self: self.paths)
    @rule(pick=st.integers(0, 100))
    def commit_inside_the_tree(self, pick: int) -> None:
        self.commit_anything(list(sorted(self.paths)[pick % len(self.paths)]))

    @rule(gap=st.sampled_from([-1, 1, 7]))
    def commit_with_a_gap(self, gap: int) -> None:
        with pytest.raises(OutOfRange):
            self.session.commit(len(self.committed) + gap, [1])

    @invariant()
    def mirrors_the_model(self) -> None:
        session = self.session
        assert session.tokens == self.committed
        assert set(live_paths(session)) == self.paths
        assert session.tree.node_count == len(self.paths)
        assert session.tree.sent_count == len(self.told)

    @invariant()
    def the_receiver_holds_what_was_told(self) -> None:
        assert held_by(self.receiver) == told_paths(self.session) == self.told

    @invariant()
    def numbers_stand_for_what_they_stood_for(self) -> None:
        for path, node in live_paths(self.session).items():
            if node.number != UNSENT:
                assert self.numbers[node.number] == (*self.committed, *path)

    @invariant()
    def what_is_kept_grows_with_the_live_nodes_only(self) -> None:
        tree = self.session.tree
        assert len(tree._open) <= tree.node_count + 1 and len(tree._unsent) <= tree.node_count

    @invariant()
    def believes_no_row_that_was_not_computed_from_its_tokens(self) -> None:
        computed = self.session.computed
        assert self.rows[:computed] == self.session.tokens[:computed]
        assert computed <= len(self.rows)
        assert self.session.pending > 0


Drafting.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
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
        self.overtaken = False

    @rule(pick=st.integers(0, 100), token=TOKENS, log_prob=st.sampled_from([-2.0, -0.1]))
    def guess(self, pick: int, token: int, log_prob: float) -> None:
        session = self.session
        places = [session.tree.root, *session.tree.nodes()]
        session.tree.add(places[pick % len(places)], token, log_prob)

    @rule(max_nodes=st.sampled_from([2, 100]))
    def tell(self, max_nodes: int) -> None:
        session = self.session
        session.policy = DraftPolicy(max_nodes, 0.0)
        if told := session.take_nodes_to_send(0.0, idle=True):
            session.computed = len(session.tokens) - 1
            self.frames.append((self.opened, frame_of(session, told, self.opened)))
            self.held.update((*session.tokens, *path_of(session, node)) for node in told)

    @precondition(lambda self: self.frames)
    @rule()
    def frame_arrives(self) -> None:
        source, frame = self.frames.popleft()
        if source == self.source:
            self.tree.graft(frame)

    @precondition(lambda self: len(self.frames) > 1)
    @rule(index=st.integers(0, 10))
    def frame_overtakes(self, index: int) -> None:
        self.overtaken = True
        self.frames.rotate(index)

    @rule(inside=st.booleans(), tokens=RUNS)
    def verifier_commits(self, inside: bool, tokens: list[int]) -> None:
        if inside:
            tokens = list(self.tree.select_first_children(2).token_ids) + tokens[:1]
        self.commands.append((len(self.committed), tokens, self.source))
        self.committed += tokens
        self.tree.commit(tokens)

    @rule(back=st.integers(0, 5))
    def verifier_rolls_back(self, back: int) -> None:
        length = max(len(PROMPT), len(self.committed) - back)
        del self.committed[length:]
        self.tree = CandidateTree(self.committed)  # it is opened again
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

    @rule()
    def everything_arrives(self) -> None:
        while self.commands:
            self.command_arrives()
        while self.frames:
            self.frame_arrives()

    @invariant()
    def every_path_was_really_drafted(self) -> None:
        """A candidate path stands for a sequence that the drafter held when it told the path's last node."""
        for path in held_by(self.tree):
            assert (*self.committed, *path) in self.held

    @invariant()
    def once_all_has_arrived_both_sides_hold_the_same(self) -> None:
        """Else the drafter would go on below nodes that the verifier does not know."""
        if not self.commands and not self.frames and not self.overtaken:
            assert held_by(self.tree) == told_paths(self.session)


Wire.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestWire = Wire.TestCase


def grown(session: DraftSession, *tokens: int, log_prob: float = -0.5) -> list[DraftNode]:
    """A chain of guesses below the root."""
    nodes = [session.tree.root]
    for token in tokens:
        node = session.tree.add(nodes[-1], token, log_prob)
        assert node is not None
        nodes.append(node)
    return nodes[1:]


def told(session: DraftSession) -> list[int]:
    """The numbers of what is told now."""
    return [node.number for node in session.take_nodes_to_send(0.0, idle=True)]


def test_a_tree_that_is_used_up_goes_on_in_its_generation() -> None:
    session = new_session()
    grown(session, 5, 6)
    assert told(session) == [1, 2]
    session.commit(3, [5, 6])
    assert (session.tree.generation, session.tree.base_length, session.tree.node_count) == (1, 3, 0)
    grown(session, 7)
    assert told(session) == [3]


def test_a_bonus_token_beyond_the_tree_starts_a_generation_on_it() -> None:
    session = new_session()
    grown(session, 5)
    told(session)
    session.commit(3, [5, 9])
    assert (session.tree.generation, session.tree.base_length, session.tokens) == (2, 5, [*PROMPT, 5, 9])
    grown(session, 7)
    assert told(session) == [1]


def test_a_commit_of_unsent_nodes_keeps_their_descendants_for_the_next_generation() -> None:
    session = new_session()
    _, _, last = grown(session, 5, 6, 7)
    session.commit(3, [5, 6])
    assert (session.tree.generation, session.tree.base_length) == (2, 5)
    assert list(session.tree.nodes()) == [last] and told(session) == [1]


def test_nodes_too_deep_for_a_verifiers_tree_are_sent_only_once_commits_bring_them_near() -> None:
    """It would be dropped there, and all that follows it in its generation with it."""
    session, receiver = new_session(), CandidateTree(PROMPT)
    session.policy = DraftPolicy(1000, 0.0)
    grown(session, *range(100), log_prob=-0.01)
    for base in range(0, 100, 10):
        if nodes := session.take_nodes_to_send(0.0, idle=True):
            assert not receiver.graft(frame_of(session, nodes)).dropped
        assert receiver.depth == min(DEEPEST, 100 - base)
        tokens = list(range(base, base + 10))
        session.commit(3 + base, tokens)
        receiver.commit(tokens)
    assert session.tree.generation == 1


def test_nothing_is_guessed_below_the_depth_of_a_verifier_s_tree() -> None:
    session = new_session()
    session.policy = DraftPolicy(1000, 0.0)
    session.tree.root.expanded = True
    *above, last = grown(session, *range(DEEPEST), log_prob=-0.01)
    for node in above:
        node.expanded = True
    assert session.frontier(4) == []
    session.commit(3, [0])
    assert session.frontier(4) == [last]


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
    [
        (0, 0.0, False),
        (1, 0.0, False),
        (2, 0.0, True),
        (9, 0.5, True),
        (9, PREPARED * 0.6, True),
        (9, PREPARED * 0.61, False),
    ],
)
def test_a_session_expands_nodes_only_within_its_policy(nodes: int, probability: float, wants: bool) -> None:
    """Room counts what was told; paths count down to PREPARED times less likely than what may be told."""
    session = new_session()
    session.tree.root.expanded = True
    grown(session, 5)  # of probability exp(-0.5), about 0.607
    assert told(session) == [1]
    session.policy = DraftPolicy(nodes, probability)
    assert bool(session.frontier(4)) is wants


def test_unsent_candidates_are_bounded_too() -> None:
    session = new_session()
    session.policy = DraftPolicy(2, 0.9)
    for token in range(UNSENT_SHARE * 2):
        assert session.frontier(1) == [session.tree.root]
        session.tree.add(session.tree.root, token, -3.0)
    assert session.frontier(1) == []
    session.commit(3, [99])
    assert session.frontier(1) == [session.tree.root]


def test_a_session_never_guesses_beyond_its_length() -> None:
    session = new_session(max_length=5)
    session.tree.root.expanded = True
    (first,) = grown(session, 5)
    assert session.frontier(4) == [first]
    first.expanded = True
    session.tree.add(first, 6, -0.1)
    assert session.frontier(4) == []


def test_dead_nodes_are_freed_without_the_garbage_collector() -> None:
    """Commits inside the tree for ever: no old root may keep the next one, no branch its parent."""
    session = new_session(max_length=100_000)
    gc.collect()
    before = sum(type(known) is DraftNode for known in gc.get_objects())
    gc.disable()
    try:
        for _ in range(300):
            for parent in (session.tree.root, *list(session.tree.nodes())[:6]):
                for token in (1, 2, 3):
                    session.tree.add(parent, token, -0.5)
            session.commit(len(session.tokens), [1])
        alive = sum(type(known) is DraftNode for known in gc.get_objects())
    finally:
        gc.enable()
    assert alive - before <= session.tree.node_count + 10
