"""`slipstream bench`: load on a server, with and without speculation in turn, and what came of it."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from measurement.cli.bench_report import BenchResult, Pair, html, report, text
from measurement.load.latencies import LatencyObjectives
from measurement.load.machine import Watch
from measurement.load.runner import Run, Send, closed_loop, constant, open_loop, poisson
from measurement.load.senders import sending_grpc, sending_http
from measurement.load.workload import Asked, read_workload
from slipstream.cli.options import (
    CONNECTION,
    ApiKey,
    AsJson,
    Ca,
    MaxDraftTokens,
    PlaintextKey,
    Server,
    Tls,
    Workload,
    explained,
)
from slipstream.client.gateway_endpoint import GatewayEndpoint
from slipstream.errors import InvalidArgument
from slipstream.v1 import gateway_pb2

LOAD, OBJECTIVES = "Load", "Objectives (goodput counts the requests that meet all)"


class Arrivals(StrEnum):
    POISSON = "poisson"
    CONSTANT = "constant"


class Compare(StrEnum):
    BOTH = "both"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True)
class LoadOptions:
    """Options of `bench` for its requests and their times."""

    model: Annotated[str, typer.Option(help="Model name, where the server has several.")] = ""
    concurrency: Annotated[int, typer.Option(help="Closed loop: requests at once.", min=1, rich_help_panel=LOAD)] = 4
    rate: Annotated[
        float | None,
        typer.Option(help="Open loop: requests a second, whatever the server does.", rich_help_panel=LOAD),
    ] = None
    arrivals: Annotated[Arrivals, typer.Option(help="Gaps of the open loop.", rich_help_panel=LOAD)] = Arrivals.POISSON
    max_tokens: Annotated[int, typer.Option(help="Output tokens of each request.", min=1, rich_help_panel=LOAD)] = 64
    warmup: Annotated[
        int, typer.Option(help="Requests sent before each kind of run and not counted.", min=0, rich_help_panel=LOAD)
    ] = 1
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    seed: Annotated[int, typer.Option(help="Seed of the first request; each later one is higher by 1.", min=0)] = 0
    max_draft_tokens: MaxDraftTokens = None


@dataclass(frozen=True)
class ObjectiveOptions(LatencyObjectives):
    """Options of `bench` that define good requests."""

    ttft_ms: Annotated[float | None, typer.Option(help="Most ms to the first token.", rich_help_panel=OBJECTIVES)] = (
        None
    )
    tpot_ms: Annotated[
        float | None, typer.Option(help="Most ms for each later token, on average.", rich_help_panel=OBJECTIVES)
    ] = None
    e2e_ms: Annotated[float | None, typer.Option(help="Most ms to the end.", rich_help_panel=OBJECTIVES)] = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One run's requests, and where they go."""

    asked: list[Asked]
    gateway: GatewayEndpoint
    http: str
    """URL of the server; empty for gRPC."""
    load: LoadOptions

    def sending(self, plain: bool) -> AbstractAsyncContextManager[Send]:
        salt = secrets.token_hex(8)  # the KV cache of one run must not make the next one faster
        if not self.http:
            return sending_grpc(self.gateway, [self._request(index, plain, salt) for index in range(len(self.asked))])
        bodies = [self._body(index, plain, salt) for index in range(len(self.asked))]
        return sending_http(self.http, bodies, self.gateway.key, self.gateway.ca, self.gateway.plaintext_key)

    async def run(self, send: Send, progress: Progress, name: str) -> Run:
        task = progress.add_task(name, total=len(self.asked))
        try:
            if (rate := self.load.rate) is None:
                return await closed_loop(send, len(self.asked), self.load.concurrency, lambda: progress.advance(task))
            schedule = poisson(rate, self.load.seed) if self.load.arrivals is Arrivals.POISSON else constant(rate)
            return await open_loop(send, len(self.asked), schedule, lambda: progress.advance(task))
        finally:
            progress.remove_task(task)

    def _request(self, index: int, plain: bool, salt: str) -> gateway_pb2.GenerateRequest:
        asked, load = self.asked[index], self.load
        return gateway_pb2.GenerateRequest(
            model=load.model,
            prompt=asked.prompt,
            max_tokens=asked.max_tokens or load.max_tokens,
            ignore_eos=True,
            workload=asked.workload,
            cache_salt=salt,
            sampling=gateway_pb2.SamplingOptions(temperature=load.temperature, seed=load.seed + index),
            speculation=gateway_pb2.SpeculationOptions(disabled=plain, max_draft_tokens=load.max_draft_tokens),
        )

    def _body(self, index: int, plain: bool, salt: str) -> dict[str, Any]:
        asked, load = self.asked[index], self.load
        speculation = {"disabled": True} if plain else {"max_draft_tokens": load.max_draft_tokens}
        wanted = {
            "model": load.model,
            "prompt": asked.prompt,
            "max_tokens": asked.max_tokens or load.max_tokens,
            "ignore_eos": True,
            "workload": asked.workload,
            "cache_salt": salt,
            "temperature": load.temperature,
            "seed": load.seed + index,
            "speculation": {name: value for name, value in speculation.items() if value is not None},
        }
        # What a request does not need is not sent: other servers know no such field.
        return {name: value for name, value in wanted.items() if value not in ("", {})}


