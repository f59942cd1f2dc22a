"""Sessions whose grammar is being compiled: later commands for them wait with them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.errors import Internal, ResourceExhausted, SlipstreamError
from slipstream.tokenizer.grammar import Grammar, Grammars
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.v1 import verifier_pb2

log = logging.getLogger(__name__)

Command = verifier_pb2.DecodeCommand
MOST_HELD = 64
"""Most commands of one session that wait for its grammar. A gateway has little to send before the first round."""


@dataclass(frozen=True, slots=True)
class CompilationListener:
    """Receiver of the commands' outcomes."""

    open: Callable[[Command, Grammar], None]
    fail: Callable[[Command, SlipstreamError], None]
    receive: Callable[[Command], None]
    """Those that came meanwhile, in order."""


class GrammarCompilation:
    """The grammars of one gateway's stream. Compiling takes milliseconds, for the largest schemas a second or two, and
    never the event loop's time."""

    def __init__(self, grammars: Grammars, listener: CompilationListener) -> None:
        self._grammars = grammars
        self._listener = listener
        self._held: dict[int, list[Command]] = {}
        """By number of a session, the commands that wait for it, its open first."""
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """Sessions whose grammar is being compiled."""
        return len(self._held)

    def sessions_of(self, tenant: str) -> int:
        """Those that are this tenant's."""
        return sum(held[0].open.tenant == tenant for held in self._held.values())

    def holds(self, command: Command) -> bool:
        """Whether the command has to wait for its session; one too many ends the session."""
        held = self._held.get(command.session)
        if held is None:
            return False
        held.append(command)
        if len(held) > MOST_HELD:
            del self._held[command.session]
            self._tasks.pop(command.session).cancel()
            self._listener.fail(held[0], ResourceExhausted(f"more than {MOST_HELD} commands came before a round."))
        return True

    def start(self, command: Command, structure: StructuredOutput) -> None:
        """The session is opened, or fails, when its grammar is there."""
        self._held[command.session] = [command]
        self._tasks[command.session] = asyncio.create_task(self._compile(command, structure))

    def leave(self) -> None:
        """The stream is gone, and with it the sessions that wait."""
        self._held.clear()
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    async def _compile(self, command: Command, structure: StructuredOutput) -> None:
        failure: SlipstreamError | None = None
        try:
            salt, tenant = command.open.cache_salt, command.open.tenant
            grammar = await asyncio.wrap_future(self._grammars.compile(structure, salt, tenant))
        except SlipstreamError as error:
            failure = error
        except Exception as error:  # one bad grammar costs one session
            log.error("compiling a grammar failed", exc_info=error, extra={"session": command.open.key.id})
            failure = Internal("the verifier failed on this session's grammar.")
        del self._tasks[command.session]
        held = self._held.pop(command.session)
        if failure is None:
            self._listener.open(command, grammar)
        else:
            self._listener.fail(command, failure)
        for waiting in held[1:]:
            self._listener.receive(waiting)
