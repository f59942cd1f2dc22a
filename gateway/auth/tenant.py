"""Tenants: the limits of one API key, and the caller of the present task.

The interceptor that reads the key (`gateway.auth.api_keys`) names the caller of each RPC; all code that reads it runs
in the same task. Without keys every caller is the one tenant OPEN, whose name is empty.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from slipstream.concurrency import TokenBucket
from slipstream.errors import InvalidArgument, PermissionDenied, ResourceExhausted
from slipstream.tenants import tenant_salt

MINUTE_S = 60.0
SESSION_RETRY_S = 1.0
"""Seconds until a retry where all sessions of a key are in use: when one ends is not known."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The limits of one key; 0 is without limit."""

    sessions: int = 0
    """Sessions at once."""
    requests_per_minute: int = 0
    """Requests of every kind."""
    tokens_per_minute: int = 0
    """Prompt and output tokens; the most that a request may use is reserved until it ends."""
    prompt_tokens: int = 0
    """Tokens of one request's prompt, or of its prediction."""
    max_tokens: int = 0
    """Tokens of one request's output."""
    least_priority: int | None = None
    """The lowest `priority` that it may request; None: the gateway's own setting."""
    operator: bool = False
    """True if it may call operators' RPCs, which concern all tenants."""


class Tenant:
    """The caller behind one API key. What is above a limit now raises ResourceExhausted, with the time until it
    fits."""

    def __init__(self, name: str, limits: TenantLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.limits = limits
        self._clock = clock
        self._requests = TokenBucket(limits.requests_per_minute, MINUTE_S, clock())
        self._tokens = TokenBucket(limits.tokens_per_minute, MINUTE_S, clock())
        self.sessions = 0

    def change(self, limits: TenantLimits) -> None:
        """Apply other limits from now on."""
        self.limits = limits
        self._requests.resize(limits.requests_per_minute)
        self._tokens.resize(limits.tokens_per_minute)

    def arrive(self) -> None:
        """Count one request."""
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
        """The limit on a request's output tokens. Raises InvalidArgument for more than the key may ever request."""
        limit = self.limits.max_tokens
        if asked is None:
            return min(default, limit) if limit else default
        if limit and asked > limit:
            raise InvalidArgument(
                f"max_tokens is {asked} and key {self.name} may ask for {limit}; ask for less.", reason="KEY_OUTPUT"
            )
        return asked

    def admit(self, prompt: int, output: int) -> TokenReservation:
        """Reserve a session, `prompt` tokens, and at most `output` tokens."""
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
        """A session ended; `unused` of its reserved tokens are given back."""
        self.sessions -= 1
        self._tokens.give_back(unused)

    def salt(self, asked: str) -> str:
        """The cache salt of a request: no tenant can share another's caches, whatever salt it sends."""
        return tenant_salt(self.name, asked) if self.name else asked


class TokenReservation:
    """The tokens that a running session has reserved; given back once, by `end`."""

    def __init__(self, tenant: Tenant, output: int) -> None:
        self._tenant = tenant
        self._output = output
        self._ended = False

    def end(self, output: int) -> None:
        """The session has ended with `output` tokens."""
        if not self._ended:
            self._ended = True
            self._tenant.leave(max(0, self._output - output))


OPEN = Tenant("", TenantLimits())
_CALLER: ContextVar[Tenant] = ContextVar("caller", default=OPEN)


def caller() -> Tenant:
    """The tenant whose RPC this task serves."""
    return _CALLER.get()


def called_by(tenant: Tenant) -> None:
    """Set the tenant whose RPC this task serves."""
    _CALLER.set(tenant)


def check_operator() -> None:
    """Raises PermissionDenied unless the caller is an operator; on an open gateway every caller is."""
    if caller().name and not caller().limits.operator:
        raise PermissionDenied(
            f"key {caller().name} is no operator's; use one that is marked `operator = true`.", reason="OPERATOR"
        )


def _exhausted(what: str, reason: str, wait_s: float) -> ResourceExhausted:
    return ResourceExhausted(f"{what}; retry in {wait_s:.1f} s.", reason=reason, retry_s=wait_s)
