"""Processes inside one process: an event loop on virtual time that knows whose every callback is.

Whatever a party starts, a task, a timer, a callback of either, carries the party's context. So a party is frozen as
SIGSTOP freezes a process: nothing of it runs, and what became due runs when it is thawed. It is killed as SIGKILL kills
one: nothing that it still does reaches anybody, for the network and the store do not know it any more.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

from capacity.clock import LoneLoop

PARTY: contextvars.ContextVar[Party | None] = contextvars.ContextVar("party", default=None)
Context = contextvars.Context


class Party:
    """One process: alive, frozen or dead. Dead ones do not come back; another one may take their address."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.frozen = self.dead = False
        self.errands: list[_Errand] = []
        """What became due while it was frozen, in that order."""
        self.context = contextvars.copy_context()
        self.context.run(PARTY.set, self)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, context=self.context)

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        errands, self.errands = self.errands, []
        for errand in errands:
            asyncio.get_running_loop().call_soon(errand, context=errand.context)

    def kill(self) -> None:
        """Its coroutines must end all the same, for Python wants it so: cut off from everybody else."""
        self.dead = True
        for task in self.tasks():
            task.cancel()
        self.thaw()

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Tasks of the party that have not ended, oldest first."""
        mine = (task for task in asyncio.all_tasks() if isinstance(task, NumberedTask) and task.party is self)
        return sorted(mine, key=hash)


class NumberedTask(asyncio.Task[Any]):
    """Sets of tasks (of a task group, say) are in order of their hash: as it is, that is where they lie in memory."""

    def __init__(self, number: int, party: Party | None, work: Any, **options: Any) -> None:
        self.number = number
        self.party = party
        super().__init__(work, **options)

    def __hash__(self) -> int:
        return self.number


class _Errand:
    """A callback of a party."""

    __slots__ = ("arguments", "callback", "context", "handle", "party")

    def __init__(
        self, party: Party, callback: Callable[..., Any], arguments: tuple[Any, ...], context: Context
    ) -> None:
        self.party = party
        self.callback = callback
        self.arguments = arguments
        self.context = context
        self.handle: asyncio.Handle | None = None

    def __call__(self) -> None:
        if self.party.frozen:
            self.party.errands.append(self)
        elif self.handle is None or not self.handle.cancelled():  # by what ran just before, after the thaw
            self.callback(*self.arguments)


class PartyLoop(LoneLoop):
    """`turned` is called after every turn of the loop in which `stir` was called."""

    def __init__(self) -> None:
        super().__init__()
        self.turned: Callable[[], None] = lambda: None
        self._stirred = False
        self._numbers = itertools.count()
        self.set_task_factory(self._task)

    def stir(self) -> None:
        """Something happened that can break a promise."""
        self._stirred = True

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        context = context or contextvars.copy_context()
        party = context.get(PARTY)
        if party is None:
            return super().call_soon(callback, *args, context=context)
        errand = _Errand(party, callback, args, context)
        errand.handle = super().call_soon(errand, context=context)
        return errand.handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        context = context or contextvars.copy_context()
        party = context.get(PARTY)
        if party is None:
            return super().call_at(when, callback, *args, context=context)
        errand = _Errand(party, callback, args, context)
        handle = super().call_at(when, errand, context=context)
        errand.handle = handle
        return handle

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        if self._stirred:
            self._stirred = False
            self.turned()

    def _task(self, loop: Any, work: Any, context: Context | None = None, **options: Any) -> asyncio.Task[Any]:
        party = PARTY.get() if context is None else context.get(PARTY)
        return NumberedTask(next(self._numbers), party, work, loop=loop, context=context, **options)
