"""`slipstream resume`, `rollback` and `cancel`: what can be done with a session that is there already."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Annotated, TypeVar

import grpc
import typer

from slipstream.cli.options import LOCAL, ApiKey, Ca, Servers, Tls, explained
from slipstream.client.client import RetrySettings, resume
from slipstream.client.completion import Completion
from slipstream.client.gateway_endpoint import GatewayEndpoint
from slipstream.rpc.channel import error_of, parsed
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc

T = TypeVar("T")
Name = Annotated[str, typer.Argument(help="The session_id that `slipstream generate --json` told.")]


def resume_session(
    session: Name,
    server: Servers = None,
    api_key: ApiKey = "",
    tls: Tls = False,
    ca: Ca = "",
    offset: Annotated[int, typer.Option(help="Output tokens that you have.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming.")] = False,
) -> None:
    """Stream the rest of SESSION's text, going on with it where nobody runs it."""
    started = gateway_pb2.Started(session_id=session)
    completion = Completion(started=started, begins=offset, token_ids=[0] * offset)
    echo = None if as_json else _say
    asyncio.run(
        talk(
            "resume",
            doors_of(server, api_key, tls, ca),
            lambda lines: resume(lines, completion, echo, RetrySettings(resume_s=0.0)),
        )
    )
    typer.echo(json.dumps(completion.report()) if as_json else "")


def roll_back_session(
    session: Name,
    server: Servers = None,
    api_key: ApiKey = "",
    tls: Tls = False,
    ca: Ca = "",
    keep: Annotated[int, typer.Option(help="Output tokens that stay.", min=0)] = 0,
    text: Annotated[str | None, typer.Option(help="What stands behind them.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the rest; the same seed says the same again.", min=0)] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most output tokens in all.", min=1)] = None,
    branch: Annotated[bool, typer.Option("--branch", help="Make a new session of it.")] = False,
) -> None:
    """Take SESSION back to an earlier length, or branch off there; prints its name, for `slipstream resume`."""
    request = gateway_pb2.RollbackRequest(
        session_id=session, output_tokens=keep, text=text, seed=seed, max_tokens=max_tokens, branch=branch
    )

    async def ask(lines: Sequence[grpc.aio.Channel]) -> str:
        stub = gateway_pb2_grpc.GatewayServiceStub(lines[0])
        answer: gateway_pb2.RollbackResponse = parsed(await stub.Rollback(request))
        return answer.key.id

    typer.echo(asyncio.run(talk("rollback", doors_of(server, api_key, tls, ca), ask)))


def cancel_session(session: Name, server: Servers = None, api_key: ApiKey = "", tls: Tls = False, ca: Ca = "") -> None:
    """End SESSION, wherever it runs."""

    async def ask(lines: Sequence[grpc.aio.Channel]) -> None:
        request = gateway_pb2.CancelRequest(session_id=session)
        await gateway_pb2_grpc.GatewayServiceStub(lines[0]).Cancel(request)

    asyncio.run(talk("cancel", doors_of(server, api_key, tls, ca), ask))


def doors_of(servers: Sequence[str] | None, api_key: str, tls: bool, ca: str) -> list[GatewayEndpoint]:
    return [GatewayEndpoint(server, api_key, tls, ca) for server in servers or [LOCAL]]


async def talk(
    command: str, doors: Sequence[GatewayEndpoint], talk: Callable[[Sequence[grpc.aio.Channel]], Awaitable[T]]
) -> T:
    """Ends the process with one sentence where the gateway refuses."""
    with explained(command):
        async with AsyncExitStack() as stack:
            lines = [await stack.enter_async_context(door.channel()) for door in doors]
            try:
                return await talk(lines)
            except grpc.aio.AioRpcError as error:
                raise error_of(error) from error


def _say(text: str) -> None:
    typer.echo(text, nl=False)
