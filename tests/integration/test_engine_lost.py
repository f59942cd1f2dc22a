"""A verifier that loses its engine ends at once: gateways take its sessions elsewhere."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from slipstream.engine.emulated.engine import EmulatedEngine
from slipstream.engine.engine import EngineLost, ModelOutput
from slipstream.engine.factory import open_engine
from slipstream.engine.segment import Segment
from tests.support.fleet import Decoded, emulated_text, gateway, verifier

STEPS = 5


def failing(error: Exception) -> EmulatedEngine:
    engine = open_engine("emulated:")
    assert isinstance(engine, EmulatedEngine)
    forward, taken = engine.forward, 0

    def fail(segments: list[Segment]) -> ModelOutput:
        nonlocal taken
        taken += 1
        if taken == STEPS:
            raise error
        return forward(segments)

    engine.forward = fail  # type: ignore[method-assign]
    return engine


async def speak(address: str) -> tuple[Decoded, grpc.StatusCode]:
    """What a session heard until its stream broke, and how it broke."""
    async with gateway(address) as client:
        _, session = await client.open([1, 2, 3], tokens=100)
        with pytest.raises(grpc.aio.AioRpcError) as broken:
            await client.broken()
        return session, broken.value.code()


async def test_a_lost_engine_breaks_the_streams_and_ends_the_verifier() -> None:
    grace_s = 60.0  # in which nobody could finish
    async with asyncio.timeout(grace_s / 2) as limit:
        with pytest.RaisesGroup(EngineLost, flatten_subgroups=True):
            async with verifier(failing(EngineLost("a worker is gone")), grace_s=grace_s) as server:
                speaking = asyncio.create_task(speak(server.address))
                await asyncio.Event().wait()
        session, code = await speaking
    assert not limit.expired()
    assert session.end is None and len(session.token_ids) < STEPS
    assert code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.mended_faults
async def test_any_other_fault_is_survived() -> None:
    async with verifier(failing(RuntimeError("bug"))) as server, gateway(server.address) as client:
        served = await client.decode([1, 2, 3], tokens=100)
        assert served.token_ids == emulated_text([1, 2, 3], 100)


@pytest.mark.mended_faults
async def test_faults_of_an_emulated_model_are_survived() -> None:
    engine = open_engine("emulated:fault_every=4")
    async with verifier(engine, measure_s=0.05) as server, gateway(server.address) as client:
        served = await client.decode([1, 2, 3], tokens=100)
        assert served.token_ids == emulated_text([1, 2, 3], 100)
    with pytest.raises(RuntimeError, match="was to fail"):
        for _ in range(4):
            sequence = engine.kv.begin([1], "")
            engine.kv.grow(sequence, 1)
            engine.forward([Segment(sequence, [1])])
