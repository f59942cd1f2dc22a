"""`slipstream generate`: one completion from a running gateway, streamed to the terminal."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from slipstream.cli.options import LOCAL, ApiKey, Ca, Servers, Tls, explained
from slipstream.client.client import complete
from slipstream.client.completion import Completion
from slipstream.client.gateway_endpoint import GatewayEndpoint, sampled_parent
from slipstream.rpc import proto_conversion
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.v1 import gateway_pb2, types_pb2

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ended."""


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    server: Servers = None,
    api_key: ApiKey = "",
    tls: Tls = False,
    ca: Ca = "",
    max_tokens: Annotated[int | None, typer.Option(help="Most output tokens.", min=1)] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default 1.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the smallest set of tokens with this mass.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most likely tokens.", min=0)] = None,
    min_p: Annotated[float | None, typer.Option(help="Keep tokens at least this likely, relative to the best.")] = None,
    seed: Annotated[int | None, typer.Option(help="The text is a function of the seed; default: drawn.", min=0)] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this; may be given again.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after the model's end-of-text token.")] = False,
    no_speculation: Annotated[bool, typer.Option("--no-speculation", help="Plain decoding.")] = False,
    max_draft_tokens: Annotated[int | None, typer.Option(help="Most candidates in one round.", min=0)] = None,
    drafter: Annotated[list[str] | None, typer.Option(help="Drafter to use; may be given again.")] = None,
    acceptance: Annotated[str, typer.Option(help="coupled, rejection, block or recursive.")] = "coupled",
    workload: Annotated[str, typer.Option(help="Kind of work: acceptance and rules are kept apart by it.")] = "",
    cache_salt: Annotated[str, typer.Option(help="Share caches with sessions of the same salt alone.")] = "",
    priority: Annotated[int, typer.Option(help="Lower is served sooner where there is not room for all.")] = 0,
    prediction: Annotated[str | None, typer.Option(help="Output that is expected, as of a text to edit.")] = None,
    prediction_file: Annotated[Path | None, typer.Option(help="The same, from a file; - is standard input.")] = None,
    json_schema: Annotated[Path | None, typer.Option(help="The output is JSON valid under this file's schema.")] = None,
    regex: Annotated[str | None, typer.Option(help="The whole output matches this.")] = None,
    grammar: Annotated[Path | None, typer.Option(help="The output is of this file's Lark grammar.")] = None,
    json_object: Annotated[bool, typer.Option("--json-object", help="The output is some JSON object.")] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities, of so many tokens more.", min=0)
    ] = None,
    model: Annotated[str, typer.Option(help="Model name; default: the only one.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Have it traced; its trace's id is told at the end.")] = False,
) -> None:
    """Complete PROMPT and stream the text."""
    if logprobs is not None and not as_json:
        raise typer.BadParameter("--logprobs are printed with --json alone.")
    completion = Completion()
    with _refusals_told(completion):
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
        doors = [GatewayEndpoint(each, api_key, tls, ca, parent) for each in server or [LOCAL]]
        try:
            asyncio.run(_run(doors, request, completion, echo=not as_json))
            typer.echo(json.dumps(completion.report()) if as_json else "")
        finally:
            if trace:
                _tell_trace(completion)


@contextmanager
def _refusals_told(completion: Completion) -> Iterator[None]:
    """What goes wrong ends the process with a sentence."""
    try:
        with explained("generate"):
            yield
    except ValueError as error:  # protobuf's own range checks: too large a number
        raise typer.BadParameter(str(error)) from error
    except KeyboardInterrupt:
        _stopped(completion)


def _tell_trace(completion: Completion) -> None:
    """Of a text that its client gave up nobody said whether it is traced."""
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
    return proto_conversion.structure_to_wire(chosen[0]) if chosen else None


def _read(option: str, file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{option} {file} cannot be read: {error}.") from error


async def _run(
    doors: list[GatewayEndpoint], request: gateway_pb2.GenerateRequest, completion: Completion, echo: bool
) -> None:
    say = (lambda text: typer.echo(text, nl=False)) if echo else None
    async with AsyncExitStack() as stack:
        line, *others = [await stack.enter_async_context(door.channel()) for door in doors]
        await complete(line, request, say, others, completion=completion)


def _stopped(completion: Completion) -> NoReturn:
    """The session waits for whoever goes on with it."""
    if session := completion.started.session_id:
        told = f"`slipstream resume {session} --offset {len(completion.token_ids)}` says the rest"
        typer.echo(f"\nstopped; {told}, `slipstream cancel {session}` ends it.", err=True)
    raise typer.Exit(INTERRUPTED)
