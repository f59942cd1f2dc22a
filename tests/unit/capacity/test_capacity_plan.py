"""From a file to a fleet."""

from __future__ import annotations

import asyncio
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from capacity import __main__ as command
from capacity import sizing, stationary
from capacity.__main__ import plan
from capacity.cell import Cell
from capacity.cost import Table
from capacity.day import day, grown, price_per_million
from capacity.gpus import level_times
from capacity.report import day_table, gpu_table, row, sentence, table
from capacity.scenario import Lengths, Region, Scenario, Traffic, parse, read
from capacity.sizing import OVERLOAD, FleetPlan, disaggregated, fleet, most_rate, plain
from capacity.sizing import plan as plan_mode
from capacity.stationary import Cells, Rates
from slipstream.engine.emulated.model import LinearCost
from slipstream.engine.factory import open_engine
from slipstream.errors import InvalidArgument
from tests.support.fleet import drafter, verifier

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "plan"
SMALL: dict[str, Any] = {
    "name": "small",
    "traffic": {"rate": 12.0, "prompt": {"mean": 50}, "output": {"mean": 30, "cv": 0.5}},
    "slo": {"ttft_p95_s": 1.0, "tpot_p95_s": 0.04},
    "prices": {"verifier": 5.0, "drafter": 0.5},
    "verifier": {"cost": {"base_s": 0.02, "per_token_s": 0.0005, "free_tokens": 16}, "sessions": 8},
    "drafter": {"cost": {"base_s": 0.004}},
    "acceptance": {"rate": 0.8, "fanout": 0.7},
    "colocated": {"cost": {"base_s": 0.002}},
    "network": {"drafter_s": 0.001},
    "regions": [
        {"name": "east", "peak_rate": 40.0, "peak_hour": 3},
        {"name": "west", "peak_rate": 30.0, "peak_hour": 15, "low": 0.5},
    ],
}
TABLE = Table([1, 8, 64], [1, 16], [[0.01, 0.012, 0.04], [0.02, 0.022, 0.05]])


_measured: list[tuple[Cell, int, Rates]] = []
_rates = stationary.rates


