"""The workers that a gateway's configuration names, put into its router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gateway.config import GatewayConfig
from gateway.routing.breaker import BreakerSettings
from gateway.routing.discovery import Discovery, by_name
from gateway.routing.drafters import DrafterWorker, pool_of, replica
from gateway.routing.experiment import Experiment
from gateway.routing.router import Router
from gateway.routing.verifiers import DrafterFailed, VerifierWorker
from slipstream.proposers.registry import method_in_verifier
from slipstream.rpc import DRAFTER, VERIFIER
from slipstream.rpc.channel import Dial
from slipstream.rpc.multiplexed_stream import ByteCounter


@dataclass(frozen=True, slots=True)
class ConfiguredWorkers:
    """A worker at an address is in the router from the beginning, one behind a DNS name as soon as it is found."""

    config: GatewayConfig
    fingerprint: str
    """Fingerprint of the gateway's tokenizer."""
    dial_for: Callable[[str], Dial]
    """Returns the dialer for the workers of a role."""
    traffic: ByteCounter
    drafter_failed: DrafterFailed = lambda drafter, reason, sessions: None
    experiment: Experiment | None = None

    def router(self, clock: Callable[[], float]) -> Router:
        router = Router(clock)
        router.aliases = self.config.parsed_aliases()
        self._add_verifiers(router)
        self._add_drafters(router)
        return router

    def _add_verifiers(self, router: Router) -> None:
        dial = self.dial_for(VERIFIER)

        def made(address: str) -> VerifierWorker:
            return VerifierWorker(
                address, dial, self.fingerprint, router.changes.notify_all, self.traffic, self.drafter_failed
            )

        for target in self.config.verifiers:
            if by_name(target):
                router.discoveries.append(Discovery(target, made, router.verifiers, router.changes.notify_all))
            else:
                router.verifiers.append(made(target))

    def _add_drafters(self, router: Router) -> None:
        dial, config = self.dial_for(DRAFTER), self.config
        tolerance = BreakerSettings(
            config.breaker_window_s, config.breaker_cool_down_s, config.breaker_longest_cool_down_s
        )
        reserved = frozenset[str]() if self.experiment is None else self.experiment.reserved

        def made(name: str, address: str) -> DrafterWorker:
            pool = pool_of(name)
            channel = None if method_in_verifier(address) else dial(address)
            drafter = DrafterWorker(
                name, address, pool in config.trusted_drafters, channel, router.changes.notify_all, tolerance
            )
            drafter.reserved = pool in reserved
            return drafter

        def replicated(pool: str, address: str) -> DrafterWorker:
            return made(replica(pool, address), address)

        names = [entry.name for entry in config.entries]
        router.pools = {name: name in config.trusted_drafters for name in names}
        for entry in config.entries:
            if by_name(entry.target):
                found = partial(replicated, entry.name)
                router.discoveries.append(Discovery(entry.target, found, router.drafters, router.changes.notify_all))
            else:
                make = replicated if names.count(entry.name) > 1 else made
                router.drafters.append(make(entry.name, entry.target))
