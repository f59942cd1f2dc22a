"""The faults themselves: a party that is frozen or killed is what a stopped or killed process is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.simulation.clock import Party, PartyLoop


def simulate(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=PartyLoop) as runner:
        runner.run(main)


def test_timers_due_while_a_party_is_frozen_run_in_order_when_it_is_thawed() -> None:
    async def main() -> None:
        party, ran = Party("one"), list[tuple[str, float]]()
        loop = asyncio.get_running_loop()

        async def tick(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            ran.append((name, loop.time()))

        for name, seconds in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("d", 9.0)):
            party.spawn(tick(name, seconds))
        await asyncio.sleep(0.5)
        party.freeze()
        await asyncio.sleep(5.0)
        assert not ran
        party.thaw()
        await asyncio.sleep(5.0)
        assert ran == [("a", 5.5), ("b", 5.5), ("c", 5.5), ("d", 9.0)]

    simulate(main())


def test_a_timer_that_became_due_can_still_be_cancelled_before_the_party_runs_on() -> None:
    async def main() -> None:
        party, ran = Party("one"), list[str]()
        loop = asyncio.get_running_loop()
        late = loop.call_later(2.0, ran.append, "late", context=party.context)
        loop.call_later(1.0, late.cancel, context=party.context)
        party.freeze()
        await asyncio.sleep(3.0)
        party.thaw()
        await asyncio.sleep(1.0)
        assert not ran

    simulate(main())


def test_other_parties_run_on_while_one_is_frozen() -> None:
    async def main() -> None:
        frozen, other = Party("one"), Party("other")
        frozen.freeze()
        frozen.spawn(asyncio.sleep(0.0))
        await asyncio.wait_for(other.spawn(asyncio.sleep(1.0)), 2.0)
        assert (len(frozen.tasks()), len(other.tasks())) == (1, 0)
        frozen.kill()
        await asyncio.sleep(0.1)
        assert not frozen.tasks()

    simulate(main())


def test_a_simulation_in_which_no_event_can_happen_any_more_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="waits for another"):
        simulate(asyncio.Event().wait())  # type: ignore[arg-type]
