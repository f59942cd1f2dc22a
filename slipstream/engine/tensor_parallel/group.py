"""The processes that run one model together: a process group with a leader, and no wait in it without an end.

`torchrun` starts the processes and tells each its place. `torch.distributed` is neither authenticated nor encrypted:
whoever reaches its ports is a rank. So ranks of one host talk over its loopback interface, unless `GLOO_SOCKET_IFNAME`
says otherwise; over several hosts that variable must name a private one.

All of a rank's collectives must come in the order of the others' ranks, so from one thread at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from slipstream.engine.engine import EngineLost
from slipstream.engine.model_thread import ModelThread
from slipstream.errors import FailedPrecondition, InvalidArgument

LEADER = 0
HEAD_WORDS = 1024
"""A message up to this size is one broadcast, a longer one is two."""


class GroupLost(EngineLost):
    """A rank is gone, hangs, or failed alone: nothing this group computes can be finished, so its processes end."""

    def __init__(self, why: object) -> None:
        super().__init__(f"the group of ranks is lost: {why}", reason="GROUP_LOST")


@dataclass(frozen=True, slots=True)
class Rank:
    """The place of this process in its group, as `torchrun` sets it in the environment."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == LEADER

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Rank:
        """From RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; without them the process is alone. Raises
        InvalidArgument for what cannot be read."""
        given = os.environ if environ is None else environ
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if "WORLD_SIZE" not in given:
            return cls()
        try:
            return cls(*(int(given[name]) for name in names))
        except (KeyError, ValueError) as error:
            raise InvalidArgument(
                f"{', '.join(names)} must all be numbers ({error}); start ranks with torchrun."
            ) from error


class Group:
    """Joined by every rank with `Group.join`; `send` is for the leader, `receive` for the others."""

    def __init__(self, place: Rank, device: torch.device) -> None:
        self.place = place
        self.device = device

    @classmethod
    def join(cls, place: Rank, start_s: float) -> Group:
        """Meets the other ranks; until `bound` a rank may be late by `start_s`, for weights take their time to load."""
        if place.local_size == place.size and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # The library puts a rank's weights on the accelerator wherever there is one. Messages are gloo's in any case:
        # they are made and read on the CPU.
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", place.local_rank) if cuda else torch.device("cpu")
        with _losing():
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=start_s))
        return cls(place, device)

    def bound(self, timeout_s: float) -> None:
        """From now on every collective operation, the model's own included, raises when it has waited for so long."""
        for group in distributed_c10d._world.pg_map:
            distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)

    def agree(self, **facts: object) -> None:
        """Raises FailedPrecondition if the ranks do not say the same."""
        digests = [hashlib.sha256(repr(fact).encode()).digest() for fact in facts.values()]
        mine = torch.tensor([int.from_bytes(digest[:7], "big") for digest in digests])
        with _losing():
            least, most = mine.clone(), mine.clone()
            dist.all_reduce(least, dist.ReduceOp.MIN)
            dist.all_reduce(most, dist.ReduceOp.MAX)
        differing = [name for name, low, high in zip(facts, least, most, strict=True) if low != high]
        if differing:
            raise FailedPrecondition(
                f"The ranks differ in {', '.join(differing)}; give all of them the same model and settings.",
                reason="RANKS_DIFFER",
            )

    def send(self, words: list[int]) -> None:
        """A message to all other ranks. Raises GroupLost."""
        message = torch.tensor([len(words), *words])
        head = message[:HEAD_WORDS]
        if len(head) < HEAD_WORDS:
            head = torch.cat([head, head.new_zeros(HEAD_WORDS - len(head))])
        with _losing():
            dist.broadcast(head, LEADER)
            if len(message) > HEAD_WORDS:
                dist.broadcast(message[HEAD_WORDS:], LEADER)

    def receive(self) -> list[int]:
        """The leader's next message. Raises GroupLost."""
        head = torch.zeros(HEAD_WORDS, dtype=torch.int64)
        with _losing():
            dist.broadcast(head, LEADER)
            count = int(head[0])
            if count < HEAD_WORDS:
                words: list[int] = head[1 : 1 + count].tolist()
                return words
            rest = torch.zeros(count + 1 - HEAD_WORDS, dtype=torch.int64)
            dist.broadcast(rest, LEADER)
        return [*head[1:].tolist(), *rest.tolist()]

    def leave(self) -> None:
        dist.destroy_process_group()


@contextmanager
def _losing() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise GroupLost(str(error).splitlines()[0].partition(". ")[0]) from error  # no good wishes


BEATS = 4
"""In the time after which a silent leader is given up."""


@runtime_checkable
class Leader(Protocol):
    """`slipstream.engine.tensor_parallel.parallel.LeadingEngine`, which is not imported where no model is loaded."""

    lost: GroupLost | None

    def beat(self, every_s: float) -> None: ...

    def end(self) -> None: ...


@asynccontextmanager
async def leading(engine: object, thread: ModelThread, timeout_s: float) -> AsyncIterator[None]:
    """For as long as the block runs the other ranks, if there are any, hear of the leader, and at its end they are told
    to end too. A lost group ends the block with GroupLost."""
    if not isinstance(engine, Leader):
        yield
        return
    async with asyncio.TaskGroup() as tasks:
        beating = tasks.create_task(_beating(engine, thread, timeout_s / BEATS))
        try:
            yield
        finally:
            beating.cancel()
            if engine.lost is None:
                await thread.run(engine.end)


async def _beating(engine: Leader, thread: ModelThread, every_s: float) -> NoReturn:
    while True:
        await asyncio.sleep(every_s / 2)
        await thread.run(engine.beat, every_s)
