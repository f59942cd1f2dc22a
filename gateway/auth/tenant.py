"""Tenants: the limits of one API key, and what it has used of them.

The API key of a call (`gateway.auth.api_keys`) decides its tenant, which `RequestContext.tenant` carries to all code
that serves the call. Without keys every caller is the one tenant OPEN, whose name is empty.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from gateway.store.quota import Demand, SharedQuota
from slipstream.concurrency import TokenBucket
from slipstream.errors import InvalidArgument, PermissionDenied, ResourceExhausted, Unavailable
from slipstream.telemetry.log_once import LogOnce
from slipstream.tenants import tenant_id, tenant_salt

_LOG_ONCE = LogOnce(logging.getLogger(__name__), logging.WARNING)
MINUTE_S = 60.0
DEFAULTS_PER_MINUTE = 8
"""A request that names no `max_tokens` reserves at most one part in so many of its key's tokens of a minute: else the
rest of a long context would take the whole minute from the key's other requests."""
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
    """Prompt and output tokens; the most that a request may use is reserved until it ends. A rollback is charged all
    tokens that it leaves, because they are computed again; so is a resume in a session that often was."""
    prompt_tokens: int = 0
    """Tokens of one request's prompt, or of its prediction."""
    max_tokens: int = 0
    """Tokens of one request's output."""
    least_priority: int | None = None
    """The lowest `priority` that it may request; None: the gateway's own setting."""
    operator: bool = False
    """True if it may call operators' RPCs, which concern all tenants."""

    @property
    def counted(self) -> bool:
        """Whether any limit needs a count of what was used."""
        return bool(self.sessions or self.requests_per_minute or self.tokens_per_minute)


