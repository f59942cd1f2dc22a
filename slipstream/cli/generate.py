"""`slipstream generate`, `resume`, `rollback` and `cancel`: one session of a running gateway."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import grpc
import typer

from slipstream.cli.options import (
    LOCAL,
    ApiKey,
    Ca,
    MaxDraftTokens,
    Servers,
    Tls,
    Workload,
    endpoints,
    explained,
    with_channels,
)
from slipstream.client.client import RetrySettings, complete, resume
from slipstream.client.completion import Completion
from slipstream.client.gateway_endpoint import GatewayEndpoint, sampled_parent
from slipstream.rpc import proto_conversion
from slipstream.rpc.channel import parsed
from slipstream.speculation.sampling_params import ACCEPTANCE_RULES, DEPRECATED_RULES
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended."""
JsonInstead = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")]
SessionId = Annotated[str, typer.Argument(help="The session_id that `slipstream generate --json` printed.")]


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    server: Servers = None,
    api_key: ApiKey = "",
    tls: Tls = False,
    ca: Ca = "",
    max_tokens: Annotated[int | None, typer.Option(help="Most output tokens.", min=1)] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default 1.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this total probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.", min=0)] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Keep tokens with at least this share of the likeliest one's probability.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of the sampling: the same seed gives the same text. Default: random.", min=0),
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string, not part of the text; repeat for more.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Continue after the model's end-of-text token.")] = False,
    no_speculation: Annotated[bool, typer.Option("--no-speculation", help="Plain decoding, without drafters.")] = False,
    max_draft_tokens: MaxDraftTokens = None,
    drafter: Annotated[list[str] | None, typer.Option(help="Name of a drafter to use; repeat for more.")] = None,
    acceptance: Annotated[
        str,
        typer.Option(
            help=f"Acceptance rule: {', '.join(ACCEPTANCE_RULES)}. Deprecated names of rejection: "
            f"{', '.join(DEPRECATED_RULES)}."
        ),
    ] = "coupled",
    workload: Workload = "",
    cache_salt: Annotated[str, typer.Option(help="Share KV caches only with sessions of the same salt.")] = "",
    priority: Annotated[int, typer.Option(help="Lower values are served first when memory is short.")] = 0,
    prediction: Annotated[str | None, typer.Option(help="Expected output, for example a text to be edited.")] = None,
    prediction_file: Annotated[
        Path | None, typer.Option(help="File with the expected output; - is standard input.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="File with a JSON schema that the output must match.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Regular expression that the whole output must match.")] = None,
    grammar: Annotated[Path | None, typer.Option(help="File with a Lark grammar that the output must match.")] = None,
    json_object: Annotated[bool, typer.Option("--json-object", help="The output must be a JSON object.")] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: log-probability of each token and of this many alternatives.", min=0),
    ] = None,
    model: Annotated[str, typer.Option(help="Model name; default: the gateway's only model.")] = "",
    as_json: JsonInstead = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Trace the request and print its trace id at the end.")
    ] = False,
) -> None:
    """Complete PROMPT and stream the text."""
    if logprobs is not None and not as_json:
        raise typer.BadParameter("--logprobs needs --json.")
    completion = Completion()
    with _errors_explained(completion):
        rule = proto_conversion.rule_number(acceptance)
        request = gateway_pb2.GenerateRequest(
            model=model,
            prompt=prompt,
            sampling=gateway_pb2.SamplingOptions(
                temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, acceptance=rule
            ),
            max_tokens=max_tokens,
            stop=stop or [],
            ignore_eos=ignore_eos,
            speculation=gateway_pb2.SpeculationOptions(
                disabled=no_speculation, max_draft_tokens=max_draft_tokens, drafters=drafter or []
            ),
            workload=workload,
            cache_salt=cache_salt,
            priority=priority,
            prediction=_prediction(prediction, prediction_file),
            structured_output=_structure(json_schema, regex, grammar, json_object),
            logprobs=logprobs is not None,
            top_logprobs=logprobs or 0,
        )
        parent = sampled_parent() if trace else ""
        gateways = [GatewayEndpoint(each, api_key, tls, ca, parent) for each in server or [LOCAL]]
        try:
            asyncio.run(_run(gateways, request, completion, echo=not as_json))
            typer.echo(json.dumps(completion.report()) if as_json else "")
        finally:
            if trace:
                _print_trace_id(completion)


@contextmanager
def _errors_explained(completion: Completion) -> Iterator[None]:
    """An error or Ctrl-C ends the process with one sentence."""
    try:
        with explained("generate"):
            yield
    except ValueError as error:  # protobuf's own range checks: too large a number
        raise typer.BadParameter(str(error)) from error
    except KeyboardInterrupt:
        _end_interrupted(completion)


