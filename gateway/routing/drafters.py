"""The gateway's view of a drafter, which it names to verifiers. It never sends it work: candidates go from worker to
worker."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from gateway.routing.breaker import BreakerSettings, DrafterBreaker
from gateway.routing.worker_watch import WorkerWatch
from slipstream.proposers.registry import method_in_verifier
from slipstream.tokenizer.vocabulary import share_vocabulary, template_warning
from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2, worker_pb2

REPLICA = "@"


def replica(pool: str, address: str) -> str:
    """The name of one of several drafters that share the name `pool` in requests."""
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
    """A drafter's identity and load, and whether sessions may use it."""

    def __init__(
        self,
        name: str,
        address: str,
        trusted: bool,
        channel: grpc.aio.Channel | None,
        changed: Callable[[], None],
        tolerance: BreakerSettings | None = None,
    ) -> None:
        """`name`: its unique name at verifiers; for a drafter behind a DNS name, as `replica` makes it. A drafter
        inside the verifiers has no `channel`."""
        self.name = name
        self.pool = pool_of(name)
        """Its name in requests, rules and metrics, shared with its replicas."""
        self.address = address
        self.trusted = trusted
        self.reserved = False
        """True for an experiment's shadow: it serves only sessions that name it."""
        self._channel = channel
        self._watch = InVerifierWatch(address) if channel is None else WorkerWatch(address, channel, changed)
        self.breaker = DrafterBreaker(tolerance)
        self.closed = False
        """True once it was removed: its address no longer answers and is no longer listed."""
        self.users = 0
        """Sessions of this gateway that use the drafter now."""

    @property
    def present(self) -> bool:
        return self._watch.present

    @property
    def method(self) -> str:
        return self._watch.method

    @property
    def sessions(self) -> int:
        """Sessions that use it: of all gateways as it reports them, and this gateway's own without delay."""
        return max(self.users, self._watch.load.sessions)

    @property
    def draining(self) -> bool:
        return self._watch.load.draining

    @property
    def away(self) -> bool:
        return not self.present

    @property
    def burden(self) -> tuple[bool, bool, int]:
        """Sort key: the replica with the smallest is chosen."""
        return not self.present, self.draining, self.sessions

    def holds(self, length: int) -> bool:
        """Whether a session of `length` tokens fits its context."""
        model = self._watch.model
        return model is None or not model.max_length or length < model.max_length

    def mismatch(self, target: types_pb2.ModelInfo) -> str:
        """The reason why the drafter cannot serve a target, as a sentence; empty if it can or was never reached."""
        mine = self._watch.model
        if mine is None or share_vocabulary(mine, target):
            return ""
        return (
            f"Drafter {self.pool} ({mine.name}) has vocabulary {mine.vocabulary_fingerprint}, the model {target.name} "
            f"has {target.vocabulary_fingerprint}; name another drafter or none."
        )

    def as_address(self, *, shadow: bool = False) -> verifier_pb2.DrafterAddress:
        return verifier_pb2.DrafterAddress(address=self.address, name=self.name, trusted=self.trusted, shadow=shadow)

    def as_served(self, target: types_pb2.ModelInfo) -> gateway_pb2.ServedDrafter:
        mine = self._watch.model
        if mine is None:
            return gateway_pb2.ServedDrafter(name=self.pool, mismatch=unreached_yet(self.pool))
        return gateway_pb2.ServedDrafter(
            name=self.pool, model=mine, mismatch=self.mismatch(target), warning=template_warning(mine, target)
        )

    def as_fleet_worker(self, target: types_pb2.ModelInfo | None) -> gateway_pb2.FleetWorker:
        """`target`: the model that it is to draft for; None while none is known."""
        mine = self._watch.model
        described = gateway_pb2.FleetWorker(
            role=worker_pb2.ROLE_DRAFTER,
            name=self.pool,
            address=self.address,
            model=mine,
            present=self.present,
            load=self._watch.load,
        )
        if mine is not None and target is not None:
            described.problem, described.warning = self.mismatch(target), template_warning(mine, target)
        return described

    async def run(self) -> None:
        await self._watch.run()

    async def close(self) -> None:
        self.closed = True
        if self._channel is not None:
            await self._channel.close()
