"""The target's hidden states on their way from its forward passes to the drafting methods that read them.

A method subscribes for one session. A step asks the engine for hidden states only where a session in it has a
subscriber, and keeps the rows that subscribers want: those of committed tokens and of accepted candidates, as soon as
acceptance is decided. Rows are numbered by their token, so what is computed again (after a preemption, or in a step
that is run in parts) is recognised and left. Tokens found in the prefix cache are not computed and have no rows: a
method reads a text from the first token that was.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from slipstream.engine.engine import Engine, HiddenRequest, HiddenStates
from slipstream.engine.sampler import coupled_sampling
from slipstream.engine.segment import Segment
from slipstream.proposers.base import HiddenNeed, HiddenRows
from verifier_svc.session import DraftedSession, Session

MOST_BYTES = 1 << 30
"""Bytes of rows that wait for methods: a prompt of 32,000 tokens for three layers of an 8 B model and its last one."""


class ComputedRows(NamedTuple):
    """Rows of one session in a step's output that belong to committed tokens."""

    session: DraftedSession
    first: int
    """The number of the first row's token."""
    rows: list[int]
    """Indices into the step's rows."""
    complete: bool
    """True when the last of them decided a token."""


class WrittenText(NamedTuple):
    """A text of the target's own."""

    tokens: list[int]
    states: HiddenStates
    """[tokens, hidden] of every token."""
    chosen: list[int]
    """The target's likeliest token behind each."""


class HiddenSubscription:
    """Filled on the model's thread, emptied on the event loop: each counts what it did."""

    def __init__(self, need: HiddenNeed) -> None:
        self.need = need
        self.end = 0
        """The number of the token behind the last row that came."""
        self._rows: deque[HiddenRows] = deque()
        self._added = self._taken = 0
        """Bytes; what was dropped counts as not added."""

    @property
    def waiting_bytes(self) -> int:
        return self._added - self._taken

    def add(self, rows: HiddenRows) -> None:
        """Keeps what is new in these rows."""
        if rows.end <= self.end:
            return
        while not self.need.every_row and self.drop_oldest():
            pass
        self._rows.append(rows)
        self._added += rows.states.size_bytes
        self.end = rows.end

    def drop_oldest(self) -> bool:
        """Whether there was something to drop: the method goes on behind it, as behind tokens found in a cache."""
        try:
            self._added -= self._rows.popleft().states.size_bytes
        except IndexError:  # the event loop may have taken it just now
            return False
        return True

    def take(self) -> tuple[HiddenRows, ...]:
        """The rows that came since the last call."""
        taken: list[HiddenRows] = []
        while self._rows:
            with contextlib.suppress(IndexError):  # the model's thread may have dropped it just now
                taken.append(self._rows.popleft())
                self._taken += taken[-1].states.size_bytes
        return tuple(taken)


class HiddenFeed:
    """The hidden states of one engine's target. Rows wait while drafting pauses, or a method has no room: of more than
    `most_bytes` the session that has the most loses its oldest ones."""

    def __init__(self, engine: Engine, most_bytes: int = MOST_BYTES) -> None:
        self._engine = engine
        self._most_bytes = most_bytes
        self._of_session: dict[DraftedSession, tuple[HiddenSubscription, ...]] = {}

    def check(self, need: HiddenNeed) -> None:
        """Raises FailedPrecondition or InvalidArgument for hidden states that the target does not return. Runs a pass
        on the model's own thread."""
        sequence = self._engine.kv.begin_unshared(1)
        try:
            self._engine.forward([Segment(sequence, [0])], HiddenRequest(need.layers))
        finally:
            self._engine.kv.close(sequence)

    def write_texts(self, need: HiddenNeed, start: int, count: int, length: int) -> list[WrittenText]:
        """`count` texts of `length` tokens, or as many as have room, that the target samples behind the token `start`,
        at temperature 1. Runs as many passes as a text has tokens, on the model's own thread. Raises like `check`, and
        ResourceExhausted where not even one has room."""
        count = max(1, min(count, self._engine.kv.blocks_free * self._engine.kv.block_size // (length + 32)))
        sequences = [self._engine.kv.begin_unshared(length) for _ in range(count)]
        tokens, chosen = [[start] for _ in sequences], [list[int]() for _ in sequences]
        passes: list[HiddenStates] = []
        try:
            for position in range(length):
                segments = [Segment(each, text[-1:]) for each, text in zip(sequences, tokens, strict=True)]
                output = self._engine.forward(segments, HiddenRequest(need.layers))
                assert output.hidden is not None
                passes.append(output.hidden)
                drawn, _ = coupled_sampling.choose(
                    output.logits.float(), [False] * count, range(count), [position] * count
                )
                for row, segment in enumerate(segments):
                    self._engine.kv.keep(segment, [])
                    tokens[row].append(int(drawn[row]))
                    chosen[row].append(int(output.logits[row].argmax()))
        finally:
            for sequence in sequences:
                self._engine.kv.close(sequence)
        return [WrittenText(text[:-1], _row_of(passes, row), chosen[row]) for row, text in enumerate(tokens)]

    def subscribe(self, session: DraftedSession, need: HiddenNeed) -> HiddenSubscription:
        """From the next step of the session on."""
        subscription = HiddenSubscription(need)
        self._of_session[session] = (*self._of_session.get(session, ()), subscription)
        return subscription

    def unsubscribe(self, session: DraftedSession, subscription: HiddenSubscription) -> None:
        left = tuple(each for each in self._of_session.get(session, ()) if each is not subscription)
        if left:
            self._of_session[session] = left
        else:
            self._of_session.pop(session, None)

    def request(self, sessions: Iterable[Session]) -> HiddenRequest | None:
        """Names the hidden states that a step over these sessions has to return; None: none."""
        needs = [each.need for session in sessions for each in self._of_session.get(session, ())]
        if not needs:
            return None
        return HiddenRequest(tuple(sorted({layer for need in needs for layer in need.layers})))

    def deliver(self, computed: Sequence[ComputedRows], states: HiddenStates) -> None:
        for part in computed:
            for subscription in self._of_session.get(part.session, ()):
                if subscription.need.every_row:
                    first = max(part.first, min(subscription.end, part.first + len(part.rows)))
                    rows = part.rows[first - part.first :]
                elif part.complete:
                    first, rows = part.first + len(part.rows) - 1, part.rows[-1:]
                else:
                    continue
                if rows:
                    subscription.add(HiddenRows(first, _select(states, rows, subscription.need.layers)))
        self._drop_most()

    def _drop_most(self) -> None:
        waiting = [each for subscriptions in list(self._of_session.values()) for each in subscriptions]
        while sum(each.waiting_bytes for each in waiting) > self._most_bytes:
            if not max(waiting, key=lambda each: each.waiting_bytes).drop_oldest():
                break


def _select(states: HiddenStates, rows: list[int], layers: tuple[int, ...]) -> HiddenStates:
    """Copies: a view would keep the whole step's rows."""
    index = torch.tensor(rows, device=states.last.device)
    return HiddenStates(
        states.last.index_select(0, index), {each: states.layers[each].index_select(0, index) for each in layers}
    )


def _row_of(passes: list[HiddenStates], row: int) -> HiddenStates:
    """One row of every pass."""
    layers = {number: torch.stack([each.layers[number][row] for each in passes]) for number in passes[0].layers}
    return HiddenStates(torch.stack([each.last[row] for each in passes]), layers)
