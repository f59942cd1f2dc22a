"""The drafters the gateway may name to verifiers. It never sends them work: candidates go from worker to worker."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from gateway.routing.breaker import BreakerSettings, CircuitBreaker
from gateway.routing.worker_watch import WorkerWatch
from slipstream.proposers.registry import method_in_verifier
from slipstream.tokenizer.vocabulary import share_vocabulary
from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2, worker_pb2

REPLICA = "@"


def replica(pool: str, address: str) -> str:
    """The name of one of several drafters that requests know by one name."""
    return f"{pool}{REPLICA}{address}"


def pool_of(name: str) -> str:
    return name.partition(REPLICA)[0]


def unreached_yet(pool: str) -> str:
    return f"Drafter {pool} has not been reached yet."


class InVerifierWatch:
    """Stands for the watch of a drafter that runs inside every verifier: there is no worker to ask."""

    def __init__(self, address: str) -> None:
        self.method = method_in_verifier(address)
        self.model: types_pb2.ModelInfo | None = types_pb2.ModelInfo(name=address)  # no fingerprint: fits every target
        self.load = worker_pb2.WatchResponse()
        self.present = True

    async def run(self) -> None:
        """Nothing changes."""


class DrafterWorker:
    """A worker as it says it is, and whether sessions may have it."""

    def __init__(
        self,
        name: str,
        address: str,
        trusted: bool,
        channel: grpc.aio.Channel | None,
        changed: Callable[[], None],
        tolerance: BreakerSettings | None = None,
    ) -> None:
        """`name`: what verifiers call it, one of its own; of one that was found behind a DNS name, `replica`. A drafter
        inside the verifiers has no `channel`."""
        self.name = name
        self.pool = pool_of(name)
        """What requests, rules and clients call it, and its replicas."""
        self.address = address
        self.trusted = trusted
        self.reserved = False
        """Whether it serves only those who name it: it is a shadow (`gateway.experiments.experiment`)."""
        self._channel = channel
        self._presence = InVerifierWatch(address) if channel is None else WorkerWatch(address, channel, changed)
        self.breaker = CircuitBreaker(tolerance)
        self.closed = False
        """Whether it was let go: nobody is at its address, and nobody is expected there."""
        self.users = 0
        """Sessions of this gateway that have the drafter now."""

    @property
    def present(self) -> bool:
        return self._presence.present

    @property
    def method(self) -> str:
        return self._presence.method

    @property
    def sessions(self) -> int:
        """Those of other gateways as far as known; a crowd of our own that comes at once is counted at once."""
        return max(self.users, self._presence.load.sessions)

    @property
    def draining(self) -> bool:
        return self._presence.load.draining

    @property
    def away(self) -> bool:
        return not self.present

    @property
    def burden(self) -> tuple[bool, bool, int]:
        """Of replicas the one with the least comes first."""
        return not self.present, self.draining, self.sessions

    def holds(self, length: int) -> bool:
        """Whether a session of so many tokens is not too long for it."""
        model = self._presence.model
        return model is None or not model.max_length or length < model.max_length

    def mismatch(self, target: types_pb2.ModelInfo) -> str:
        """The sentence that says why the drafter cannot serve a target; empty when it can or was never reached."""
        mine = self._presence.model
        if mine is None or share_vocabulary(mine, target):
            return ""
        return (
            f"Drafter {self.pool} ({mine.name}) has vocabulary {mine.vocabulary_fingerprint}, the model {target.name} "
            f"has {target.vocabulary_fingerprint}; name another drafter or none."
        )

    def as_address(self, *, shadow: bool = False) -> verifier_pb2.DrafterAddress:
        return verifier_pb2.DrafterAddress(address=self.address, name=self.name, trusted=self.trusted, shadow=shadow)

    def as_served(self, target: types_pb2.ModelInfo) -> gateway_pb2.ServedDrafter:
        unreached = "" if self._presence.model else unreached_yet(self.pool)
        return gateway_pb2.ServedDrafter(
            name=self.pool, model=self._presence.model, mismatch=self.mismatch(target) or unreached
        )

    async def run(self) -> None:
        await self._presence.run()

    async def close(self) -> None:
        self.closed = True
        if self._channel is not None:
            await self._channel.close()
