"""`slipstream generate`: one completion from a running gateway, streamed to the terminal."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Annotated

import grpc
import typer

from slipstream import wire
from slipstream.client import channel, error_of
from slipstream.errors import SlipstreamError
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc, verifier_pb2

FINISH_REASONS = {
    verifier_pb2.FINISH_REASON_STOP: "stop",
    verifier_pb2.FINISH_REASON_LENGTH: "length",
    verifier_pb2.FINISH_REASON_CANCELLED: "cancelled",
    verifier_pb2.FINISH_REASON_ERROR: "error",
}


@dataclass(slots=True)
class Completion:
    """Everything one Generate stream said."""

    started: gateway_pb2.Started = field(default_factory=gateway_pb2.Started)
    finished: gateway_pb2.Finished = field(default_factory=gateway_pb2.Finished)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)

    def take(self, response: gateway_pb2.GenerateResponse) -> str:
        """Fold one event in; returns the text it added."""
        kind = response.WhichOneof("event")
        if kind == "started":
            self.started = response.started
        elif kind == "delta":
            self.token_ids[response.delta.offset :] = response.delta.token_ids
            self.text += response.delta.text
            return response.delta.text
        elif kind == "finished":
            self.finished = response.finished
            del self.token_ids[self.finished.output_tokens :]
        return ""

    def report(self) -> dict[str, object]:
        """The object that `--json` prints. Seconds; rates are null where nothing was counted."""
        told = self.finished.statistics
        tokens = len(self.token_ids)
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_token_ids": list(self.started.prompt_token_ids),
            "finish_reason": FINISH_REASONS.get(self.finished.reason, "unknown"),
            "stop": self.finished.stop or None,
            "session_id": self.started.session_id,
            "model": self.started.model,
            "seed": self.started.seed,
            "rounds": told.rounds,
            "rounds_with_drafts": told.rounds_with_drafts,
            "drafted": told.drafted,
            "accepted": told.accepted,
            "acceptance_rate": told.accepted / told.drafted if told.drafted else None,
            "acceptance_length": 1 + told.accepted / told.rounds_with_drafts if told.rounds_with_drafts else None,
            "ttft_s": told.ttft_s,
            "tpot_s": (told.e2e_s - told.ttft_s) / (tokens - 1) if tokens > 1 else None,
            "e2e_s": told.e2e_s,
            "wait_s": told.wait_s,
            "verify_s": told.verify_s,
            "rehomed": told.rehomed,
        }


async def complete(server: str, request: gateway_pb2.GenerateRequest, echo: bool) -> Completion:
    """Run one request to its end. Raises the SlipstreamError that the gateway answered with."""
    completion = Completion()
    async with channel(server) as line:
        try:
            async for response in gateway_pb2_grpc.GatewayServiceStub(line).Generate(request):
                text = completion.take(response)
                if echo:
                    typer.echo(text, nl=False)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error
    return completion


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    server: Annotated[str, typer.Option(help="HOST:PORT of the gateway.")] = "127.0.0.1:50051",
    max_tokens: Annotated[int | None, typer.Option(help="Most output tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default 1.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the smallest set of tokens with this mass.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most likely tokens.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Keep tokens at least this likely, relative to the best.")] = None,
    seed: Annotated[int | None, typer.Option(help="The text is a function of the seed; default: drawn.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this; may be given again.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after the model's end-of-text token.")] = False,
    no_speculation: Annotated[bool, typer.Option("--no-speculation", help="Plain decoding.")] = False,
    max_draft_tokens: Annotated[int | None, typer.Option(help="Most candidates in one round.")] = None,
    drafter: Annotated[list[str] | None, typer.Option(help="Drafter to use; may be given again.")] = None,
    acceptance: Annotated[str, typer.Option(help="coupled or rejection.")] = "coupled",
    model: Annotated[str, typer.Option(help="Model name; default: the only one.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming.")] = False,
) -> None:
    """Complete PROMPT and stream the text."""
    try:
        sampling = gateway_pb2.SamplingOptions(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            acceptance=wire.rule_number(acceptance),
        )
        request = gateway_pb2.GenerateRequest(
            model=model,
            prompt=prompt,
            sampling=sampling,
            max_tokens=max_tokens,
            stop=stop or [],
            ignore_eos=ignore_eos,
            speculation=gateway_pb2.SpeculationOptions(
                disabled=no_speculation, max_draft_tokens=max_draft_tokens, drafters=drafter or []
            ),
        )
        completion = asyncio.run(complete(server, request, echo=not as_json))
    except ValueError as error:  # protobuf's own range checks: a negative or too large number
        raise typer.BadParameter(str(error)) from error
    except SlipstreamError as error:
        typer.echo(f"slipstream generate: {error.message} [{error.reason}]", err=True)
        raise typer.Exit(1) from error
    typer.echo(json.dumps(completion.report()) if as_json else "")