def _print_trace_id(completion: Completion) -> None:
    """Prints nothing after an interruption: only the end of a stream carries whether the request is traced."""
    if completion.trace_id:
        typer.echo(f"slipstream trace {completion.trace_id}", err=True)
    elif completion.finished.reason:
        typer.echo("the gateway did not trace it", err=True)


def _prediction(text: str | None, file: Path | None) -> gateway_pb2.Prediction | None:
    if file is None:
        return None if text is None else gateway_pb2.Prediction(text=text)
    if text is not None:
        raise typer.BadParameter("give --prediction or --prediction-file, not both.")
    return gateway_pb2.Prediction(text=_read("--prediction-file", file))


def _structure(
    json_schema: Path | None, regex: str | None, grammar: Path | None, json_object: bool
) -> types_pb2.StructuredOutput | None:
    given = {
        "json_schema": None if json_schema is None else _read("--json-schema", json_schema),
        "regex": regex,
        "grammar": None if grammar is None else _read("--grammar", grammar),
        "json_object": "" if json_object else None,
    }
    chosen = [StructuredOutput(name, text) for name, text in given.items() if text is not None]
    if len(chosen) > 1:
        raise typer.BadParameter("give one of --json-schema, --regex, --grammar and --json-object.")
    return proto_conversion.structure_to_proto(chosen[0]) if chosen else None


def _read(option: str, file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{option} {file} cannot be read: {error}.") from error


async def _run(
    gateways: list[GatewayEndpoint], request: gateway_pb2.GenerateRequest, completion: Completion, echo: bool
) -> None:
    async with AsyncExitStack() as stack:
        channel, *others = [await stack.enter_async_context(gateway.channel()) for gateway in gateways]
        await complete(channel, request, _print_piece if echo else None, others, completion=completion)


def _end_interrupted(completion: Completion) -> NoReturn:
    """Prints how to continue: the gateway keeps the session for a while."""
    if session := completion.started.session_id:
        rest = f"`slipstream resume {session} --offset {len(completion.token_ids)}` prints the rest"
        typer.echo(f"\nstopped; {rest}, `slipstream cancel {session}` ends it.", err=True)
    raise typer.Exit(INTERRUPTED)


def resume_session(
    session: SessionId,
    server: Servers = None,
    api_key: ApiKey = "",
    tls: Tls = False,
    ca: Ca = "",
    offset: Annotated[int, typer.Option(help="Number of output tokens that you have already.", min=0)] = 0,
    as_json: JsonInstead = False,
) -> None:
    """Stream the rest of SESSION's text, and continue the session if no gateway runs it."""
    started = gateway_pb2.Started(session_id=session)
    completion = Completion(started=started, begins=offset, token_ids=[0] * offset)
    echo = None if as_json else _print_piece
    asyncio.run(
        with_channels(
            "resume",
            endpoints(server, api_key, tls, ca),
            lambda channels: resume(channels, completion, echo, RetrySettings(resume_s=0.0)),
        )
    )
    typer.echo(json.dumps(completion.report()) if as_json else "")


def roll_back_session(
    session: SessionId,
    server: Servers = None,
    api_key: ApiKey = "",
    tls: Tls = False,
    ca: Ca = "",
    keep: Annotated[int, typer.Option(help="Number of output tokens to keep.", min=0)] = 0,
    text: Annotated[str | None, typer.Option(help="Text to append to the kept tokens.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed for the rest; with the session's own seed the text repeats.", min=0)
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most output tokens in total.", min=1)] = None,
    branch: Annotated[bool, typer.Option("--branch", help="Leave SESSION as it is and start a new one.")] = False,
) -> None:
    """Roll SESSION back to an earlier length, or branch from there; prints the session's id for `slipstream resume`."""
    request = gateway_pb2.RollbackRequest(
        session_id=session, output_tokens=keep, text=text, seed=seed, max_tokens=max_tokens, branch=branch
    )

    async def roll_back(channels: Sequence[grpc.aio.Channel]) -> str:
        stub = gateway_pb2_grpc.GatewayServiceStub(channels[0])
        response: gateway_pb2.RollbackResponse = parsed(await stub.Rollback(request))
        return response.key.id

    typer.echo(asyncio.run(with_channels("rollback", endpoints(server, api_key, tls, ca), roll_back)))


def cancel_session(
    session: SessionId, server: Servers = None, api_key: ApiKey = "", tls: Tls = False, ca: Ca = ""
) -> None:
    """End SESSION, whichever gateway runs it."""

    async def cancel(channels: Sequence[grpc.aio.Channel]) -> None:
        request = gateway_pb2.CancelRequest(session_id=session)
        await gateway_pb2_grpc.GatewayServiceStub(channels[0]).Cancel(request)

    asyncio.run(with_channels("cancel", endpoints(server, api_key, tls, ca), cancel))


def _print_piece(text: str) -> None:
    typer.echo(text, nl=False)
