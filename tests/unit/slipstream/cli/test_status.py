"""What the live view says of a worker."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from slipstream.cli.status import StepRates, fleet_table, model_lines, state_of, store_line
from slipstream.v1 import gateway_pb2, types_pb2, worker_pb2

MODEL = types_pb2.ModelInfo(name="toy")


def worker(**changes: object) -> gateway_pb2.FleetWorker:
    described = {"role": worker_pb2.ROLE_DRAFTER, "name": "ngram", "address": "a:1", "model": MODEL, "present": True}
    return gateway_pb2.FleetWorker(**(described | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("described", "state"),
    [
        (worker(), "ready"),
        (worker(model=None, present=False), "not reached yet"),
        (worker(present=False), "away"),
        (worker(problem="another vocabulary"), "does not fit: another vocabulary"),
        (worker(load=worker_pb2.WatchResponse(draining=True)), "draining"),
        (worker(load=worker_pb2.WatchResponse(drafting_paused="price")), "ready; drafting pauses: price"),
        (worker(warning="another template"), "ready; another template"),
    ],
)
def test_the_state_of_a_worker_is_what_keeps_it_from_work(described: gateway_pb2.FleetWorker, state: str) -> None:
    assert state_of(described) == state


def test_drafters_that_are_away_and_pauses_are_shown() -> None:
    drafters = [
        gateway_pb2.ServedDrafter(name="ngram"),
        gateway_pb2.ServedDrafter(name="model", model=MODEL, away=True),
    ]
    drafters[0].replicas, drafters[0].replicas_away, drafters[1].replicas_away = 2, 1, 1
    served = gateway_pb2.ServedModel(
        model=MODEL, verifiers=2, verifiers_away=1, drafters=drafters, paused_verifiers=1, pause_causes=["slower"]
    )
    first, ngram, model, pause = model_lines([served])
    assert first.startswith("toy: 2 verifiers, 1 away,") and ngram == "  ngram (no model): drafts, 2 of 3 replicas"
    assert model == "  model (toy): away"
    assert pause == "  drafting pauses on 1 of 2: no text of now gains as much as drafting slows its steps"


@pytest.mark.parametrize(
    ("store", "line"),
    [
        ({"kind": "redis", "answers": True}, "session store: redis, answers"),
        ({"kind": "redis"}, "session store: redis, AWAY: sessions wait, and are refused"),
        ({}, "session store: not known"),
    ],
)
def test_the_state_of_the_store_is_a_line(store: dict[str, Any], line: str) -> None:
    assert store_line(gateway_pb2.SessionStoreState(**store)) == line


def test_rates_cover_workers_that_both_reports_have_and_that_did_not_restart() -> None:
    def fleet(**steps: int) -> gateway_pb2.GetFleetResponse:
        loads = {address: worker_pb2.WatchResponse(steps=count) for address, count in steps.items()}
        return gateway_pb2.GetFleetResponse(workers=[worker(address=each, load=load) for each, load in loads.items()])

    rates = StepRates()
    assert rates.update(fleet(a=100, b=50), 10.0) == {}
    assert rates.update(fleet(a=120, b=0, c=7), 12.0) == {"a": 10.0}
    assert rates.update(fleet(a=120, b=3, c=7), 13.0) == {"a": 0.0, "b": 3.0, "c": 0.0}


def test_the_table_has_loads_and_takes_no_name_for_markup() -> None:
    load = worker_pb2.WatchResponse(sessions=3, waiting=1, kv_blocks_total=8, kv_blocks_free=6)
    verifier = worker(role=worker_pb2.ROLE_VERIFIER, name="", address="v:1", load=load)
    fleet = gateway_pb2.GetFleetResponse(workers=[verifier, worker(name="[red]x")], sessions=2)
    shown = io.StringIO()
    Console(file=shown, width=100).print(fleet_table(fleet, {"v:1": 12.4}))
    text = shown.getvalue()
    assert "2 sessions here" in text and "[red]x a:1" in text
    [line] = [line for line in text.splitlines() if "verifier v:1" in line]
    assert [cell.strip() for cell in line.split("│")[2:-1]] == ["toy", "ready", "3", "1", "25%", "12"]
