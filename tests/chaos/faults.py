"""What may happen to a running system: to its processes, its store, and the ways between any two of them.

A fault returns once it is over; one that stays is undone by whoever asked for it. Each makes sure that it happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import grpc
from grpc import StatusCode

from slipstream.v1 import gateway_pb2_grpc
from tests.chaos.cluster import Cluster, Part, asking

Fault = Callable[[Cluster], Coroutine[Any, Any, None]]
Pair = tuple[str, str]
PAIRS: dict[str, Pair] = {
    "client and gateway": ("client", "gateway a"),
    "gateway and verifier": ("gateway a", "verifier a"),
    "gateway and drafter": ("gateway a", "drafter a"),
    "verifier and drafter": ("verifier a", "drafter a"),
    "gateway and store": ("gateway a", "store"),
}
"""Of each kind one. The others can go on."""
CUT_S, FAR_S = 2.0, 0.02
RESETS = 10
BEGUN_S = 60.0


async def killed(*parts: Part) -> None:
    """And started again at the same address, when the others have gone on for a while."""
    for part in parts:
        await part.kill()
    await asyncio.sleep(0.5)
    await asyncio.gather(*(part.start() for part in parts))


async def frozen(part: Part, seconds: float = 3.0) -> None:
    """Alive, silent, and back when others have taken its work: what it says then must not count."""
    await part.freeze()
    await asyncio.sleep(seconds)
    await part.thaw()


async def redis_killed(system: Cluster) -> None:
    """With all that was in it."""
    system.redis.kill()
    await asyncio.sleep(0.5)
    system.redis.start()


async def redis_frozen(system: Cluster) -> None:
    system.redis.freeze()
    await asyncio.sleep(1.0)
    system.redis.thaw()


async def cut(pair: Pair, which: slice, seconds: float | None, system: Cluster) -> None:
    """`which`: of there and back. Without `seconds` it stays."""
    way = system.network.way(*pair)
    await way.cut(*way.lanes[which])
    if seconds is not None:
        await asyncio.sleep(seconds)
        way.heal()


async def reset(pair: Pair, system: Cluster) -> None:
    """Again and again, whatever is dialled meanwhile."""
    way = system.network.way(*pair)
    before = way.resets
    for _ in range(RESETS):
        way.reset()
        await asyncio.sleep(0.2)
    assert way.resets > before


async def far(pairs: Sequence[Pair], system: Cluster) -> None:
    """For as long as texts are said. That they talk now is known."""
    for pair in pairs:
        system.network.way(*pair).slow(FAR_S)


async def others_leave(system: Cluster) -> None:
    """Other clients, who run out of time, cancel their calls, or break their connection, and do not come back. Each way
    is waited for by itself: a call that is to be cancelled or broken has tokens by then, and most are still to come."""
    way, alone = system.network.way("client", "gateway a"), [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(system.gateways[0].door, options=alone) as line:
        stub = gateway_pb2_grpc.GatewayServiceStub(line)
        late = await asyncio.gather(*(ended_late(stub, first) for first in range(4)))
        assert set(late) == {StatusCode.DEADLINE_EXCEEDED}
        cancelled = await asyncio.gather(*(begun(stub, first) for first in range(4, 6)))
        for call in cancelled:
            call.cancel()
        assert {await call.code() for call in cancelled} == {StatusCode.CANCELLED}
        broken = await asyncio.gather(*(begun(stub, first) for first in range(6, 9)))
        way.reset()
        assert {await call.code() for call in broken} == {StatusCode.UNAVAILABLE}


async def ended_late(stub: Any, first: int) -> StatusCode:
    """How a call ends whose client has two seconds; again where the answer is to retry."""
    async with asyncio.timeout(BEGUN_S):
        while (code := await stub.Generate(asking(first, 4000), timeout=2.0).code()) is StatusCode.UNAVAILABLE:
            await asyncio.sleep(0.2)
    return code


async def begun(stub: Any, first: int) -> Any:
    """A call with its first tokens; again where the answer is to retry, as of a gateway that waits for its store."""
    async with asyncio.timeout(BEGUN_S):
        while True:
            call = stub.Generate(asking(first, 4000))
            try:
                while not (await call.read()).HasField("delta"):
                    pass
                return call
            except grpc.aio.AioRpcError as error:
                if error.code() is not StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.2)


PROCESSES: dict[str, Fault] = {
    "a drafter is killed": lambda system: killed(system.drafters[0]),
    "all drafters are killed": lambda system: killed(*system.drafters),
    "a drafter is frozen": lambda system: frozen(system.drafters[0]),
    "a verifier is killed": lambda system: killed(system.verifiers[0]),
    "all verifiers are killed": lambda system: killed(*system.verifiers),
    "a verifier is frozen": lambda system: frozen(system.verifiers[0]),
    "a gateway is killed": lambda system: killed(system.gateways[0]),
    "all gateways are killed": lambda system: killed(*system.gateways),
    "a gateway is frozen": lambda system: frozen(system.gateways[0], 6.0),
    "the store is killed with its data": redis_killed,
    "the store is frozen": redis_frozen,
    "one of each is killed": lambda system: killed(system.gateways[1], system.verifiers[1], system.drafters[1]),
}
NETWORK: dict[str, Fault] = {
    f"{name} {what}": partial(strike, pair)
    for what, strike in {
        f"are cut off for {CUT_S:g} s": lambda pair, system: cut(pair, slice(None), CUT_S, system),
        "are cut off for good": lambda pair, system: cut(pair, slice(None), None, system),
        "are cut off for good on the way there": lambda pair, system: cut(pair, slice(0, 1), None, system),
        "are cut off for good on the way back": lambda pair, system: cut(pair, slice(1, 2), None, system),
        "are reset for 2 s": reset,
        "are 20 ms apart": lambda pair, system: far([pair], system),
    }.items()
    for name, pair in PAIRS.items()
}
FAULTS = (
    PROCESSES
    | NETWORK
    | {
        "all are 20 ms apart": partial(far, list(PAIRS.values())),
        "other clients run out of time, cancel, and break their connection": others_leave,
    }
)
