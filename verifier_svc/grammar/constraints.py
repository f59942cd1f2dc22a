"""A session's grammar on the verifier: what may follow its tokens, and which candidates can.

A grammar's mask may take long for reasons that a client chooses, so none is computed on the event loop or on the
model's thread. Each session has a tree of places beside its candidate tree. The mask of a place is computed once, on
threads that tenants share fairly, as soon as a candidate stands there. The session is in a step only when the masks
that the step needs are there; a session whose masks take long waits for them alone. What they may take is bounded
(`slipstream.tokenizer.grammar.MaskBudget`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from slipstream.errors import CONTROL_FLOW, GRAMMAR_TOO_COSTLY, Internal, SlipstreamError
from slipstream.tenants import FairThreads
from slipstream.tokenizer.grammar import Cursor, Grammar, Mask, MaskBudget, allows

log = logging.getLogger(__name__)

MOST_FAILURES = 8
"""Most candidates of one session on which the library may give up: each makes it start again at the beginning."""
TURN_S = 0.002
"""Seconds after which a session leaves its thread to the next one."""
SLOW_S, SLOW_MASKS = 0.002, 32
"""A session is slow until so many masks in a row took less than SLOW_S seconds of a processor each."""
LONG_OUTPUT = 64
"""Tokens of an output above which a session is slow until its first mask is there."""
WORTH_S = 0.005
"""Most seconds that a step waits for the masks of a session that is not slow."""
THREADS = 2
"""Threads for the masks of ordinary sessions, and as many for those of slow ones."""


class _Known(Enum):
    NOT_YET = 0
    FORBIDDEN = 1


class _MaskNode:
    """The committed tokens, or a path of candidates behind them."""

    __slots__ = ("children", "parent", "result", "token")

    def __init__(self, parent: _MaskNode | None, token: int) -> None:
        self.parent = parent
        self.token = token
        self.children: dict[int, _MaskNode] = {}
        self.result: Mask | _Known | BaseException | None = _Known.NOT_YET

    def path_from(self, root: _MaskNode) -> list[int] | None:
        """The tokens from below the root down to this place; None where it does not stand below the root."""
        tokens, place = list[int](), self
        while place is not root:
            if place.parent is None:
                return None
            tokens.append(place.token)
            place = place.parent
        return tokens[::-1]


class MaskThreads:
    """The threads on which a verifier computes its sessions' masks. Slow sessions have threads of their own."""

    def __init__(self) -> None:
        self.quick = FairThreads(THREADS, "masks")
        self.slow = FairThreads(THREADS, "slow-masks")
        self.computed = 0
        """Masks so far: a verifier that computes some is not stuck."""


@dataclass(frozen=True, slots=True)
class MaskWorkers:
    """Where the masks of one session are computed."""

    threads: MaskThreads
    call_soon: Callable[[Callable[[], None]], object]
    """Has the event loop call a function; called on other threads."""
    tenant: str = ""


class Constraint(Protocol):
    """Bounds of the choice of tokens of one session."""

    @property
    def failure(self) -> SlipstreamError | None:
        """The error that ends the session, whatever it commits."""
        ...

    @property
    def ready(self) -> bool:
        """Whether the session can be in a step."""
        ...

    def worth_waiting_s(self) -> float:
        """Seconds that a step should wait for masks of the session."""
        ...

    def admits(self, path: tuple[int, ...], token: int) -> bool | None:
        """Whether a candidate has a place in the tree below this path; None while that is being computed."""
        ...

    def after(self, path: tuple[int, ...]) -> Mask | None:
        """Returns the tokens that may follow the committed tokens and this path; None where all may."""
        ...

    def commit(self, token_ids: Sequence[int]) -> None:
        """The tokens were committed; no step runs."""
        ...

    def close(self) -> None:
        """The session ended."""
        ...

    def beside(self, tokens: list[int], prompt_length: int, settled: Callable[[], object]) -> Constraint:
        """Returns this constraint along another list of committed tokens, for candidates that are judged apart;
        `settled` is called when more of them can be judged."""
        ...


