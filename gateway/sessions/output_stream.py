"""What the clients of one session are told. Each reads from where it likes and at its own pace; the same tokens carry
the same text for all of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence

from gateway.sessions.outcome import rolled_back
from gateway.text.transcript import Transcript
from slipstream.concurrency import Broadcast
from slipstream.errors import OutOfRange, SlipstreamError
from slipstream.v1 import gateway_pb2, types_pb2

Event = gateway_pb2.Started | gateway_pb2.Delta | gateway_pb2.Finished
MOST_TOKENS = 4096
"""Of one delta: whoever is far behind catches up in pieces."""


class OutputStream:
    """Grows until `finish` or `fail`. Memory is bounded by the session's length, whoever is slow."""

    def __init__(self, started: gateway_pb2.Started, transcript: Transcript) -> None:
        self.started = started
        self.transcript = transcript
        self.tokens: list[int] = []
        """The session's output, that behind a stop string included."""
        self.reached = 0
        """Tokens that the client which is farthest has taken."""
        self.took: Callable[[int], None] = lambda tokens: None
        """Told of each advance of `reached`."""
        self.deserted: Callable[[], None] = lambda: None
        """Told when the last client has gone."""
        self._pieces: list[str] = []
        """Text that each token made final."""
        self._tail = ""
        """Text that became final at the end."""
        self._bare = 0
        """Tokens without log-probabilities, which no record keeps: up to the last one that another gateway said."""
        self._logprobs: list[gateway_pb2.Logprob] = []
        """Of the others."""
        self._shown = 0
        """Tokens that clients are told: none behind a stop string."""
        self._finished: gateway_pb2.Finished | None = None
        self._failure: SlipstreamError | None = None
        self._clients = 0
        self._changed = Broadcast()

    @property
    def over(self) -> bool:
        return self._finished is not None or self._failure is not None

    def tell(self, tokens: Sequence[int], told: Sequence[types_pb2.TokenLogprobs] = ()) -> None:
        """More output, with the verifier's log-probabilities if they were asked for. It is in the log already."""
        self.tokens += tokens
        self._pieces += [self.transcript.push([token]) for token in tokens]
        stopped = self.transcript.carrying() if self.transcript.stop else len(self.tokens)
        fresh = self.tokens[self._shown : max(self._shown, stopped)]
        self._shown += len(fresh)
        if told:
            self._logprobs += self.transcript.likelihoods(fresh, told[: len(fresh)])
        else:
            self._bare, self._logprobs = self._shown, []
        self.wake()

    def conclude(self) -> None:
        """No more tokens follow: what was held back becomes final."""
        self._tail = self.transcript.finish()

    def finish(self, finished: gateway_pb2.Finished) -> None:
        """The session ended."""
        if not self.over:
            self._finished = finished
            self.wake()

    def fail(self, error: SlipstreamError) -> None:
        """Nothing more comes from here."""
        if not self.over:
            self._failure = error
            self.wake()

    async def follow(
        self, offset: int = 0, characters: int | None = None, revision: int | None = None
    ) -> AsyncGenerator[Event, None]:
        """Started, then what a client misses that has `offset` tokens and so much text (None: that of its tokens), then
        Finished. An event counts as taken when the next one is asked for. Raises what ended the session instead,
        Aborted for another `revision` than the story's, and OutOfRange for an offset that its output never reached."""
        self._clients += 1
        try:
            self._check(revision)
            yield self.started
            while True:
                changed = self._changed.next_change()
                self._take(min(offset, len(self.tokens)))  # the client may be ahead of what is told here
                while offset < self._shown:
                    until = min(self._shown, offset + MOST_TOKENS, self._bare if offset < self._bare else self._shown)
                    yield self._delta(offset, until, characters)
                    offset, characters = until, self._ahead(until, characters)
                    self._take(offset)
                if self._finished is not None:
                    break
                if self._failure is not None:
                    raise self._failure
                await changed.wait()
            if offset > len(self.tokens):
                raise OutOfRange(f"The session has {len(self.tokens)} output tokens, not {offset}.", reason="NO_OFFSET")
            if tail := self._since(offset, characters):
                yield gateway_pb2.Delta(offset=offset, text=tail)
            yield self._finished
        finally:
            self._clients -= 1
            if not self._clients:
                self.wake()
                self.deserted()

    @property
    def lag(self) -> int:
        """How many tokens the client that is farthest is behind."""
        return max(0, len(self.tokens) - self.reached)

    async def lags(self, tokens: int, over: Callable[[], bool] = lambda: False) -> None:
        """Waits until `lag` is below so many tokens, or it is over."""
        while self.lag >= tokens and self._clients and not over():
            await self._changed.wait()

    def _check(self, revision: int | None) -> None:
        if revision not in (None, self.started.revision):
            raise rolled_back()

    def _ahead(self, offset: int, characters: int | None) -> int | None:
        """The same once so many tokens were told; None where their text is as long."""
        if characters is None or characters <= sum(map(len, self._pieces[:offset])):
            return None
        return characters

    def _delta(self, offset: int, until: int, characters: int | None) -> gateway_pb2.Delta:
        text = "".join(self._pieces[offset:until])
        if characters is not None:  # the client says itself what text it has
            text = "".join(self._pieces[:until])[characters:]
        return gateway_pb2.Delta(
            offset=offset,
            token_ids=self.tokens[offset:until],
            text=text,
            logprobs=self._logprobs[max(0, offset - self._bare) : max(0, until - self._bare)],
        )

    def _since(self, offset: int, characters: int | None) -> str:
        """The text behind so many tokens, that of tokens included which are not told."""
        if characters is None:
            return "".join(self._pieces[offset:]) + self._tail
        return ("".join(self._pieces) + self._tail)[characters:]

    def _take(self, reached: int) -> None:
        if reached > self.reached:
            advance, self.reached = reached - self.reached, reached
            self.wake()
            self.took(advance)

    def wake(self) -> None:
        """Whoever waits here looks again."""
        self._changed.notify_all()