def _rates_once(cell: Cell, most: int) -> Rates:
    """Nothing but the cell and the number decides them: shortened simulations of one cell are run once in a process."""
    for *asked, found in _measured:
        if asked == [cell, most]:
            return found
    _measured.append((cell, most, _rates(cell, most)))
    return _measured[-1][2]


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Less is simulated, with more luck left in it."""
    patch.setattr(stationary, "rates", _rates_once)
    patch.setattr(stationary, "SESSION_ROUNDS", 100)
    patch.setattr(stationary, "LEAST_ROUNDS", 10)
    patch.setattr(sizing, "COUNTED", 100)
    patch.setattr(sizing, "LEAST", 50)
    patch.setattr(sizing, "WARM", 20)
    patch.setattr(command, "PROCESSES", 1)  # others would not be shortened


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)


@pytest.fixture(scope="module")
def small() -> Scenario:
    return parse(SMALL)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_examples_can_be_read_and_state_their_assumptions(path: Path) -> None:
    scenario = read(path)
    assert scenario.traffic.rate > 0.0
    assert "ASSUMPTIONS" in path.read_text() and "assumed" in scenario.name


@pytest.mark.parametrize(
    ("part", "given", "says"),
    [
        ("verifier", {"cost": {"base": 1}}, r"\[verifier\] cost knows no base \(do you mean base_s\?\)"),
        ("traffic", SMALL["traffic"] | {"concurrency": 8}, "not both"),
        ("verifier", {}, "needs a cost"),
        ("drafter", {"cost": {"base_s": 1.0}, "delay": 1}, "knows no delay"),
        ("prices", {"verifier": 1.0}, "needs drafter"),
        ("acceptance", {"rate": 1.5}, "0 to 1"),
        ("acceptance", {"rate": 0.5, "width": 9}, "width"),
        ("traffic", {"rate": 1.0, "prompt": {"mean": 0}, "output": {"mean": 5}}, "1 token"),
        ("traffic", {"rate": 1.0, "prompt": {"mean": 5, "cv": -1}, "output": {"mean": 5}}, "cv of 0"),
        ("traffic", {"rate": 1.0, "prompt": {"values": [5, 0]}, "output": {"mean": 5}}, "values of 1 token"),
        ("vrifier", {}, r"knows no vrifier \(do you mean verifier\?\)"),
        ("drafter", {"cost": {"base_s": 1.0}, "expnd": 1}, r"knows no expnd \(do you mean expand\?\); it has cost, "),
        ("network", {"drafter_ms": 1}, r"\[network\] knows no drafter_ms \(do you mean drafter_s\?\)"),
        ("colocated", {"cost": {"base_s": 1.0}, "kv_token": 1}, r"\[colocated\] knows no kv_token"),
        ("slo", {"ttft_p95_s": "2 s"}, r"\[slo\] ttft_p95_s is '2 s'; write a number"),
        ("network", 5, r"network is 5; write a table, \[network\]"),
    ],
)
def test_an_invalid_scenario_is_refused_with_a_sentence(part: str, given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        parse(SMALL | {part: given})


def test_a_table_gives_what_was_measured_and_lines_between() -> None:
    assert TABLE(8, 1) == pytest.approx(0.012)
    assert TABLE(36, 16) == pytest.approx(0.036)
    assert TABLE(1, 8) == pytest.approx(0.01 + 0.01 * 7 / 15)
    assert TABLE(128, 1) == pytest.approx(0.08)


@given(st.integers(1, 200), st.integers(1, 40))
def test_a_table_never_gets_cheaper_with_tokens(tokens: int, sessions: int) -> None:
    assert TABLE(tokens + 1, sessions) >= TABLE(tokens, sessions) > 0.0


@pytest.mark.parametrize("seconds", [[[0.01]], [[0.0, 0.1]], [[0.01, 0.02], [0.1, 0.2]]])
def test_a_table_of_another_shape_is_refused(seconds: list[list[float]]) -> None:
    with pytest.raises(InvalidArgument, match="--measure"):
        Table([1, 2], [1], seconds)


@given(st.integers(1, 2000), st.floats(0.0, 2.0))
def test_sampled_lengths_have_the_configured_mean(mean: int, cv: float) -> None:
    import numpy as np

    sample = Lengths(mean, cv).sample(np.random.default_rng(0), 4000)
    assert sample.min() >= 1
    assert sample.mean() == pytest.approx(mean, rel=0.2, abs=1.0)


def test_sessions_that_are_found_are_long_ones_and_on_average_half_done() -> None:
    """Of lengths 10 and 90 alike often, nine in ten that are found are long: (0.1 * 10 + 0.9 * 90) / 2 to go."""
    import numpy as np

    rest = Lengths(values=(10, 90)).rest(np.random.default_rng(0), 8000)
    assert rest.min() >= 1 and rest.max() <= 90
    assert rest.mean() == pytest.approx(41.5, rel=0.03)


def test_few_requests_bring_as_many_tokens_as_many_do_on_average() -> None:
    traffic, tokens, now = Traffic(Lengths(700, 1.0), Lengths(250, 0.8)), [0, 0], 0.0
    for gap, prompt, output in traffic.poisson(5.0, traffic.typical_seed(5.0, 40.0)):
        now += gap
        if now > 40.0:
            break
        tokens = [tokens[0] + prompt, tokens[1] + output]
    assert tokens == pytest.approx([200 * 700, 200 * 250], rel=0.04)


def test_a_tighter_slo_takes_traffic_from_a_verifier(small: Scenario) -> None:
    mode = plain(small)
    cells = Cells(mode.cell, small.traffic)
    rates = [
        most_rate(cells, replace(small, slo=replace(small.slo, tpot_p95_s=tpot))) for tpot in (0.001, 0.024, 0.03, 9.0)
    ]
    assert rates == sorted(rates)
    assert rates[0] == 0.0 < rates[1] < rates[-1]


def test_a_fleet_bears_the_traffic_in_whole_cells(small: Scenario) -> None:
    mode = disaggregated(small, 1, 2)
    assert fleet(mode, 10.0, 1.0) == (10, 5)
    assert fleet(mode, 10.1, 1.0) == (12, 6)


def test_a_plan_meets_its_slo_and_costs_what_its_replicas_cost(small: Scenario) -> None:
    made = plan_mode(disaggregated(small, 1, 1), small)
    assert made.seen is not None
    assert made.seen.tpot_s(0.95) <= small.slo.tpot_p95_s and made.seen.ttft_s(0.95) <= small.slo.ttft_p95_s
    assert made.verifiers == made.drafters == math.ceil(12.0 / made.most_rate)
    told = row(made)
    assert 0.0 < float(told["scale_drafters_at"] or 0.0) < float(told["scale_verifiers_at"] or 0.0)
    assert f"a drafter to {made.seen.drafters_needed:.3g} that need one" in sentence(small, [made])
    assert made.price_per_hour == pytest.approx(5.5 * made.verifiers)
    assert made.price_per_million == pytest.approx(made.price_per_hour / (12.0 * 30 * 3600) * 1e6)


def test_an_slo_that_nothing_meets_has_no_fleet(small: Scenario) -> None:
    made = plan_mode(plain(small), replace(small, slo=replace(small.slo, tpot_p95_s=0.001)))
    assert (made.verifiers, made.limit, made.price_per_hour) == (0, "TPOT", math.inf)


def test_scaled_replicas_follow_the_traffic_of_all_regions_over_a_day(small: Scenario) -> None:
    made = plan_mode(plain(small), small, exact=False)
    moments, fixed = day(small, made), day(small, made, scaled=False)
    assert max(m.rate for m in moments) < 70.0
    assert {m.verifiers for m in fixed} == {sum(fleet(made.mode, peak, made.most_rate)[0] for peak in (40.0, 30.0))}
    assert all(m.verifiers * made.most_rate >= m.rate - 1e-6 for m in moments)
    assert price_per_million(moments) < price_per_million(fixed)
    many = grown(small, made, 10_000)
    assert max(m.sessions for m in day(many, made)) == pytest.approx(10_000, rel=0.1)


def test_a_regions_traffic_is_highest_at_its_peak() -> None:
    region = Region("here", 100.0, 20.0, 0.3)
    assert region.rate(20.0) == pytest.approx(100.0)
    assert region.rate(8.0) == pytest.approx(30.0)


def test_the_command_reports_plans_as_json_and_as_a_table(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(plan)
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL))
    told = CliRunner().invoke(app, [str(path), "--quick", "--json", "--day", "--rate", "30"])
    plans = json.loads(told.stdout)["plans"]
    prices = [each["price_per_hour"] for each in plans]
    assert prices == sorted(prices)
    assert {"no speculation", "co-located", "1 drafter : 1 verifier"} <= {each["mode"] for each in plans}
    assert all(0.0 < each["scale_verifiers_at"] < 64 for each in plans if each["verifiers"])
    path.write_text(json.dumps(SMALL | {"verifier": SMALL["verifier"] | {"sessions": 1}}))
    table = CliRunner().invoke(app, [str(path), "--quick", "--tpot-p95-ms", "0.1"])
    assert "No way to serve meets this SLO" in table.stdout
    missing = CliRunner().invoke(app, [str(tmp_path / "none.toml")])
    assert missing.exit_code == 1 and "there is no file" in missing.output


@pytest.mark.parametrize("number", [1, 1100])
def test_tables_fit_eighty_columns(small: Scenario, number: int) -> None:
    plans = []
    for mode in sizing.modes(small):
        cells = Cells(mode.cell, small.traffic, measured=Rates([8], [4000.0], [0.02], [8.0], [2.0], [0.0]))
        fleet = {"verifiers": number, "drafters": number * (mode.drafters > 0)}
        price = {"price_per_hour": 6.25 * number, "price_per_million": 12.3456}
        rates = {"most_rate": 12.345, "rate": 12.0 * number}
        plans.append(FleetPlan(mode, cells, **rates, **fleet, state=cells.at(12.0), seen=None, limit=OVERLOAD, **price))
    console = Console(width=80, record=True, file=io.StringIO())
    for drawn in (table(small, plans), day_table(small, plans), gpu_table("name/Of-A-Model-1B", level_times(1e9, 16))):
        console.print(drawn)
    told = console.export_text()
    assert "…" not in told and max(map(len, told.splitlines())) <= 80
    figures = {line[:15].strip(): line[15:].split() for line in told.splitlines() if len(line[15:].split()) == 9}
    assert {each.mode.name for each in plans[:2]} | {"1 : 4", "1 : 2", "1 : 1", "2 : 1"} <= set(figures)
    assert figures["1 : 4"][:2] == [str(number)] * 2 and figures["co-located"][:2] == [str(number), "0"]
    assert "tok/s, most" in told and "L40S" in told


def test_sessions_at_once_are_a_traffic_too(small: Scenario) -> None:
    """What the fleet has inside at its requests a second are the sessions that were asked for."""
    mode = plain(small)
    asked = replace(small, traffic=replace(small.traffic, rate=0.0, concurrency=60.0))
    made = plan_mode(mode, asked, exact=False)
    assert made.verifiers * made.cells.at(made.rate / made.verifiers).inside == pytest.approx(60.0, rel=0.05)
    again = plan_mode(mode, replace(small, traffic=replace(small.traffic, rate=made.rate)), exact=False)
    assert abs(again.verifiers - made.verifiers) <= 1 < made.verifiers
    assert made.price_per_million == pytest.approx(5.0 * made.verifiers / (made.rate * 30 * 3600) * 1e6)


def test_the_cheapest_is_the_one_whose_tokens_cost_least(small: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many sessions at once, a faster mode serves more requests."""

    def made(mode: sizing.Mode, scenario: Scenario, *, exact: bool) -> FleetPlan:
        cells = Cells(mode.cell, small.traffic, measured=Rates([8], [4000.0], [0.02], [8.0], [2.0], [0.0]))
        hourly = 12.0 if mode.drafters else 10.0
        return FleetPlan(mode, cells, 9.0, 9.0, 2, 0, cells.at(9.0), None, "TPOT", hourly, hourly / (1 + mode.drafters))

    monkeypatch.setattr(sizing, "plan", made)
    plans = sizing.compare(small)
    assert [plan.mode.drafters for plan in plans[:1]] == [2]
    assert "no speculation +150%" in sentence(small, plans)


