"""A model on several ranks: the leader is an engine like any, the others do what it tells them.

Only the leader has books: which block belongs to whom, what is known by which name. Before each pass it broadcasts the
whole step (`slipstream.engine.tensor_parallel.broadcast`), then all ranks run the same plan on their shards, in which
the library's collectives meet. Rows that are moved after a step are told with the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch

from slipstream.engine.engine import HiddenRequest, ModelOutput
from slipstream.engine.models.checkpoint import Checkpoint
from slipstream.engine.segment import Segment
from slipstream.engine.tensor_parallel.broadcast import BroadcastStep, Kind, decode_step, encode, encode_step, kind_of
from slipstream.engine.tensor_parallel.group import Group, GroupLost, Rank
from slipstream.engine.torch_engine import TorchEngine
from slipstream.errors import FailedPrecondition


class Line(Protocol):
    """From the leader to the other ranks: `slipstream.engine.tensor_parallel.group.Group`."""

    def send(self, words: list[int]) -> None: ...

    def receive(self) -> list[int]: ...

    def leave(self) -> None: ...


class LeadingEngine(TorchEngine):
    """What cannot be computed is refused before anybody hears of it. After that there is no way back: ranks that are
    not in step cannot be put in step again, so whatever fails then is GroupLost, now and ever after."""

    def __init__(
        self, checkpoint: Checkpoint, tokens: int, line: Line, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(checkpoint, tokens)
        self._line = line
        self._clock = clock
        self._told_at = clock()
        self.lost: GroupLost | None = None

    def _run_pass(self, segments: list[Segment], hidden: HiddenRequest | None = None) -> ModelOutput:
        if hidden is not None:
            raise FailedPrecondition("several ranks return no hidden states", reason="HIDDEN_STATES_MISSING")
        self._tell(encode_step(BroadcastStep(self._store.queued_moves, segments)))
        try:
            return super()._run_pass(segments)
        except BaseException as error:  # native libraries raise those too
            self._lose(error)

    def beat(self, every_s: float) -> None:
        """Tells the other ranks that the leader lives, if it told them nothing for `every_s`."""
        if self._clock() - self._told_at >= every_s:
            self._tell(encode(Kind.BEAT))

    def end(self) -> None:
        """The other ranks' work is over."""
        self._tell(encode(Kind.END))
        self._line.leave()

    def _tell(self, words: list[int]) -> None:
        if self.lost is not None:
            raise self.lost
        try:
            self._line.send(words)
        except BaseException as error:
            self._lose(error)
        self._told_at = self._clock()

    def _lose(self, error: BaseException) -> NoReturn:
        self.lost = error if isinstance(error, GroupLost) else GroupLost(f"{type(error).__name__}: {error}")
        raise self.lost from error


class FollowingEngine(TorchEngine):
    """A rank that keeps no books."""

    def __init__(self, checkpoint: Checkpoint, tokens: int, line: Line) -> None:
        super().__init__(checkpoint, tokens)
        self._line = line

    def follow(self) -> None:
        """Takes every step that the leader tells of, until it tells the end. Raises GroupLost when it tells nothing
        more, Internal for what it cannot mean."""
        while (kind := kind_of(words := self._line.receive())) is not Kind.END:
            if kind is Kind.STEP:
                self._take(words)
        self._line.leave()

    @torch.inference_mode()
    def _take(self, words: list[int]) -> None:
        step = decode_step(words, self.blocks_total, self.block_size)
        self._store.queue_moves(step.moves)
        self._run_pass(step.segments)


@dataclass(frozen=True, slots=True)
class GroupTimeouts:
    """Seconds that ranks wait for each other."""

    start_s: float
    """Until all have loaded their parts."""
    timeout_s: float
    """In every collective after that."""


def join(
    place: Rank, patience: GroupTimeouts, load: Callable[[torch.device], Checkpoint], tokens: int
) -> tuple[Group, Checkpoint]:
    """This process's group, and its part of a model, which `load` loads for a device; all ranks want KV for `tokens`.

    Raises what `load` raises, FailedPrecondition where ranks loaded different things, GroupLost where one is missing.
    """
    group = Group.join(place, patience.start_s)
    checkpoint = load(group.device)
    info = checkpoint.info
    group.agree(model=info.revision, vocabulary=info.fingerprint, dtype=info.dtype, kv_tokens=tokens)
    group.bound(patience.timeout_s)
    return group, checkpoint
