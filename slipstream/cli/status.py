"""`slipstream status`: what a gateway serves, once or live."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic, sleep
from typing import TYPE_CHECKING, Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict

from slipstream.cli.options import AsJson, Connection, explained
from slipstream.cli.waiting import pause_causes
from slipstream.client.sync_client import Client
from slipstream.errors import InvalidArgument, Unavailable
from slipstream.v1 import gateway_pb2, worker_pb2

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

COLUMNS = ("worker", "model", "state", "sessions", "waiting", "KV used", "steps/s")


def status(
    connection: Connection,
    watch: Annotated[bool, typer.Option("--watch", help="Show every worker and its load, live, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks of --watch.", min=0.1)] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Print the models that a gateway serves, the verifiers and drafters of each that answer, and whether its session
    store does."""
    with explained("status"), connection.client() as client:
        if watch:
            from rich.console import Console

            _watch(client, every, as_json, Console())
            return
        listed = client.list_models()
    if as_json:
        typer.echo(json.dumps(as_dict(listed), indent=2))
        return
    for line in (*model_lines(listed.models), store_line(listed.store)):
        typer.echo(line)


def as_dict(message: Any) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def model_lines(models: Sequence[gateway_pb2.ServedModel]) -> Iterator[str]:
    for served in models:
        noun = "verifier" if served.verifiers == 1 else "verifiers"
        away = f", {served.verifiers_away} away" if served.verifiers_away else ""
        yield f"{served.model.name}: {served.verifiers} {noun}{away}, texts of up to {served.model.max_length} tokens"
        for each in served.arithmetics:
            promise = "same tokens" if each.batch_invariant else "same distribution"
            older = "" if each.newest else "; older weights: only sessions that began there"
            yield f"  arithmetic {each.arithmetic}: {each.verifiers}, {promise}{older}"
        for drafter in served.drafters:
            yield f"  {drafter.name} ({drafter.model.name or 'no model'}): {_drafter_state(drafter)}"
            if drafter.warning:
                yield f"    {drafter.warning}"
        if not served.drafters:
            yield "  no drafter: plain decoding"
        if served.paused_verifiers:
            yield f"  drafting pauses on {served.paused_verifiers} of {served.verifiers}: {pause_causes(served)}"


def _drafter_state(drafter: gateway_pb2.ServedDrafter) -> str:
    if drafter.mismatch:
        return f"DOES NOT FIT: {drafter.mismatch}"
    replicas = drafter.replicas + drafter.replicas_away
    count = f", {drafter.replicas} of {replicas} replicas" if replicas > 1 else ""
    return f"{'away' if drafter.away else 'drafts'}{count}"


def store_line(store: gateway_pb2.SessionStoreState) -> str:
    """The store is not known where an older gateway does not name it."""
    if not store.kind:
        return "session store: not known"
    return f"session store: {store.kind}, {'answers' if store.answers else 'AWAY: sessions wait, and are refused'}"


def _watch(client: Client, every_s: float, as_json: bool, console: Console) -> None:
    """Shows the fleet until Ctrl-C. A gateway that goes away is waited for. Raises the SlipstreamError of one that
    answers and refuses, and InvalidArgument where there is nothing to show it on."""
    from rich.live import Live

    if not as_json and not console.is_terminal:
        raise InvalidArgument("--watch draws on a terminal; with --json it prints an object for each look.")
    rates = StepRates()
    try:
        if as_json:
            while True:
                typer.echo(json.dumps(_look(client)))
                sleep(every_s)
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                live.update(_drawn_look(client, rates), refresh=True)
                sleep(every_s)
    except KeyboardInterrupt:
        return


def _look(client: Client) -> dict[str, Any]:
    try:
        return as_dict(client.fleet())
    except Unavailable as error:
        return {"error": {"reason": error.reason, "message": error.message}}


def _drawn_look(client: Client, rates: StepRates) -> Table | Text:
    from rich.text import Text

    try:
        fleet = client.fleet()
    except Unavailable as error:
        return Text(f"no answer: {error.message} [{error.reason}]")
    return fleet_table(fleet, rates.update(fleet, monotonic()))


class StepRates:
    """Steps of each worker in a second, from two looks at their counters."""

    def __init__(self) -> None:
        self._at = 0.0
        self._steps: dict[str, int] = {}

    def update(self, fleet: gateway_pb2.GetFleetResponse, now: float) -> dict[str, float]:
        """Rates by address, of the workers that the last look had too. A worker that began anew has none."""
        steps = {worker.address: worker.load.steps for worker in fleet.workers}
        elapsed_s = now - self._at
        rates = {
            address: (count - self._steps[address]) / elapsed_s
            for address, count in steps.items()
            if count >= self._steps.get(address, count + 1) and elapsed_s > 0.0
        }
        self._at, self._steps = now, steps
        return rates


def fleet_table(fleet: gateway_pb2.GetFleetResponse, rates: Mapping[str, float]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{fleet.sessions} sessions here", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:3] else "right")
    for worker in fleet.workers:
        table.add_row(*map(Text, fleet_row(worker, rates.get(worker.address))))
    return table


def fleet_row(worker: gateway_pb2.FleetWorker, rate: float | None) -> tuple[str, ...]:
    """One cell for each of COLUMNS."""
    load = worker.load
    used = 1 - load.kv_blocks_free / load.kv_blocks_total if load.kv_blocks_total else None
    return (
        f"{'verifier' if worker.role == worker_pb2.ROLE_VERIFIER else worker.name} {worker.address}",
        worker.model.name or "-",
        state_of(worker),
        str(load.sessions),
        str(load.waiting),
        "-" if used is None else f"{used:.0%}",
        "-" if rate is None else f"{rate:.0f}",
    )


def state_of(worker: gateway_pb2.FleetWorker) -> str:
    """Names the one state of the worker that an operator has to know first."""
    if not worker.present:
        return "away" if worker.HasField("model") else "not reached yet"
    if worker.problem:
        return f"does not fit: {worker.problem}"
    if worker.load.draining:
        return "draining"
    if worker.load.drafting_paused:
        return f"ready; drafting pauses: {worker.load.drafting_paused}"
    return f"ready; {worker.warning}" if worker.warning else "ready"
