"""Traffic that is split, shadows that watch it, and what operators are told: real gateway, verifier and drafters, over
real gRPC in one process; only their models are emulated."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.config import GatewayConfig
from gateway.gateway import GatewayDependencies, GatewayServer, running
from gateway.store.memory import MemoryBackend, MemoryStore
from measurement.experiments.comparison import merge
from slipstream.client.client import complete
from slipstream.client.completion import Completion
from slipstream.engine.factory import open_engine
from slipstream.errors import InvalidArgument
from slipstream.rpc.channel import channel, error_of
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2
from tests.support.fleet import drafter, emulated_text, until, verifier
from verifier_svc.verifier import VerifierServer

TOKENIZER = str(Path(__file__).resolve().parents[2] / "models" / "target")
KV = 1_000_000
TOKENS = 24


class Place:
    """One verifier, two drafters, and as many gateways as a test starts, all on one store."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.memory = MemoryBackend()
        self.verifier: VerifierServer
        self.drafters: dict[str, str] = {}
        self.gateways: list[GatewayServer] = []

    async def begin(self, *, base_ms: int = 4, **drafters: float) -> None:
        """Drafters by name, each right so often."""
        target = open_engine(f"emulated:base_ms={base_ms}", kv_tokens=KV)
        self.verifier = await self.stack.enter_async_context(verifier(target))
        for name, acceptance in drafters.items():
            engine = open_engine(f"emulated:acceptance={acceptance}", kv_tokens=KV)
            self.drafters[name] = await self.stack.enter_async_context(drafter(engine))

    async def gateway(self, experiment: str, **settings: Any) -> Any:
        config = GatewayConfig(
            verifiers=(self.verifier.address,),
            tokenizer=TOKENIZER,
            listen="127.0.0.1:0",
            drafters=tuple(f"{name}={address}" for name, address in self.drafters.items()),
            experiment=experiment,
            grace_s=0.0,
            **settings,
        )
        owner = str(len(self.gateways))
        store = MemoryStore(self.memory, owner=owner, ttl_s=60, lease_s=60)
        world = GatewayDependencies(random.Random(len(self.gateways)).getrandbits, store=store)
        gateway = await self.stack.enter_async_context(running(config, world))
        await gateway.ready()
        self.gateways.append(gateway)
        present = [known for known in gateway.router.drafters if known.address != "127.0.0.1:1"]
        while not all(known.present for known in present):
            await gateway.router.changes.wait()
        return await self.stack.enter_async_context(channel(gateway.address))


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        yield Place(stack)


async def said(line: Any, first: int, **more: Any) -> Completion:
    """A whole text; what it is must not depend on who drafted."""
    asked = {"max_tokens": TOKENS, "sampling": gateway_pb2.SamplingOptions(temperature=0.0)} | more
    prompt = gateway_pb2.TokenIds(token_ids=[first, 8, 9])
    completion = await complete(line, gateway_pb2.GenerateRequest(prompt_token_ids=prompt, ignore_eos=True, **asked))
    assert completion.token_ids == emulated_text([first, 8, 9], asked["max_tokens"])
    return completion


async def told(line: Any) -> gateway_pb2.GetExperimentResponse:
    answer: gateway_pb2.GetExperimentResponse = await gateway_pb2_grpc.GatewayServiceStub(line).GetExperiment(
        gateway_pb2.GetExperimentRequest()
    )
    return answer


def arm_of(gateway: GatewayServer, completion: Completion) -> str:
    samples = gateway.samples
    assert samples is not None
    return samples.experiment.arm_of(completion.started.session_id).name


def drafted(completion: Completion) -> set[str]:
    return {share.name for share in completion.finished.statistics.drafters}


async def warmed_up(line: Any, *names: str) -> None:
    """The verifier's links to these drafters are up: each of them drafts for who asks for it, which is no part of an
    experiment."""
    async with asyncio.timeout(60):
        for name in names:
            chosen = gateway_pb2.SpeculationOptions(drafters=[name])
            while drafted(await said(line, 9, speculation=chosen)) != {name}:
                pass


async def test_sessions_draft_with_the_drafters_of_their_arm_and_samples_of_gateways_merge(place: Place) -> None:
    await place.begin(model=0.9, other=0.6)
    split = "old: 2 drafters=model; new: 1 drafters=other; plain: 1 off"
    lines = [await place.gateway(split), await place.gateway(split)]
    allowed = {"old": {"model"}, "new": {"other"}, "plain": set()}
    everyone = []
    for number in range(16):
        which = number % 2
        completion = await said(lines[which], number)
        arm = arm_of(place.gateways[which], completion)
        assert drafted(completion) <= allowed[arm]
        everyone.append((arm, completion))
    merged = merge([await told(line) for line in lines])
    for arm in merged.arms:
        own = [completion.finished.statistics for name, completion in everyone if name == arm.name]
        assert arm.begun == arm.finished == len(arm.samples) == len(own) > 0
        assert sum(sample.served.drafted for sample in arm.samples) == sum(each.drafted for each in own)
        assert sum(sample.served.accepted for sample in arm.samples) == sum(each.accepted for each in own)
        assert {sample.tokens for sample in arm.samples} == {TOKENS}
        assert sorted(sample.ttft_s for sample in arm.samples) == pytest.approx(sorted(each.ttft_s for each in own))
        assert all(0.0 < sample.verifier_s <= sample.e2e_s for sample in arm.samples)
        assert all((sample.drafter_s > 0.0) == (arm.name != "plain") for sample in arm.samples)


