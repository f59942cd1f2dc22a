"""Who calls, and what they may: the limits of one API key, and which sessions are theirs.

The interceptor that knows the key (`gateway.auth.api_keys`) names the caller of each RPC; everything that asks runs in
the same task. Without keys everybody is the one tenant OPEN, whose name is empty.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from slipstream.concurrency import TokenBucket
from slipstream.errors import InvalidArgument, PermissionDenied, ResourceExhausted

MINUTE_S = 60.0
SESSION_RETRY_S = 1.0
"""When a session ends nobody knows beforehand."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Of one key; 0 is without limit."""

    sessions: int = 0
    """At once."""
    requests_per_minute: int = 0
    """Of every kind."""
    tokens_per_minute: int = 0
    """Prompt and output; what a request may use at most is set aside until it ends."""
    prompt_tokens: int = 0
    """Of one request, its prediction too."""
    max_tokens: int = 0
    """Of one request's output."""
    least_priority: int | None = None
    """The lowest `priority` that it may claim; None: the gateway's own setting."""
    operator: bool = False
    """Whether it may ask for what concerns all tenants."""


class Tenant:
    """Raises ResourceExhausted, with the time until it fits, for what is above a limit now."""

    def __init__(self, name: str, limits: TenantLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.limits = limits
        self._clock = clock
        self._requests = TokenBucket(limits.requests_per_minute, MINUTE_S, clock())
        self._tokens = TokenBucket(limits.tokens_per_minute, MINUTE_S, clock())
        self.sessions = 0

    def change(self, limits: TenantLimits) -> None:
        """Other limits from now on."""
        self.limits = limits
        self._requests.resize(limits.requests_per_minute)
        self._tokens.resize(limits.tokens_per_minute)

    def arrive(self) -> None:
        """A request came."""
        if wait := self._requests.wait_s(1, self._clock()):
            raise _exhausted(f"key {self.name} has used up its requests of this minute", "KEY_REQUESTS", wait)
        self._requests.take(1)

    def check_prompt(self, tokens: int) -> None:
        """Raises InvalidArgument for more than the key may ever send."""
        limit = self.limits.prompt_tokens
        if limit and tokens > limit:
            raise InvalidArgument(
                f"The prompt or prediction has {tokens} tokens and key {self.name} may send {limit}; shorten it.",
                reason="KEY_PROMPT",
            )

    def most_output(self, asked: int | None, default: int) -> int:
        """Output tokens of a request. Raises InvalidArgument for more than the key may ever ask for."""
        limit = self.limits.max_tokens
        if asked is None:
            return min(default, limit) if limit else default
        if limit and asked > limit:
            raise InvalidArgument(
                f"max_tokens is {asked} and key {self.name} may ask for {limit}; ask for less.", reason="KEY_OUTPUT"
            )
        return asked

    def admit(self, prompt: int, output: int) -> TokenReservation:
        """Room for a session with so many tokens of prompt, and at most so many of output."""
        if self.limits.sessions and self.sessions >= self.limits.sessions:
            raise _exhausted(f"key {self.name} runs all the sessions it may", "KEY_SESSIONS", SESSION_RETRY_S)
        tokens = prompt + output
        if not self._tokens.fits(tokens):
            raise InvalidArgument(
                f"Prompt and max_tokens make {tokens} tokens, and key {self.name} has {self.limits.tokens_per_minute} "
                "a minute; ask for less.",
                reason="KEY_TOKENS",
            )
        if wait := self._tokens.wait_s(tokens, self._clock()):
            raise _exhausted(f"key {self.name} has too few tokens left for this request", "KEY_TOKENS", wait)
        self._tokens.take(tokens)
        self.sessions += 1
        return TokenReservation(self, output)

    def leave(self, unused: int) -> None:
        """A session ended, with so many of its tokens unused."""
        self.sessions -= 1
        self._tokens.give_back(unused)

    def salt(self, asked: str) -> str:
        """What caches are shared by: no tenant can have another's, whatever salt it asks for."""
        if not self.name:
            return asked
        return hashlib.sha256(f"{self.name}\0{asked}".encode()).hexdigest()


class TokenReservation:
    """A running session's room; given back once, by `end`."""

    def __init__(self, tenant: Tenant, output: int) -> None:
        self._tenant = tenant
        self._output = output
        self._ended = False

    def end(self, output: int) -> None:
        """The session has ended with so many tokens of output."""
        if not self._ended:
            self._ended = True
            self._tenant.leave(max(0, self._output - output))


OPEN = Tenant("", TenantLimits())
_CALLER: ContextVar[Tenant] = ContextVar("caller", default=OPEN)


def caller() -> Tenant:
    """Of the RPC that this task serves."""
    return _CALLER.get()


def called_by(tenant: Tenant) -> None:
    """From here on this task serves an RPC of the tenant."""
    _CALLER.set(tenant)


def check_operator() -> None:
    """Raises PermissionDenied for a caller who is not an operator; on an open gateway everybody is."""
    if caller().name and not caller().limits.operator:
        raise PermissionDenied(
            f"key {caller().name} is no operator's; use one that is marked `operator = true`.", reason="OPERATOR"
        )


def _exhausted(what: str, reason: str, wait_s: float) -> ResourceExhausted:
    return ResourceExhausted(f"{what}; retry in {wait_s:.1f} s.", reason=reason, retry_s=wait_s)
