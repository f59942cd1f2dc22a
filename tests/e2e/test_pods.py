"""Pods that come, go and are replaced under load: real processes behind names that are looked up again and again.

`pytest -s tests/e2e/test_pods.py` prints how long each took to get sessions, or to be free of them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slipstream.rpc.channel import channel
from slipstream.v1 import gateway_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.e2e.pods import Deployment, Hosts, Pod, seconds_until, start_gateway
from tests.support.follower import Follower

LONG = 20_000
MOST_TEXTS = 40
TARGET = {"MODEL": "emulated:base_ms=50", "KV_TOKENS": "500000", "MEASURE_S": "0.2"}
DRAFT = {"MODEL": "emulated:acceptance=0.9", "KV_TOKENS": "500000"}

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a name server of one's own, by mount, needs root")


async def sessions(pod: Pod) -> int:
    async with channel(pod.address) as line:
        call = worker_pb2_grpc.WorkerServiceStub(line).Watch(worker_pb2.WatchRequest(), timeout=10)
        load: worker_pb2.WatchResponse = await call.read()
        call.cancel()
        return int(load.sessions)


async def until_has(pod: Pod, count: int) -> None:
    async def has() -> bool:
        return await sessions(pod) == count

    await seconds_until(has)


@dataclass
class System:
    stub: Any
    verifiers: Deployment
    drafters: Deployment
    texts: list[Follower]

    def follow(self) -> Follower:
        self.texts.append(Follower(self.stub, [len(self.texts) % 200, 8, 9], LONG))
        return self.texts[-1]

    async def until_used(self, pod: Pod) -> float:
        """Texts are asked for until the pod has one of them."""

        async def used() -> bool:
            if len(self.texts) < MOST_TEXTS:
                self.follow()
            await asyncio.sleep(0.2)
            return await sessions(pod) > 0

        return await seconds_until(used)

    async def going_on(self) -> None:
        """Every text that was begun gets longer."""
        before = [len(text.tokens) for text in self.texts]
        async with asyncio.timeout(60):
            while any(len(text.tokens) <= length for text, length in zip(self.texts, before, strict=True)):
                for text in self.texts:
                    assert not text.reading.done() or text.reading.result()
                await asyncio.sleep(0.02)

    async def end(self) -> None:
        """Every token of every text is the target's own."""
        for text in self.texts:
            await text.end()


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    async with AsyncExitStack() as stack:
        hosts = Hosts(tmp_path / "hosts")
        verifiers = Deployment("verifier", "verifier_svc", "VERIFIER", hosts, stack)
        drafters = Deployment("drafter", "drafter_svc", "DRAFTER", hosts, stack)
        await asyncio.gather(verifiers.add(**TARGET), drafters.add(**DRAFT))
        address = await start_gateway(
            stack,
            hosts,
            VERIFIERS=f"dns:///verifier:{verifiers.port}",
            DRAFTERS=f"model=dns:///drafter:{drafters.port}",
            DISCOVERY_S="0.5",
            GRACE_S="0",
        )
        line = await stack.enter_async_context(channel(address))
        yield System(gateway_pb2_grpc.GatewayServiceStub(line), verifiers, drafters, [])


@pytest.mark.long
async def test_pods_that_are_added_get_sessions_and_pods_that_are_removed_lose_none(system: System) -> None:
    """As a good version replaces every pod, drafters first: no client notices."""
    for _ in range(4):
        system.follow()
    await system.going_on()
    for deployment, settings in ((system.drafters, DRAFT | {"MAX_NODES": "64"}), (system.verifiers, TARGET)):
        new = await deployment.add(**settings)
        print(f"{deployment.name}: sessions {await system.until_used(new):.1f} s after it was ready")
        (old,) = (pod for pod in deployment.pods if pod is not new)
        print(f"{deployment.name}: {await sessions(old)} sessions of {len(system.texts)} move, pod removed", end=" ")
        await deployment.remove(old)
        await system.going_on()
        await until_has(new, len(system.texts))
        print("and none was lost")
    await system.end()


async def test_a_drafter_of_a_bad_version_or_of_another_model_gets_no_session(system: System) -> None:
    """Readiness stops the first. It shows that the second serves, not what: the vocabulary's fingerprint does."""
    system.follow()
    await system.going_on()
    (serving,) = system.drafters.pods
    assert not await system.drafters.roll_out(MODEL="emulated:nonsense=1")
    assert system.drafters.pods == [serving]
    await system.going_on()
    await until_has(serving, 1)
    assert await system.texts[0].drafted() > 0
    stranger = await system.drafters.add(MODEL="emulated:vocabulary=300")
    for _ in range(3):
        system.follow()
    await system.going_on()
    await until_has(serving, 4)
    assert await sessions(stranger) == 0
    await system.end()