@pytest.mark.parametrize(
    "request_",
    [
        {"speculation": gateway_pb2.SpeculationOptions(drafters=["other"])},
        {"speculation": gateway_pb2.SpeculationOptions(disabled=True)},
        {"speculation": gateway_pb2.SpeculationOptions(max_draft_tokens=0)},
        {"workload": "ruled"},
        {"workload": "off"},
        {"sampling": gateway_pb2.SamplingOptions(temperature=0.0, acceptance=types_pb2.ACCEPTANCE_RULE_REJECTION)},
    ],
)
async def test_requests_whose_drafters_a_client_or_rule_chose_take_no_part_in_the_experiment(
    place: Place, request_: dict[str, Any]
) -> None:
    await place.begin(model=0.9, other=0.6)
    rules = "workload=ruled: drafters=other; workload=off: off; any: max_draft_tokens=4"
    line = await place.gateway("all: 1 drafters=model", rules=rules, trusted_drafters=("other",))
    completion = await said(line, 7, **request_)
    assert drafted(completion) <= {"other"}
    assert (await told(line)).arms[0].begun == 0
    limited = await said(line, 7, speculation=gateway_pb2.SpeculationOptions(max_draft_tokens=3))
    assert drafted(limited) <= {"model"} and (await told(line)).arms[0].begun == 1


async def test_a_session_keeps_its_arm_on_another_gateway_and_is_measured_where_it_began_alone(place: Place) -> None:
    await place.begin(model=0.9, other=0.6)
    split = "old: 1 drafters=model; new: 1 drafters=other"
    lines = [await place.gateway(split), await place.gateway(split)]
    stubs = [gateway_pb2_grpc.GatewayServiceStub(line) for line in lines]
    arms = set()
    for number in range(6):
        completion = await said(lines[0], number)
        arms.add(arm := arm_of(place.gateways[0], completion))
        name = completion.started.session_id
        await stubs[1].Rollback(gateway_pb2.RollbackRequest(session_id=name, output_tokens=4, max_tokens=60))
        again = Completion()
        async for event in stubs[1].Resume(gateway_pb2.ResumeRequest(session_id=name, offset=4)):
            if event.HasField("finished"):
                again.finished.CopyFrom(event.finished)
        assert again.finished.statistics.rounds and drafted(again) <= {"model" if arm == "old" else "other"}
    assert arms == {"old", "new"}
    counts = [sum(arm.begun for arm in (await told(line)).arms) for line in lines]
    assert counts == [6, 0]


async def test_a_shadow_serves_no_session_that_does_not_name_it_and_is_scored(place: Place) -> None:
    await place.begin(base_ms=10, new=1.0, model=0.5)  # of two that are as good the first one serves
    line = await place.gateway("all: 1 shadow=new")
    await warmed_up(line, "new", "model")
    completions = [await said(line, number, max_tokens=60) for number in range(3)]
    assert set().union(*map(drafted, completions)) == {"model"}
    (arm,) = (await told(line)).arms
    served, shadows = [each.served for each in arm.samples], [each.shadows["new"] for each in arm.samples]
    assert sum(new.rounds for new in shadows) < sum(each.rounds for each in served)
    accepted = sum(new.accepted for new in shadows)
    assert accepted > sum(each.accepted for each in served)
    assert accepted > 0.8 * sum(new.drafted for new in shadows)


async def test_a_shadow_that_is_away_or_dies_costs_nothing(place: Place) -> None:
    await place.begin(model=0.9)
    async with AsyncExitStack() as soon:
        place.drafters["dead"] = "127.0.0.1:1"
        place.drafters["new"] = await soon.enter_async_context(
            drafter(open_engine("emulated:acceptance=1.0", kv_tokens=KV))
        )
        line = await place.gateway("all: 1 drafters=model shadow=new+dead")
        await warmed_up(line, "model", "new")
        completions = [await said(line, 1)]
    completions += [await said(line, number) for number in range(2, 5)]
    assert set().union(*map(drafted, completions)) == {"model"}
    assert not any(completion.finished.statistics.rehomed for completion in completions)
    (arm,) = (await told(line)).arms
    assert arm.finished == 4
    assert not any("dead" in sample.shadows for sample in arm.samples)
    breakers = [
        known.breaker.state(place.gateways[0].router.clock()).name for known in place.gateways[0].router.drafters
    ]
    assert set(breakers) == {"CLOSED"}
    await until(lambda: not place.verifier.service.sources.shadows._of_session)


async def test_a_gateway_without_an_experiment_refuses_to_report_one(place: Place) -> None:
    await place.begin(model=0.9)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await told(await place.gateway(""))
    assert error_of(refusal.value).reason == "NO_EXPERIMENT"
    with pytest.raises(InvalidArgument, match="GATEWAY_EXPERIMENT, arm 1"):
        await place.gateway("old: 1 drafters=nobody")