class Tenant:
    """The caller behind one API key. What is above a limit now raises ResourceExhausted, with the time until it
    fits. `shared` counts for all gateways; while it is away, and where there is none, this gateway counts alone."""

    def __init__(
        self,
        name: str,
        limits: TenantLimits,
        clock: Callable[[], float] = time.monotonic,
        shared: SharedQuota | None = None,
    ) -> None:
        self.name = name
        self.limits = limits
        self._clock = clock
        self._shared = shared
        self._requests = TokenBucket(limits.requests_per_minute, MINUTE_S, clock())
        self._tokens = TokenBucket(limits.tokens_per_minute, MINUTE_S, clock())
        self._one_at_a_time = asyncio.Lock()
        """Held for a charge of the shared count: what a gateway has in all is known between two of them."""
        self._charged_requests = self._charged_tokens = 0
        """Charged to the shared count, less what was given back."""
        self._unreported = False
        """Whether the shared count may differ from these and from `sessions`."""
        self._reporting: asyncio.Task[None] | None = None
        self.sessions = 0
        """Sessions that run here."""

    def change(self, limits: TenantLimits) -> None:
        """Apply other limits from now on."""
        self.limits = limits
        self._requests.resize(limits.requests_per_minute)
        self._tokens.resize(limits.tokens_per_minute)

    async def arrive(self) -> None:
        """Count one request."""
        await self._charge(requests=1)

    def check_prompt(self, tokens: int, least: str = "") -> None:
        """Raises InvalidArgument for more than the key may ever send. `least`: "at least " where there may be more."""
        limit = self.limits.prompt_tokens
        if limit and tokens > limit:
            raise InvalidArgument(
                f"The prompt or prediction has {least}{tokens} tokens and key {self.name} may send {limit}; shorten "
                "it.",
                reason="KEY_PROMPT",
                field="prompt",
                numbers={"tokens": tokens, "limit": limit},
            )

    def most_prompt(self, most: int) -> int:
        """Most tokens of a prompt, of which a model takes `most`."""
        return min(most, self.limits.prompt_tokens or most)

    def check_room(self, tokens: int, sessions: int) -> None:
        """Raises what `admit` would raise for so many tokens and sessions as this gateway counts them; takes none."""
        self._check_fits(tokens)
        self._check(0, tokens, sessions)

    def most_output(self, asked: int | None, default: int) -> int:
        """The limit on a request's output tokens. Raises InvalidArgument for more than the key may ever request."""
        limit = self.limits.max_tokens
        if asked is None:
            share = max(1, self.limits.tokens_per_minute // DEFAULTS_PER_MINUTE)
            return min(default, limit or default, share if self.limits.tokens_per_minute else default)
        if limit and asked > limit:
            raise InvalidArgument(
                f"max_tokens is {asked} and key {self.name} may ask for {limit}; ask for less.",
                reason="KEY_OUTPUT",
                field="max_tokens",
                numbers={"tokens": asked, "limit": limit},
            )
        return asked

    async def admit(self, prompt: int, output: int) -> TokenReservation:
        """Reserve a session, `prompt` tokens, and at most `output` tokens."""
        return TokenReservation(self, output, await self._charge(tokens=prompt + output, sessions=1))

    async def charge(self, tokens: int) -> bool:
        """Charge tokens that are stored, or will be computed. Whether all gateways count them."""
        return await self._charge(tokens=tokens)

    def give_back(self, tokens: int, sessions: int = 0, *, shared: bool) -> None:
        """Return what was charged and not used. `shared`: whether all gateways counted it."""
        self.sessions -= sessions
        self._tokens.give_back(tokens)
        self._charged_tokens -= tokens if shared else 0
        self._unreported = True
        if self._shared is not None and self.limits.counted and (self._reporting is None or self._reporting.done()):
            self._reporting = asyncio.create_task(self._report())

    async def report(self) -> None:
        """Report how many sessions run here, which keeps them counted, and what has not been reported yet, such as
        that none runs any more."""
        if self._shared is not None and self.limits.counted and (self.sessions or self._unreported):
            self._unreported = True
            await self._report()

    async def settle(self) -> None:
        """Wait until everything is given back, or the store has failed to take it."""
        if self._reporting is not None:
            await self._reporting

    async def _charge(self, requests: int = 0, tokens: int = 0, sessions: int = 0) -> bool:
        """Charge all of it, or nothing. Whether all gateways count it."""
        self._check_fits(tokens)
        shared = await self._charge_shared(requests, tokens, sessions)
        if not shared:
            self._check(requests, tokens, sessions)
            self.sessions += sessions
        self._requests.take(requests)
        self._tokens.take(tokens)
        return shared

    def _check_fits(self, tokens: int) -> None:
        if not self._tokens.fits(tokens):
            raise InvalidArgument(
                f"The request takes {tokens} tokens, and key {self.name} has {self.limits.tokens_per_minute} a minute; "
                "ask for less.",
                reason="KEY_TOKENS",
                numbers={"tokens": tokens, "limit": self.limits.tokens_per_minute},
            )

    async def _charge_shared(self, requests: int, tokens: int, sessions: int) -> bool:
        """Whether all gateways' count was charged; it is not where there is none, or while it is away."""
        if self._shared is None or not self.limits.counted:
            return False
        async with self._one_at_a_time:
            try:
                refused, wait_s = await self._demand(self._shared, requests, tokens, sessions)
            except Unavailable:
                _LOG_ONCE.log_problem("the store is away, and each gateway counts the use of API keys for itself")
                return False
            _LOG_ONCE.log_recovery("all gateways count the use of API keys together again")
            if refused:
                raise self._refusal(refused, wait_s)
            self._charged_requests += requests
            self._charged_tokens += tokens
            self.sessions += sessions
            return True

    async def _report(self) -> None:
        """Reports the key's use to the store. The next charge, or `report`, reports the rest."""
        assert self._shared is not None
        async with self._one_at_a_time:
            while self._unreported:
                try:
                    await self._demand(self._shared, 0, 0, 0)
                except Unavailable:
                    return

    async def _demand(self, shared: SharedQuota, requests: int, tokens: int, sessions: int) -> tuple[str, float]:
        """Charge the store's count, and report with it what this gateway has in all. What becomes of a demand whose
        answer does not come is unknown, and does not matter: the next one makes it good."""
        most = self.limits
        demand = Demand(
            *(requests, tokens, sessions),
            *(self._charged_requests + requests, self._charged_tokens + tokens, self.sessions + sessions),
            *(most.requests_per_minute, most.tokens_per_minute, most.sessions),
        )
        self._unreported = False
        try:
            return await shared.charge(self.name, demand)
        except BaseException:
            self._unreported = True
            raise

    def _check(self, requests: int, tokens: int, sessions: int) -> None:
        """Raises ResourceExhausted for what is above a limit as this gateway counts it."""
        now = self._clock()
        if requests and (wait := self._requests.wait_s(requests, now)):
            raise self._refusal("requests", wait)
        if sessions and self.limits.sessions and self.sessions + sessions > self.limits.sessions:
            raise self._refusal("sessions", 0.0)
        if tokens and (wait := self._tokens.wait_s(tokens, now)):
            raise self._refusal("tokens", wait)

    def _refusal(self, limit: str, wait_s: float) -> ResourceExhausted:
        if limit == "sessions":
            return _exhausted(f"key {self.name} runs all the sessions it may", "KEY_SESSIONS", SESSION_RETRY_S)
        if limit == "requests":
            return _exhausted(f"key {self.name} has used up its requests of this minute", "KEY_REQUESTS", wait_s)
        return _exhausted(f"key {self.name} has too few tokens left for this request", "KEY_TOKENS", wait_s)

    @property
    def id(self) -> str:
        """The opaque name by which workers know the tenant; empty on an open gateway."""
        return tenant_id(self.name)

    def salt(self, asked: str) -> str:
        """The cache salt of a request: no tenant can share another's caches, whatever salt it sends."""
        return tenant_salt(self.name, asked) if self.name else asked


class TokenReservation:
    """The tokens that a running session has reserved; given back once, by `end`."""

    def __init__(self, tenant: Tenant, output: int, shared: bool) -> None:
        """`shared`: whether all gateways count them."""
        self._tenant = tenant
        self._output = output
        self._shared = shared
        self._ended = False

    def end(self, output: int) -> None:
        """The session has ended with `output` tokens."""
        if not self._ended:
            self._ended = True
            self._tenant.give_back(max(0, self._output - output), sessions=1, shared=self._shared)


OPEN = Tenant("", TenantLimits())


def check_operator(tenant: Tenant) -> None:
    """Raises PermissionDenied unless the tenant is an operator; on an open gateway every caller is."""
    if tenant.name and not tenant.limits.operator:
        raise PermissionDenied(
            f"key {tenant.name} is no operator's; use one that is marked `operator = true`.", reason="OPERATOR"
        )


def _exhausted(what: str, reason: str, wait_s: float) -> ResourceExhausted:
    return ResourceExhausted(f"{what}; retry in {wait_s:.1f} s.", reason=reason, retry_s=wait_s)
