"""A process's place, and the leader's heart: it beats while the block runs, and the others are told when it ends."""

from __future__ import annotations

import asyncio

import pytest

from slipstream.engine.model_thread import ModelThread
from slipstream.engine.tensor_parallel.group import GroupLost, Rank, leading
from slipstream.errors import InvalidArgument

TOLD = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_a_process_is_told_its_place_or_is_alone() -> None:
    assert Rank.from_environment(TOLD) == Rank(rank=3, size=4, local_rank=1, local_size=2)
    assert Rank.from_environment({}) == Rank(rank=0, size=1)


@pytest.mark.parametrize("wrong", [{"RANK": "first"}, {"LOCAL_RANK": ""}])
def test_a_place_that_cannot_be_read_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="torchrun"):
        Rank.from_environment(TOLD | wrong)
    with pytest.raises(InvalidArgument, match="torchrun"):
        Rank.from_environment({"WORLD_SIZE": "2"})


class Heart:
    """A leader that counts its beats, and dies of the third if it is told to."""

    def __init__(self, mortal: bool = False) -> None:
        self.lost: GroupLost | None = None
        self.beats: list[float] = []
        self.ended = 0
        self.third = asyncio.Event()
        self._mortal = mortal

    def beat(self, every_s: float) -> None:
        self.beats.append(every_s)
        if len(self.beats) == 3:
            self._loop.call_soon_threadsafe(self.third.set)
            if self._mortal:
                self.lost = GroupLost("a rank is gone")
                raise self.lost

    def end(self) -> None:
        self.ended += 1

    def attach(self) -> Heart:
        self._loop = asyncio.get_running_loop()
        return self


async def test_the_heart_beats_while_the_block_runs_and_the_others_hear_of_the_end() -> None:
    heart = Heart().attach()
    async with ModelThread() as thread:
        async with leading(heart, thread, 0.04):
            await asyncio.wait_for(heart.third.wait(), 60)
            assert not heart.ended
        beats = len(heart.beats)
        assert heart.ended == 1 and set(heart.beats) == {0.01}
        await asyncio.sleep(0.05)
        assert len(heart.beats) == beats


async def test_a_group_that_is_lost_ends_the_block_and_nobody_is_told() -> None:
    heart = Heart(mortal=True).attach()
    async with ModelThread() as thread:
        with pytest.RaisesGroup(GroupLost):
            async with leading(heart, thread, 0.04):
                await asyncio.wait_for(asyncio.Event().wait(), 60)
    assert not heart.ended


async def test_an_engine_alone_has_no_heart() -> None:
    async with ModelThread() as thread, leading(object(), thread, 0.001):
        await asyncio.sleep(0)
