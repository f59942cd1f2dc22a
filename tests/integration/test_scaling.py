"""Verifiers and drafters that come and go behind a DNS name, over real gRPC; the name is the test's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from gateway.config import GatewayConfig
from gateway.gateway import GatewayDependencies, GatewayServer, running
from slipstream.engine.factory import open_engine
from slipstream.rpc.channel import channel
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc, verifier_pb2
from tests.support.fleet import drafter, until, verifier
from tests.support.fleet import gateway as speaking
from tests.support.scripted_gateway import Answer, Setting
from tests.support.scripted_verifier import ScriptedVerifier, served
from verifier_svc.sources import candidate_sources


class Pods:
    """What two names stand for at present."""

    def __init__(self) -> None:
        self.of: dict[str, list[str]] = {"verifier:50071": [], "drafter:50061": []}

    async def __call__(self, target: str) -> Iterable[str]:
        return list(self.of[target])


async def opened(stack: AsyncExitStack, setting: Setting, pods: Pods) -> tuple[GatewayServer, Any]:
    config = GatewayConfig(
        verifiers=("dns:///verifier:50071",),
        drafters=("model=dns:///drafter:50061",),
        tokenizer=str(setting.folder),
        listen="127.0.0.1:0",
        discovery_s=0.01,
        grace_s=0.0,
    )
    world = GatewayDependencies(random.Random(3).getrandbits, resolve=pods)
    gateway = await stack.enter_async_context(running(config, world))
    line = await stack.enter_async_context(channel(gateway.address))
    return gateway, gateway_pb2_grpc.GatewayServiceStub(line)


async def said(stub: Any, **request: Any) -> Answer:
    answer = Answer()
    async for event in stub.Generate(gateway_pb2.GenerateRequest(prompt="Tell me.", max_tokens=9, **request)):
        answer.add(event)
    return answer


async def test_each_new_verifier_gets_sessions_and_one_that_goes_loses_none(setting: Setting) -> None:
    pods = Pods()
    first, second = setting.verifier(limit=6), setting.verifier()
    async with AsyncExitStack() as stack, AsyncExitStack() as mortal:
        gateway, stub = await opened(stack, setting, pods)
        address, _ = await mortal.enter_async_context(served(first))
        pods.of["verifier:50071"].append(address)
        await gateway.ready()
        waiting = asyncio.create_task(said(stub))  # stands still on the first after six tokens
        await until(lambda: any(session.output == 6 for session in first.sessions.values()))

        other, _ = await stack.enter_async_context(served(second))
        pods.of["verifier:50071"].append(other)
        await until(lambda: sum(verifier.ready for verifier in gateway.router.verifiers) == 2)
        assert (await said(stub)).tokens == second.script[:9]
        assert opens(first) == opens(second) == 1  # the least busy, each with a load of its own

        pods.of["verifier:50071"].remove(address)  # as a Service forgets a pod that is not ready
        assert (await said(stub)).tokens == second.script[:9]
        assert not waiting.done() and len(gateway.router.verifiers) == 2
        await mortal.aclose()
        assert (await waiting).tokens == second.script[:9]
        await until(lambda: [verifier.address for verifier in gateway.router.verifiers] == [other])


async def test_a_verifier_forgets_a_drafter_that_is_gone_once_no_session_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(candidate_sources, "FORGET_S", 0.01)
    async with verifier(open_engine("emulated:")) as server, speaking(server.address) as speaker:
        known = server.service.sources._links
        async with drafter(open_engine("emulated:acceptance=0.9")) as lives:
            async with drafter(open_engine("emulated:acceptance=0.9")) as dies:
                number, session = await speaker.open([1, 2], tokens=50_000, drafters=[lives, dies])
                await until(lambda: all(each.up for each in known.values()) and len(known) == 2)
            await until(lambda: not known[dies].up)
            await asyncio.sleep(0.05)
            assert set(known) == {lives, dies}  # it may come back
            await speaker.command(number, close=verifier_pb2.DecodeClose())
            await session.done.wait()
            await until(lambda: set(known) == {lives})


async def test_replicas_of_a_drafter_are_one_to_clients_and_each_gets_its_share(setting: Setting) -> None:
    pods = Pods()
    target = setting.verifier(limit=3)
    async with AsyncExitStack() as stack:
        gateway, stub = await opened(stack, setting, pods)
        address, _ = await stack.enter_async_context(served(target))
        pods.of["verifier:50071"].append(address)
        await gateway.ready()
        replicas = [await setting.drafter(), await setting.drafter()]
        pods.of["drafter:50061"] += replicas
        await until(lambda: sum(drafter.present for drafter in gateway.router.drafters) == 2)
        listed = await stub.ListModels(gateway_pb2.ListModelsRequest())
        assert [drafter.name for drafter in listed.models[0].drafters] == ["model"]
        named = gateway_pb2.SpeculationOptions(drafters=["model"])
        runs = []
        for run in range(4):  # one after the other: those that come at the same moment see the same load
            runs.append(asyncio.create_task(said(stub, speculation=named if run % 2 else None)))
            await until(lambda: opens(target) == len(runs))
        used = [one.address for opened in target.opens() for one in opened.drafters]
        assert sorted(used) == sorted(replicas * 2)
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)


def opens(verifier: ScriptedVerifier) -> int:
    return len(verifier.opens())
