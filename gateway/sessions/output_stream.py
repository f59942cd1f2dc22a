"""A session's output on its way to clients: tokens that are in the log, the text they made final, the session's end.

SessionRun appends; each client follows from the offset it likes and at its own pace, and the same tokens carry the same
text for all of them. The client that is farthest sets the verifier's credit.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from itertools import accumulate
from operator import attrgetter

from gateway.text.transcript import Transcript
from slipstream.concurrency import Broadcast
from slipstream.errors import SERVING_ENDED, Aborted, OutOfRange, SlipstreamError, Unavailable
from slipstream.v1 import gateway_pb2, types_pb2

Event = gateway_pb2.Started | gateway_pb2.Delta | gateway_pb2.Finished
"""One Started, then Deltas, each with all text that became final since the client took the last one, then Finished."""
MOST_LOGPROBS = 1024
"""Most log-probabilities in one Delta, those of likeliest tokens counted: to write them takes some 1 ms."""
MOST_TOKENS = 4096
"""Most tokens of one Delta: a client that is far behind catches up in pieces."""
QUIET_S = 5.0
"""Seconds after which a client receives what there is, whatever its interval: silence looks like a lost gateway."""


def rolled_back(revision: int, output_tokens: int | None = None) -> Aborted:
    """`revision`: of the text that there is now. `output_tokens`: how many of the tokens that clients received are
    left."""
    left = "" if output_tokens is None else f" to {output_tokens} output tokens"
    kept = {} if output_tokens is None else {"output_tokens": output_tokens}
    sentence = f"The session was rolled back{left}; resume at what is left."
    return Aborted(sentence, reason="ROLLED_BACK", numbers={"revision": revision, **kept})


def suspended(alone: bool = False) -> Unavailable:
    """`alone`: no gateway will go on with it."""
    if alone:
        ended = "Serving ends here. Start it again and send the request again; a session in Redis can be resumed."
        return Unavailable(ended, reason=SERVING_ENDED)
    return Unavailable("The gateway let the session go; resume it.", reason="SUSPENDED")


def ignore_taken(tokens: int) -> None:
    """For `OutputStream.on_taken`, while no run gives its verifier credit for what clients take."""


class OutputStream:
    """Grows until `finish` or `fail`. Memory is bounded by the session's length, however slow a client is."""

    def __init__(self, started: gateway_pb2.Started, transcript: Transcript) -> None:
        self.started = started
        self.transcript = transcript
        self.tokens: list[int] = []
        """The session's output tokens, those behind a stop string included."""
        self.reached = 0
        """Tokens that the client which is farthest has taken."""
        self.on_taken: Callable[[int], None] = ignore_taken
        """Called with each advance of `reached`, in tokens."""
        self._pieces: list[str] = []
        """Text that goes with each settled token (see Transcript)."""
        self._ends: list[int] = []
        """Characters of text up to and including each settled token's."""
        self._without_logprobs = 0
        """Leading tokens without log-probabilities: up to the last one that came from a record, which keeps none."""
        self._logprobs: list[gateway_pb2.Logprob] = []
        """Log-probabilities of the tokens behind those."""
        self._prompt_logprobs: list[gateway_pb2.Logprob] = []
        """Log-probabilities of the prompt's tokens but the first; empty unless the request asked for them."""
        self._rounds: list[gateway_pb2.RoundDetails] = []
        """Details of rounds, in order; empty unless the request asked for them."""
        self._rounds_with_texts = 0
        """Leading rounds whose tokens' texts are known."""
        self._shown = 0
        """Leading tokens that may be sent to clients: settled ones, of whole rounds where those are asked for."""
        self._outcome: gateway_pb2.Finished | SlipstreamError | None = None
        self._clients = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        """Clients that have taken all they may so far, each with the number of tokens from which on it is woken."""
        self._taken = Broadcast()
        """Clients took tokens, or are gone."""

    @property
    def over(self) -> bool:
        return self._outcome is not None

    def append_tokens(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[types_pb2.TokenLogprobs] = (),
        rounds: Sequence[gateway_pb2.RoundDetails] = (),
    ) -> None:
        """Add output that is in the log already, with the verifier's log-probabilities and the rounds, without their
        texts, if those were asked for."""
        self.tokens += tokens
        if logprobs:
            self._logprobs += self.transcript.likelihoods(tokens, logprobs)
        else:
            self._without_logprobs, self._logprobs = len(self.tokens), []
        self._rounds += rounds
        self._settle(self.transcript.push(tokens))
        self._wake_clients()

    def set_prompt_logprobs(self, start: int, logprobs: Sequence[types_pb2.TokenLogprobs]) -> None:
        """Log-probabilities of the prompt from its token 1 + `start` on; they come before the first tokens."""
        tokens = self.started.prompt_token_ids[1 + start : 1 + start + len(logprobs)]
        self._prompt_logprobs[start:] = self.transcript.likelihoods(tokens, logprobs)

    def conclude(self) -> None:
        """Make text that was held back final: no more tokens follow."""
        self._settle(self.transcript.finish(), last=True)

    def _settle(self, texts: Sequence[str], last: bool = False) -> None:
        """Show the tokens that are settled now, with these texts; `last`: no others follow."""
        self._pieces += texts
        self._ends += list(accumulate(map(len, texts), initial=self._end(len(self._ends))))[1:]
        self._shown = len(self._pieces)
        last = last or bool(self.transcript.stop)
        while self._rounds_with_texts < len(self._rounds):
            details = self._rounds[self._rounds_with_texts]
            following = self._rounds[self._rounds_with_texts + 1 : self._rounds_with_texts + 2]
            end = following[0].offset if following else len(self.tokens)
            if end > self._shown and not last:
                self._shown = min(self._shown, details.offset)
                break
            texts = self._pieces[details.offset : end]
            details.texts.extend([*texts, *[""] * (end - details.offset - len(texts))])
            self._rounds_with_texts += 1

    def finish(self, finished: gateway_pb2.Finished) -> None:
        """The session ended."""
        if not self.over:
            self._outcome = finished
            self._wake_clients()

    def fail(self, error: SlipstreamError) -> None:
        """End the stream with an error; the session itself may go on elsewhere."""
        if not self.over:
            self._outcome = error
            self._wake_clients()

    async def follow(
        self, offset: int = 0, characters: int | None = None, revision: int | None = None, interval: int = 0
    ) -> AsyncGenerator[Event, None]:
        """Yield Started, then what a client misses that has `offset` tokens and so many characters of text (None: the
        text of its tokens), then Finished. Behind the first tokens a client receives `interval` tokens or more at a
        time (in pieces where one Delta is too small for them), but at the end and after QUIET_S. An event counts as
        taken when the next one is asked for. Raises what ended the session instead, Aborted for an earlier `revision`
        than the session's, and OutOfRange for a later one, or an offset that its output never reached."""
        self._clients += 1
        try:
            self._check(revision)
            yield self.started
            self._take(offset)
            while True:
                for delta, until, later in self._deltas(offset, characters):
                    yield delta
                    offset, characters = until, later
                    self._take(offset)
                outcome = self._outcome
                if outcome is not None and offset >= self._shown:  # the last tokens may come while it takes others
                    break
                least = max(1, interval) if offset else 1
                with contextlib.suppress(TimeoutError):
                    await self._wait_for(offset + least, QUIET_S if least > 1 else None)
            if isinstance(outcome, SlipstreamError):
                raise outcome
            if offset > len(self.tokens):
                raise OutOfRange(
                    f"The session has {len(self.tokens)} output tokens, not {offset}.",
                    reason="NO_OFFSET",
                    field="offset",
                    numbers={"output_tokens": len(self.tokens)},
                )
            self._check_characters(characters)
            if tail := self._since(offset, characters):
                yield gateway_pb2.Delta(offset=offset, text=tail)
            yield outcome
        finally:
            self._clients -= 1
            if not self._clients:
                self.wake()

    def so_far(self) -> list[Event]:
        """Events that a client that joins now would receive at once."""
        return [self.started, *(delta for delta, _, _ in self._deltas(0, None))]

    @property
    def followed(self) -> bool:
        """Whether a client follows it."""
        return self._clients > 0

    @property
    def lag(self) -> int:
        """Tokens that the client which is farthest has not taken yet."""
        return max(0, len(self.tokens) - self.reached)

    async def wait_for_clients(self, tokens: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until `lag` is below so many tokens, the clients are gone, or `stop()` is true at a `wake`."""
        while self.lag >= tokens and self._clients and not stop():
            await self._taken.wait()

    async def _wait_for(self, tokens: int, limit_s: float | None) -> None:
        """Wait until so many tokens may be sent, or none follow. Tokens that wait to be sent together with later ones
        count as taken: the verifier does not wait for the client. Raises TimeoutError after `limit_s`."""
        if self._shown >= tokens or self.over:
            return
        waiting = tokens, asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._reach(len(self.tokens))
        try:
            async with contextlib.nullcontext() if limit_s is None else asyncio.timeout(limit_s):
                await waiting[1]
        finally:
            if waiting in self._waiting:  # cancelled, or it took too long
                self._waiting.remove(waiting)

    def _wake_clients(self) -> None:
        """Wake the clients that wait for what there is now."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            tokens, future = each
            if not self.over and self._shown < tokens:
                self._waiting.append(each)
            elif not future.done():
                future.set_result(None)
        if self._waiting:
            self._reach(len(self.tokens))

    def _check(self, revision: int | None) -> None:
        current = self.started.revision
        if revision is not None and revision > current:
            raise OutOfRange(
                f"The session's text has revision {current} and never had {revision}; send the one of Started.",
                reason="NO_REVISION",
                field="revision",
                numbers={"revision": current},
            )
        if revision not in (None, current):
            raise rolled_back(current)

    def _check_characters(self, characters: int | None) -> None:
        """Raises OutOfRange for more characters than the whole text has, as of a client that counts bytes."""
        whole = self._end(len(self._pieces)) + len(self.transcript.rest)
        if characters is not None and characters > whole:
            raise OutOfRange(
                f"The session's text has {whole} characters (code points), not {characters}.",
                reason="NO_OFFSET",
                field="characters",
                numbers={"characters": whole},
            )

    def _ahead(self, offset: int, characters: int | None) -> int | None:
        """`characters` once `offset` tokens were sent; None from where the tokens' text is as long."""
        return None if characters is None or characters <= self._end(offset) else characters

    def _end(self, tokens: int) -> int:
        """Characters of the first tokens' text."""
        return self._ends[tokens - 1] if tokens else 0

    def _text(self, characters: int, until: int) -> str:
        """The text of the first `until` tokens, without its first characters. Touches no token before those."""
        first = bisect_right(self._ends, characters, hi=until)
        return "".join(self._pieces[first:until])[max(0, characters - self._end(first)) :]

    def _delta(self, offset: int, until: int, characters: int | None) -> gateway_pb2.Delta:
        # A client that sends a number of characters counts its text itself.
        text = "".join(self._pieces[offset:until]) if characters is None else self._text(characters, until)
        return gateway_pb2.Delta(
            offset=offset,
            token_ids=self.tokens[offset:until],
            text=text,
            rounds=self._rounds_between(offset, until),
            logprobs=self._logprobs[max(0, offset - self._without_logprobs) : max(0, until - self._without_logprobs)],
        )

    def _deltas(self, offset: int, characters: int | None) -> Iterator[tuple[gateway_pb2.Delta, int, int | None]]:
        """Yields the deltas that may be sent at the first `next` behind a place, each with the place behind it. Tokens
        that come while a client takes one wait for the next call: they may be fewer than it wants in one message."""
        shown = self._shown
        if offset == 0 and shown:
            for some in self._prompt_pieces():
                yield gateway_pb2.Delta(prompt_logprobs=some), 0, characters
        while offset < shown:
            bound = self._without_logprobs if offset < self._without_logprobs else shown
            most = MOST_TOKENS if offset < self._without_logprobs else _fitting(self._logprobs)
            until = min(bound, shown, offset + most)
            delta = self._delta(offset, until, characters)
            offset, characters = until, self._ahead(until, characters)
            yield delta, offset, characters

    def _prompt_pieces(self) -> list[list[gateway_pb2.Logprob]]:
        """The prompt's log-probabilities in pieces that a message holds, however long the tokens' texts are."""
        found, size = self._prompt_logprobs, _fitting(self._prompt_logprobs)
        return [found[first : first + size] for first in range(0, len(found), size)]

    def _rounds_between(self, offset: int, until: int) -> list[gateway_pb2.RoundDetails]:
        """The rounds whose first token is one of these."""
        if not self._rounds:
            return []
        first, last = (bisect_left(self._rounds, place, key=attrgetter("offset")) for place in (offset, until))
        return self._rounds[first:last]

    def _since(self, offset: int, characters: int | None) -> str:
        """The text behind so many tokens, with what goes with no token."""
        if characters is None:
            return "".join(self._pieces[offset:]) + self.transcript.rest
        total = len(self._pieces)
        return self._text(characters, total) + self.transcript.rest[max(0, characters - self._end(total)) :]

    def _take(self, offset: int) -> None:
        """A client has so many tokens. Where that is all that may be sent, the verifier does not wait for it before it
        goes on: tokens that are held back count as taken. It may be ahead of what is known here."""
        self._reach(offset if offset < self._shown else len(self.tokens))

    def _reach(self, reached: int) -> None:
        if reached > self.reached:
            advance, self.reached = reached - self.reached, reached
            self.wake()
            self.on_taken(advance)

    def wake(self) -> None:
        """Let what waits for clients look again."""
        self._taken.notify_all()


def _fitting(logprobs: Sequence[gateway_pb2.Logprob]) -> int:
    """Number of tokens with log-probabilities such as these that fit into one Delta."""
    return max(1, MOST_LOGPROBS // (1 + len(logprobs[0].top))) if logprobs else MOST_TOKENS
