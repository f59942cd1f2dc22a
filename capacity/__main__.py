"""`python -m capacity`, which `slipstream plan` runs."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from capacity import report
from capacity.cost import measured, measured_by, shape
from capacity.gpus import level_times
from capacity.manifests import share_that_is_used, write
from capacity.scenario import Scenario, Slo, read
from capacity.sizing import FleetPlan, compare
from slipstream.cli.options import explained
from slipstream.errors import InvalidArgument
from slipstream.process import tune_runtime

PROCESSES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def plan(
    scenario: Annotated[Path | None, typer.Argument(help="TOML or JSON file; see examples/plan.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second, instead of the file's.", min=1e-3)] = None,
    concurrency: Annotated[
        float | None, typer.Option(help="Sessions at once, instead of the file's requests a second.", min=1.0)
    ] = None,
    delay_ms: Annotated[float | None, typer.Option(help="One way between drafter and verifier.", min=0.0)] = None,
    acceptance: Annotated[float | None, typer.Option(help="Of a first guess at any depth.", min=0.0, max=1.0)] = None,
    tpot_p95_ms: Annotated[float | None, typer.Option(help="Of the SLO.", min=0.0)] = None,
    ttft_p95_ms: Annotated[float | None, typer.Option(help="Of the SLO.", min=0.0)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Without simulating each fleet's cell step by step.")] = False,
    day: Annotated[bool, typer.Option("--day", help="Also a day of the file's regions.")] = False,
    manifests: Annotated[
        Path | None, typer.Option(help="Also write the chart's values and a component for kustomize to this folder.")
    ] = None,
    cold_start_s: Annotated[float, typer.Option(help="For --manifests: until a new pod is ready.", min=0.0)] = 600.0,
    doubles_in_s: Annotated[float, typer.Option(help="For --manifests: traffic, at the fastest.", min=1.0)] = 1200.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    measure: Annotated[str, typer.Option(help="Instead: print the cost table of this model on this machine.")] = "",
    measured_at: Annotated[
        str, typer.Option(help="Instead: print the cost table of the verifier that runs at this HOST:PORT.")
    ] = "",
    gpus: Annotated[
        str, typer.Option(help="Instead: print what a level of this draft model takes on GPUs, by their data sheets.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="For --measure.")] = "auto",
    quantisation: Annotated[str, typer.Option(help="For --measure.")] = "",
    device: Annotated[str, typer.Option(help="For --measure: auto, cpu, cuda or cuda:N.")] = "auto",
    measure_s: Annotated[float, typer.Option(help="For --measure: seconds.", min=0.1)] = 20.0,
) -> None:
    """Replicas of each role, latencies and cost for a traffic, against co-located speculation and none."""
    with explained("plan"):
        if measure:
            typer.echo(json.dumps(measured(measure, dtype, quantisation, device, measure_s)))
            return
        if measured_at:
            typer.echo(json.dumps(asyncio.run(measured_by(measured_at))))
            return
        if gpus:
            times = level_times(*shape(gpus))
            if as_json:
                typer.echo(json.dumps(times))
            else:
                Console().print(report.gpu_table(gpus, times))
            return
        if scenario is None:
            raise InvalidArgument(
                "name a scenario file, a model to --measure, a draft model for --gpus, or a verifier by --measured-at."
            )
        tune_runtime()
        given = _changed(read(scenario), rate, concurrency, delay_ms, acceptance)
        given = replace(given, slo=_asked(given.slo, tpot_p95_ms, ttft_p95_ms))
        plans = _tell(given, exact=not quick, day=day, as_json=as_json)
        if manifests is not None:
            write(manifests, given, plans, share_that_is_used(cold_start_s, doubles_in_s))
            typer.echo(f"written: {manifests}/values.yaml and {manifests}/kustomization.yaml", err=True)


def _tell(given: Scenario, *, exact: bool, day: bool, as_json: bool) -> list[FleetPlan]:
    if not (given.traffic.rate or given.traffic.concurrency):
        raise InvalidArgument("[traffic] needs a rate, requests a second, or a concurrency, sessions at once.")
    if not as_json:
        how_long = "half a minute" if not exact else "about a minute; --quick estimates instead"
        typer.echo(f"simulating {given.name}: {how_long} ...", err=True)

    def planned(number: int, count: int, mode: str) -> None:
        if not as_json:
            typer.echo(f"  {number} of {count}: {mode}", err=True)

    plans = compare(given, exact=exact, processes=PROCESSES, planned=planned)
    if as_json:
        figures: dict[str, Any] = {"name": given.name, "plans": [report.row(each) for each in plans]}
        if day:
            figures["day"] = report.day_rows(given, plans)
        typer.echo(json.dumps(figures, indent=1))
        return plans
    console = Console()
    console.print(report.table(given, plans))
    console.print(report.sentence(given, plans))
    console.print(report.level_sentence(given))
    if day:
        console.print(report.day_table(given, plans))
    return plans


def _changed(
    given: Scenario, rate: float | None, concurrency: float | None, delay_ms: float | None, acceptance: float | None
) -> Scenario:
    if rate is not None or concurrency is not None:
        traffic = replace(given.traffic, rate=rate or 0.0, concurrency=concurrency or 0.0)
        given = replace(given, traffic=traffic)
    if delay_ms is not None:
        given = replace(given, drafting=replace(given.drafting, delay_s=delay_ms / 1e3))
    if acceptance is not None:
        believed = replace(given.verifying.acceptance, by_depth=(acceptance,))
        given = replace(given, verifying=replace(given.verifying, acceptance=believed))
    return given


def _asked(slo: Slo, tpot_p95_ms: float | None, ttft_p95_ms: float | None) -> Slo:
    if tpot_p95_ms is not None:
        slo = replace(slo, tpot_p95_s=tpot_p95_ms / 1e3)
    if ttft_p95_ms is not None:
        slo = replace(slo, ttft_p95_s=ttft_p95_ms / 1e3)
    return slo


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(plan)
    app(prog_name="slipstream plan")
