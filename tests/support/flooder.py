"""A drafter that floods: `python -m tests.support.flooder KIND` prints its address and goes on."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from slipstream.v1 import drafter_pb2, types_pb2
from tests.support.hostile_drafter import Command, HostileDrafter, Responses, frame, hostile

Flood = Callable[[Command], drafter_pb2.DraftResponse]


def _crowd(command: Command) -> drafter_pb2.DraftResponse:
    """As many entries as fit into one message."""
    one = frame(command, [1]).candidates[0]
    return drafter_pb2.DraftResponse(candidates=[one] * 100_000)


def _distributions(command: Command) -> drafter_pb2.DraftResponse:
    """As many entries of distributions as one frame may have."""
    longest = types_pb2.Distribution(token_ids=range(256), weights=[65535] * 256)
    return frame(command, range(256), parents=[0] * 256, distributions=[longest] * 256)


FLOODS: dict[str, Flood] = {
    "repeats": lambda command: frame(command, [1] * 50),
    "bushes": lambda command: frame(command, range(250), parents=[0] * 250),
    "for nobody": lambda command: frame(command, [1] * 50, session=command.session + 1000),
    "nothing": lambda command: drafter_pb2.DraftResponse(),
    "crowds": _crowd,
    "distributions": _distributions,
}


def flood(kind: str) -> Callable[[HostileDrafter, Command], Responses]:
    def answer(_: HostileDrafter, command: Command) -> Responses:
        generation = 0
        while command.HasField("open"):
            response = FLOODS[kind](command)
            if kind == "bushes":
                generation += 1
                response.candidates[0].generation = generation
            yield response

    return answer


async def main(kind: str) -> None:
    async with hostile(flood(kind)) as enemy:
        print(enemy.address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
