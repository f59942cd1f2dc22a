"""A request that is not sampled is one span if something was wrong with it, and none if not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from gateway.store.memory import MemoryBackend
from slipstream.telemetry import spans
from slipstream.telemetry.tracing import Clocks
from tests.support.traced_system import PARENT, Refusing, System, read_events

HURRIED = Clocks(monotonic_s=lambda: 1000 * time.monotonic())
"""Of a gateway to which everything seems slow."""
UNSAMPLED = ("traceparent", PARENT[1][:-2] + "00")


@pytest.fixture(autouse=True)
def nothing_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    monkeypatch.setattr(
        "gateway.telemetry.kept_traces.REJECTED", 1
    )  # how many are drafted is a matter of the machine's pace


async def ordinary(system: System) -> Any:
    await system.open([await system.verifier()], [])
    call = system.call(40, parent=UNSAMPLED)
    await read_events(call)
    return call


async def refused(system: System) -> Any:
    """For a reason that is the client's."""
    await system.start()
    call = system.call(40, parent=None, model="nobody's")
    with pytest.raises(grpc.RpcError):
        await read_events(call)
    return call


async def left(system: System) -> Any:
    await system.start()
    call = system.call(1000, parent=None)
    await call.read()
    call.cancel()
    return None


async def failed(system: System) -> Any:
    store = Refusing(MemoryBackend(), owner="me", ttl_s=60, lease_s=60)
    await system.open([await system.verifier()], [], store)
    call = system.call(100, parent=UNSAMPLED)
    with pytest.raises(grpc.RpcError):
        await read_events(call)
    return call


async def slow(system: System) -> Any:
    await system.open([await system.verifier()], [], clocks=HURRIED)
    call = system.call(8, parent=None)
    await read_events(call)
    return call


async def rejected(system: System) -> Any:
    verifier = await system.verifier(always_speculate=True)  # else it may verify none of so poor a drafter's candidates
    await system.open([verifier], [await system.drafter(engine="emulated:base_ms=1&acceptance=0")])
    call = system.call(60, parent=None)
    await read_events(call)
    return call


async def moved(system: System) -> Any:
    first = await system.verifier()
    await system.open([first, await system.verifier()], [])
    call = system.call(80, parent=None)
    await call.read()
    await call.read()
    assert len(first.scheduler)
    await first.server.stop(0)
    await read_events(call)
    return call


@pytest.mark.parametrize("asked", [ordinary, refused, left])
async def test_an_unsampled_request_without_a_fault_has_no_span(
    system: System, asked: Callable[[System], Awaitable[Any]]
) -> None:
    call = await asked(system)
    await asyncio.sleep(0.05)
    assert not await system.collector.spans()
    assert call is None or "trace-id" not in dict(await call.trailing_metadata())


WRONG: dict[Callable[[System], Awaitable[Any]], Callable[[Any], bool]] = {
    failed: lambda span: bool(span.failed and span.attributes[spans.ERROR] == "INTERNAL"),
    slow: lambda span: bool(span.ended - span.began >= 10.0),
    rejected: lambda span: bool(span.attributes[spans.REJECTED_PERCENT] >= 75),
    moved: lambda span: bool(span.attributes[spans.REHOMED] == 1),
}


@pytest.mark.parametrize("asked", WRONG)
async def test_a_request_with_which_something_was_wrong_is_one_span_that_its_client_finds(
    system: System, asked: Callable[[System], Awaitable[Any]]
) -> None:
    call = await asked(system)
    [span] = await system.collector.spans()
    assert span.name == spans.GENERATE
    assert span.attributes[spans.UNSAMPLED]
    assert WRONG[asked](span)
    assert span.trace == dict(await call.trailing_metadata())["trace-id"]


async def test_where_tracing_is_off_no_span_is_sent(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    await slow(system)
    assert not await system.collector.spans()