class GrammarConstraint:
    """Owned by the event loop; while a step runs, the model's thread calls `after`."""

    def __init__(
        self,
        grammar: Grammar,
        output: Sequence[int],
        *,
        drawn: bool,
        workers: MaskWorkers,
        budget: MaskBudget | None = None,
    ) -> None:
        """`output`: the tokens that are committed already. `drawn`: candidates are judged by a ratio rule."""
        self._grammar = grammar
        self._drawn = drawn
        self._workers = workers
        self.settled: Callable[[], object] = lambda: None
        """Called on the event loop when masks have come."""
        self.failure: SlipstreamError | None = None
        """The error that ends the session, whatever it commits."""
        self._budget = budget or MaskBudget()
        self._moving = threading.Lock()
        """Held while the root moves, and while a thread reads where it stands."""
        self._root = _MaskNode(None, -1)
        self._unread = list(output)
        """Committed tokens that the cursor does not know yet."""
        self._wanted: deque[_MaskNode] = deque()
        self.busy = False
        """True while masks are being computed."""
        self._busy_since = 0.0
        self._slow_for = int(len(output) > LONG_OUTPUT)
        """Quick masks after which the session is not slow any more; 0: it is not."""
        self._failures = 0
        self._cursor: Cursor | None = None
        self._request(self._root)

    # On the event loop.

    @property
    def ready(self) -> bool:
        """Whether the session can be in a step. Under a ratio rule all its candidates must be known: which of them a
        step holds must not depend on what they are."""
        return self._root.result is not _Known.NOT_YET and not (self._drawn and self.busy)

    def worth_waiting_s(self) -> float:
        """Seconds that a step should wait for masks that are being computed; 0 for a slow session."""
        if not self.busy or self._slow_for:
            return 0.0
        return max(0.0, self._busy_since + WORTH_S - time.monotonic())

    def admits(self, path: tuple[int, ...], token: int) -> bool | None:
        """Whether a candidate has a place in the tree below this path; None while that is being computed.

        One that is forbidden has none. Under the ratio rule it must have: that it was drawn is part of the law of what
        takes its place, so it is judged, with p = 0. But nothing is admitted below it."""
        parent = self._find(path)
        if parent.result is _Known.FORBIDDEN:
            return False
        place = parent.children.get(token)
        if place is None:
            place = parent.children[token] = _MaskNode(parent, token)
            self._request(place)
        if place.result is _Known.NOT_YET:
            return None
        return self._drawn or place.result is not _Known.FORBIDDEN

    def commit(self, token_ids: Sequence[int]) -> None:
        """The tokens were committed; no step runs."""
        root = self._root
        for token in token_ids:
            root = root.children.get(token) or _MaskNode(None, token)
        with self._moving:
            root.parent = None
            self._root = root
            self._unread += token_ids
        if root.result is _Known.NOT_YET:
            self._wanted.appendleft(root)
            self._start()

    def close(self) -> None:
        """The session ended: nothing more is computed for it."""
        self._wanted.clear()

    def beside(self, tokens: list[int], prompt_length: int, settled: Callable[[], object]) -> GrammarConstraint:
        """At the expense of the same budget."""
        beside = GrammarConstraint(
            self._grammar,
            tokens[prompt_length:],
            drawn=self._drawn,
            workers=self._workers,
            budget=self._budget,
        )
        beside.settled = settled
        return beside

    def _find(self, path: Sequence[int]) -> _MaskNode:
        """The place at this path; it is there, because a candidate is."""
        place = self._root
        for token in path:
            place = place.children[token]
        return place

    def _request(self, place: _MaskNode) -> None:
        self._wanted.append(place)
        self._start()

    def _start(self) -> None:
        if not self.busy:
            self.busy, self._busy_since = True, time.monotonic()
            self._submit()

    def _submit(self) -> None:
        threads = self._workers.threads.slow if self._slow_for else self._workers.threads.quick
        try:
            threads.submit(self._workers.tenant, self._work)
        except SlipstreamError as error:
            self.failure = error
            self._workers.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        if self._wanted and self.failure is None:
            self._submit()
        else:
            self.busy = False
        self.settled()

    # On the model's thread.

    def after(self, path: tuple[int, ...]) -> Mask | None:
        """Returns the tokens that may follow the committed tokens and this path. Raises the error that prevented it."""
        place = self._find(path)
        result = place.result
        if isinstance(result, BaseException):
            raise result
        if place.parent is not None and place.parent.result is None:
            return None  # behind an end of text nothing counts
        if isinstance(result, _Known):
            raise Internal("a step began before the grammar's masks were there.")
        return result

    # On the threads for masks.

    def _work(self) -> None:
        """Computes masks until none is wanted, or the turn is over."""
        began = time.thread_time()
        try:
            while time.thread_time() - began < TURN_S and (place := self._next()) is not None:
                self._compute(place)
        except BaseException as error:  # costs one session
            log.error("following a grammar failed", exc_info=error)
            self.failure = Internal("the verifier failed on this session's grammar.")
        with contextlib.suppress(RuntimeError):  # the loop is closed: no session waits any more
            self._workers.call_soon(self._end_turn)

    def _next(self) -> _MaskNode | None:
        try:
            return self._wanted.popleft() if self.failure is None else None
        except IndexError:
            return None

    def _compute(self, place: _MaskNode) -> None:
        with self._moving:
            path = place.path_from(self._root)
            unread, self._unread = self._unread, []
        if self._cursor is None:
            self._cursor = self._grammar.cursor(self._budget)
        self._cursor.commit(unread)
        if path is None or place.result is not _Known.NOT_YET:
            return
        if path and place.parent is not None and not _leads_to(place.parent.result, place.token):
            place.result = _Known.FORBIDDEN
            return
        began = time.thread_time()
        place.result = self._mask(self._cursor, path)
        self._workers.threads.computed += 1
        slow = time.thread_time() - began > SLOW_S
        self._slow_for = SLOW_MASKS if slow else max(0, self._slow_for - 1)

    def _mask(self, cursor: Cursor, path: list[int]) -> Mask | BaseException | None:
        if path and self._failures >= MOST_FAILURES:
            return _gave_up_often()
        try:
            return cursor.mask(path)
        except CONTROL_FLOW:
            raise
        except BaseException as error:  # a candidate must not end the session: only what is chosen can
            if isinstance(error, SlipstreamError) and error.reason == GRAMMAR_TOO_COSTLY:
                self.failure = error
            self._failures += 1
            return error


def _leads_to(result: Mask | _Known | BaseException | None, token: int) -> bool:
    return not isinstance(result, (_Known, BaseException)) and allows(result, token)


def _gave_up_often() -> SlipstreamError:
    return Internal("the grammar could not be followed along too many candidates.")