def test_a_measured_table_can_be_planned_with() -> None:
    app = typer.Typer()
    app.command()(plan)
    told = CliRunner().invoke(app, ["--measure", "emulated:base_ms=1&token_ms=0.1", "--measure-s", "0.3"])
    table = Table(**json.loads(told.stdout))
    assert table(9, 1) > table(1, 1) > 0.0009
    assert isinstance(LinearCost(1.0)(1, 1), float) and OVERLOAD


async def test_the_costs_that_a_running_verifier_has_measured_can_be_planned_with() -> None:
    app = typer.Typer()
    app.command()(plan)

    def ask(address: str) -> Result:
        return CliRunner().invoke(app, ["--measured-at", address])

    engine = open_engine("emulated:base_ms=1&token_ms=0.1")
    async with verifier(engine, measure_s=0.1, always_speculate=True) as running, drafter(engine) as other:
        told, refused = await asyncio.to_thread(ask, running.address), await asyncio.to_thread(ask, other)
    table = Table(**json.loads(told.stdout))
    assert table(9, 1) > table(1, 1) > 0.0009
    assert refused.exit_code == 1 and "is no verifier that knows what its steps cost" in refused.output
    nobody = await asyncio.to_thread(ask, running.address)
    assert nobody.exit_code == 1 and "[UNAVAILABLE]" in nobody.output
