"""A leader and a follower over a line of the test's own: the follower needs nothing but what it is told."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from slipstream.engine.engine import HiddenRequest, ModelOutput, begin_unshared
from slipstream.engine.models.checkpoint import Checkpoint, load_checkpoint
from slipstream.engine.segment import Segment, Sequence
from slipstream.engine.tensor_parallel.broadcast import Kind, kind_of
from slipstream.engine.tensor_parallel.group import GroupLost
from slipstream.engine.tensor_parallel.parallel import FollowingEngine, LeadingEngine
from slipstream.errors import FailedPrecondition, Internal, InvalidArgument, OutOfRange
from tests.checkpoints import VOCABULARY, save_checkpoint

TOKENS = 1024
TREE = [-1, 0, -1, 2, 1, 4]
PATHS = [[], [0], [2], [2, 3], [0, 1, 4, 5]]


class Tape:
    """Keeps what was sent, and gives it out in order."""

    def __init__(self) -> None:
        self.messages: list[list[int]] = []
        self.read = self.left = 0
        self.broken = False

    def send(self, words: list[int]) -> None:
        if self.broken:
            raise GroupLost("cut")
        self.messages.append(words)

    def receive(self) -> list[int]:
        self.read += 1
        return self.messages[self.read - 1]

    def leave(self) -> None:
        self.left += 1


class Recording(FollowingEngine):
    """Keeps what it computed."""

    def __init__(self, checkpoint: Checkpoint, line: Tape) -> None:
        super().__init__(checkpoint, TOKENS, line)
        self.computed: list[torch.Tensor] = []

    def _run_pass(self, segments: list[Segment], hidden: HiddenRequest | None = None) -> ModelOutput:
        output = super()._run_pass(segments, hidden)
        self.computed.append(output.logits)
        return output


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = save_checkpoint("mistral", tmp_path_factory.mktemp("mistral"))
    return load_checkpoint(str(folder))


def some_tokens(source: random.Random, most: int) -> list[int]:
    return [source.randrange(1, VOCABULARY) for _ in range(source.randint(1, most))]


class Life:
    """Random sessions: begun with shared prefixes, grown, accepted, rolled back, closed, opened again."""

    def __init__(self, engine: LeadingEngine, seed: int) -> None:
        self._engine = engine
        self._source = random.Random(seed)
        self._shared = some_tokens(random.Random(0), 1) * 70
        self._sessions: list[Sequence] = []

    def step(self) -> torch.Tensor:
        self._disturb()
        chosen = self._source.sample(self._sessions, self._source.randint(1, len(self._sessions)))
        segments = [self._segment(sequence) for sequence in chosen]
        for segment in segments:
            self._engine.grow(segment.sequence, segment.tokens)
        logits = self._engine.forward(segments).logits
        for segment in segments:
            self._engine.keep(segment, self._source.choice(PATHS))
        return logits

    def _disturb(self) -> None:
        source, sessions = self._source, self._sessions
        if sessions and source.random() < 0.2:
            self._engine.close(sessions.pop(source.randrange(len(sessions))))
        if len(sessions) < 3:
            sessions.append(self._engine.begin([*self._shared, *some_tokens(source, 9)], "salt"))
        for sequence in sessions:
            if source.random() < 0.3:
                self._engine.rollback(sequence, source.randint(0, sequence.length))

    def _segment(self, sequence: Sequence) -> Segment:
        pending = self._shared[sequence.length :] or some_tokens(self._source, 6)
        nodes = [self._source.randrange(VOCABULARY) for _ in TREE]
        return Segment(sequence, pending, nodes, TREE, want_logits=self._source.random() < 0.8)


@pytest.mark.parametrize("seed", range(4))
def test_a_follower_computes_the_same_step_by_step(seed: int, checkpoint: Checkpoint) -> None:
    tape = Tape()
    leader, follower = LeadingEngine(checkpoint, TOKENS, tape), Recording(checkpoint, tape)
    life = Life(leader, seed)
    expected = [life.step() for _ in range(40)]
    leader.end()
    follower.follow()
    for mine, other in zip(expected, follower.computed, strict=True):
        assert torch.equal(mine, other)
    assert tape.left == 2 and leader.lost is None


def test_what_cannot_be_computed_is_refused_before_anybody_hears_of_it(checkpoint: Checkpoint) -> None:
    tape = Tape()
    leader = LeadingEngine(checkpoint, TOKENS, tape)
    sequence = begin_unshared(leader, 32)
    for segment, error in (
        (Segment(sequence, [VOCABULARY]), InvalidArgument),
        (Segment(sequence, []), InvalidArgument),
        (Segment(sequence, [1] * 33), OutOfRange),
    ):
        with pytest.raises(error):
            leader.forward([segment])
    assert not tape.messages and leader.lost is None
    assert leader.forward([Segment(sequence, [1])]).logits.shape == (1, VOCABULARY)


def test_several_ranks_refuse_hidden_states_before_they_hear_of_it(checkpoint: Checkpoint) -> None:
    tape = Tape()
    leader = LeadingEngine(checkpoint, TOKENS, tape)
    with pytest.raises(FailedPrecondition, match="no hidden states"):
        leader.forward([Segment(begin_unshared(leader, 32), [1])], HiddenRequest())
    assert leader.forward([Segment(begin_unshared(leader, 32), [1])]).hidden is None


@pytest.mark.parametrize("fault", ["line", "pass"])
def test_after_a_fault_that_others_do_not_share_nothing_is_computed_any_more(
    fault: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    tape = Tape()
    leader = LeadingEngine(checkpoint, TOKENS, tape)
    segment = Segment(begin_unshared(leader, 32), [1])
    if fault == "line":
        tape.broken = True
    else:

        def fail() -> None:
            raise MemoryError("none left")

        monkeypatch.setattr(leader._store, "apply_moves", fail)
    with pytest.raises(GroupLost, match=r"cut|MemoryError: none left") as lost:
        leader.forward([segment])
    assert lost.value.reason == "GROUP_LOST" and leader.lost is lost.value
    monkeypatch.undo()
    tape.broken = False
    sent = len(tape.messages)
    for again in (lambda: leader.forward([segment]), lambda: leader.beat(0.0), leader.end):
        with pytest.raises(GroupLost):
            again()
    assert len(tape.messages) == sent


def test_a_leader_that_told_nothing_for_a_while_tells_that_it_lives(checkpoint: Checkpoint) -> None:
    tape, now = Tape(), [0.0]
    leader = LeadingEngine(checkpoint, TOKENS, tape, clock=lambda: now[0])
    said: list[int] = []
    for now[0] in (1.0, 4.0, 4.9, 8.9, 9.0, 13.0):
        if now[0] == 4.9:
            leader.forward([Segment(begin_unshared(leader, 32), [1])])
        leader.beat(4.0)
        said.append(len(tape.messages))
    assert said == [0, 1, 2, 3, 3, 4]
    assert [kind_of(words) for words in tape.messages] == [Kind.BEAT, Kind.STEP, Kind.BEAT, Kind.BEAT]


def test_a_follower_does_not_do_what_makes_no_sense(checkpoint: Checkpoint) -> None:
    tape = Tape()
    leader = LeadingEngine(checkpoint, 2 * TOKENS, tape)
    begin_unshared(leader, TOKENS)
    leader.forward([Segment(begin_unshared(leader, TOKENS), [1])])
    follower = Recording(checkpoint, tape)
    with pytest.raises(Internal, match="outside the pool"):  # it has fewer blocks
        follower.follow()
    assert not follower.computed