def bench(
    *,
    prompts: Annotated[
        Path,
        typer.Argument(
            help='One prompt a line (\\n is a line break), or .jsonl of {"prompt", "workload", "max_tokens"}.'
        ),
    ],
    server: Server = "127.0.0.1:50051",
    http: Annotated[
        str, typer.Option(help="URL of an OpenAI-compatible server, asked over HTTP.", rich_help_panel=CONNECTION)
    ] = "",
    api_key: ApiKey = "",
    tls: Tls = False,
    ca: Ca = "",
    plaintext_key: PlaintextKey = False,
    load: LoadOptions,
    repeats: Annotated[int, typer.Option(help="Number of pairs of runs.", min=1)] = 3,
    compare: Annotated[Compare, typer.Option(help="Speculation on and off in turn, or only one.")] = Compare.BOTH,
    workload: Workload = "",
    objectives: ObjectiveOptions,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write a report that opens without a network.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send the prompts without and with speculation in turn, and compare the runs pair by pair."""
    with explained("bench"):
        if load.rate is not None and not load.rate > 0.0:
            raise InvalidArgument("--rate is a positive number of requests a second.", reason="BAD_RATE")
        gateway = GatewayEndpoint(server, api_key, tls, ca, plaintext_key=plaintext_key)
        plan = Plan(read_workload(prompts, workload), gateway, http.rstrip("/"), load)
        if html_file is not None:
            _write(html_file, "", "a")  # refused now rather than after minutes of measuring
        arms = [name for name in ("off", "on") if compare in (Compare.BOTH, name)]
        pairs = asyncio.run(_measured(plan, arms, repeats))
        measured = BenchResult(
            command=" ".join(["slipstream bench", *_shown(sys.argv[2:])]),
            slices=[each.workload for each in plan.asked],
            objectives=objectives,
            pairs=pairs,
        )
        found = report(measured)
        if html_file is not None:
            _write(html_file, html(measured, found))
    if as_json:
        typer.echo(json.dumps(found))
    else:
        text(found, Console())


async def _measured(plan: Plan, arms: list[str], repeats: int) -> list[Pair]:
    """The arms in turn; every other pair begins with the other one, so that none always runs on a warmer machine.
    Raises the first error where a run has no answer at all."""
    pairs: list[Pair] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for arm in arms if plan.load.warmup else []:
            async with plan.sending(arm == "off") as send:
                for index in range(plan.load.warmup):
                    await send(index % len(plan.asked), lambda: None)
        for number in range(repeats):
            runs: dict[str, Run] = {}
            watch = Watch()
            for arm in arms if number % 2 == 0 else arms[::-1]:
                async with plan.sending(arm == "off") as send:
                    run = await plan.run(send, progress, f"pair {number + 1} of {repeats}, speculation {arm}")
                if not run.served:
                    raise next(each.error for each in run.outcomes if each.error is not None)
                runs[arm] = run
            pairs.append(Pair({arm: runs[arm] for arm in arms}, watch.seen()))
    return pairs


def _shown(words: list[str]) -> list[str]:
    """The command's words, without a key."""
    return ["KEY" if before == "--api-key" else word for before, word in zip(["", *words], words, strict=False)]


def _write(file: Path, page: str, mode: str = "w") -> None:
    try:
        with file.open(mode, encoding="utf-8") as opened:
            opened.write(page)
    except OSError as error:
        raise InvalidArgument(f"{file} cannot be written: {error.strerror}.", reason="BAD_FILE") from error
