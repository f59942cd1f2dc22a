"""The search for the verifier that a session is opened on: one of the arithmetic that wrote its text so far, first
those that have not failed it. The router ranks verifiers by load and shared prefixes
(`gateway.routing.verifier_choice`); what depends on the session's own past stands here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from gateway.config import GatewayConfig
from gateway.requests.resolved_request import ResolvedRequest
from gateway.routing.router import Router
from gateway.routing.verifiers import VerifierWorker
from gateway.sessions.state import SessionLife
from slipstream.concurrency import Backoff
from slipstream.errors import ARITHMETIC_GONE, STEP_FAILED, SlipstreamError, Unavailable


class VerifierSearch:
    """Finds the verifiers of one session, one after the other."""

    def __init__(self, resolved: ResolvedRequest, router: Router, config: GatewayConfig, life: SessionLife) -> None:
        self.mixed = resolved.mixed_arithmetic
        """The request's choice, or that of a client that resumed the session."""
        self._model = resolved.model.name
        self._router = router
        self._config = config
        self._life = life
        self._avoid: set[VerifierWorker] = set()
        """Verifiers that failed this session or had no room for it: others come first."""
        self._failed_steps = Backoff(first_s=0.5)
        self._return_at = 0.0
        """Loop time before which those are not tried again, after a step that failed: what is wrong may pass."""

    def note_failure(self, verifier: VerifierWorker, error: SlipstreamError) -> None:
        """The verifier failed the session with this error."""
        self._avoid.add(verifier)
        if error.reason == STEP_FAILED:
            self._return_at = asyncio.get_running_loop().time() + self._failed_steps.next_delay_s()

    def untried(self, arithmetic: str) -> VerifierWorker | None:
        """A verifier of this arithmetic that has not failed the session."""
        return self._router.choose_verifier(self._model, self._avoid, (), arithmetic)

    async def wait(self, prefixes: Sequence[bytes], arithmetic: str) -> VerifierWorker | None:
        """A verifier of the arithmetic that wrote the text so far (empty: of any); where none came in time and the text
        may be mixed, one of another. None when the session was cancelled meanwhile. Raises Unavailable when no verifier
        came."""
        try:
            async with asyncio.timeout(self._config.rehoming_wait_s):
                while not self._life.cancelled:
                    if verifier := self._choose(prefixes, arithmetic):
                        return verifier
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(self._return_at if self._awaiting_return else None):
                            await self._router.changes.wait()
                return None
        except TimeoutError as error:
            if other := self._choose(prefixes, arithmetic, waited=True):
                return other
            raise self._nowhere(arithmetic) from error

    def _choose(self, prefixes: Sequence[bytes], arithmetic: str, *, waited: bool = False) -> VerifierWorker | None:
        """A verifier of the arithmetic that wrote the text so far, preferably one that has not failed this session.
        Where the text may be mixed and no such one is there, one of another arithmetic is chosen as soon as the others
        failed, or once the session has `waited` in vain. None while there is none."""
        choose, model = self._router.choose_verifier, self._model
        fresh = choose(model, self._avoid, prefixes, arithmetic)
        failed = None if fresh or self._awaiting_return else choose(model, (), prefixes, arithmetic)
        if fresh is None and self._may_mix and (waited or failed):
            return choose(model, self._avoid, prefixes) or failed or choose(model, (), prefixes)
        return fresh or failed

    def _nowhere(self, arithmetic: str) -> Unavailable:
        """The error of a session that found no verifier."""
        choose, model = self._router.choose_verifier, self._model
        if choose(model, arithmetic=arithmetic) or not choose(model):
            return Unavailable("No verifier is ready for this model; retry.", reason="NO_VERIFIER")
        return Unavailable(
            f"No verifier of arithmetic {arithmetic} is left, which wrote this text so far; resume it when one is "
            "back, or with mixed_arithmetic to go on with another one, marked.",
            reason=ARITHMETIC_GONE,
        )

    @property
    def _may_mix(self) -> bool:
        """Whether another arithmetic may go on with the text, marked: the client's choice before the operator's."""
        return self._config.mixed_arithmetic == "mark" if self.mixed is None else self.mixed

    @property
    def _awaiting_return(self) -> bool:
        return asyncio.get_running_loop().time() < self._return_at
