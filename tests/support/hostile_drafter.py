"""A drafter that sends whatever a test wants, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from slipstream.rpc.worker_service import WorkerIdentity, WorkerService
from slipstream.v1 import drafter_pb2, drafter_pb2_grpc, types_pb2, worker_pb2

Command = drafter_pb2.DraftCommand
Responses = Iterable[drafter_pb2.DraftResponse | Exception]
Answer = Callable[["HostileDrafter", Command], Responses]


class HostileDrafter(drafter_pb2_grpc.DrafterServiceServicer):
    """`answer` is asked for what to send after each command; an exception among it ends the stream."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.commands: list[Command] = []
        self.streams = 0
        self.address = ""
        self.steps = 0
        """Steps that its WorkerService reports, where it has one."""
        self.steps_on = False
        """Adds a step to each report of its load."""
        self.ends: Callable[[Any], None] | None = None
        """Set: called with the context of each stream, which then ends without a word."""

    def kinds(self, kind: str) -> list[Command]:
        return [command for command in self.commands if command.WhichOneof("command") == kind]

    def load(self) -> worker_pb2.WatchResponse:
        self.steps += self.steps_on
        return worker_pb2.WatchResponse(steps=self.steps)

    async def Draft(self, requests: Any, context: Any) -> None:
        self.streams += 1
        if self.ends is not None:
            self.ends(context)
            return
        await context.send_initial_metadata(())
        async for request in requests:
            for command in request.commands:
                self.commands.append(command)
                for response in self.answer(self, command):
                    if isinstance(response, Exception):
                        raise response
                    await context.write(response)
                    await asyncio.sleep(0)  # writing to a stream that was broken off returns at once, for ever


@asynccontextmanager
async def hostile(answer: Answer, model: types_pb2.ModelInfo | None = None) -> AsyncIterator[HostileDrafter]:
    """With a `model` it reports the role of a drafter, so that gateways take it for one."""
    drafter = HostileDrafter(answer)
    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(drafter, server)
    if model is not None:
        WorkerService(WorkerIdentity(model, worker_pb2.ROLE_DRAFTER, "model"), drafter.load).register(server)
    drafter.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield drafter
    finally:
        await server.stop(0)


def frame(command: Command, token_ids: Iterable[int], **changes: Any) -> drafter_pb2.DraftResponse:
    """Candidates that a good drafter could send on the command's prefix, but for the changes."""
    tokens = list(token_ids)
    base = len(command.open.prefix.token_ids)
    if command.HasField("commit"):
        base = command.commit.base_length + len(command.commit.token_ids)
    fields: dict[str, Any] = {
        "session": command.session,
        "epoch": command.epoch,
        "base_length": base,
        "generation": base,
        "first_node": 1,
        "token_ids": tokens,
        "confidences": bytes([3] * len(tokens)),
    }
    return drafter_pb2.DraftResponse(candidates=[types_pb2.Candidates(**fields | changes)])


def refusal(command: Command, code: int, message: str = "no") -> drafter_pb2.DraftResponse:
    failure = types_pb2.Failure(code=code, message=message)
    return drafter_pb2.DraftResponse(
        refusals=[drafter_pb2.DraftRefusal(session=command.session, epoch=command.epoch, failure=failure)]
    )
