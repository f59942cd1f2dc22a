"""A plan's bounds and thresholds for manifests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from capacity.__main__ import plan as command
from capacity.manifests import CO_LOCATED, chosen, scaling, share_that_is_used
from capacity.sizing import FleetPlan, compare
from slipstream.errors import InvalidArgument
from tests.unit.capacity.test_capacity_plan import SMALL, parse, shorten


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        yield


@pytest.fixture(scope="module")
def plans(short: None) -> list[FleetPlan]:
    return compare(parse(SMALL), exact=False)


@pytest.mark.parametrize(("cold", "doubling", "share"), [(600, 1200, 0.707), (0, 1200, 1.0), (1200, 1200, 0.5)])
def test_traffic_that_grows_while_a_pod_starts_has_its_room(cold: float, doubling: float, share: float) -> None:
    assert share_that_is_used(cold, doubling) == pytest.approx(share, abs=1e-3)


def test_bounds_are_twice_the_plan_and_pods_are_added_before_it_is_reached(plans: list[FleetPlan]) -> None:
    plan = chosen(plans)
    planned = plan.state.inside if plan.seen is None else plan.seen.inside
    found = scaling(plan, 0.7).verifier
    assert found.threshold <= found.most_sessions / 2
    assert found.most_sessions >= 2 * planned > 0
    assert found.most_pods >= plan.verifiers / 0.7
    assert scaling(plan, 0.35).verifier.threshold <= found.threshold


def test_co_located_speculation_is_not_what_these_manifests_deploy(plans: list[FleetPlan]) -> None:
    assert CO_LOCATED in {each.mode.name for each in plans}
    assert chosen(plans).mode.name != CO_LOCATED
    assert chosen(plans).price_per_hour == min(each.price_per_hour for each in plans if each.mode.name != CO_LOCATED)


def test_where_nothing_is_within_the_objectives_there_are_no_manifests(plans: list[FleetPlan]) -> None:
    with pytest.raises(InvalidArgument, match="no way to serve"):
        scaling(replace(plans[0], verifiers=0), 0.7)


def test_the_command_writes_values_and_a_component(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    words = [str(tmp_path / "small.json"), "--quick", "--json", "--rate", "30", "--manifests", str(tmp_path / "made")]
    done = CliRunner().invoke(app, [*words, "--cold-start-s", "1200"])
    assert done.exit_code == 0, done.output
    values = yaml.safe_load((tmp_path / "made" / "values.yaml").read_text())
    component = yaml.safe_load((tmp_path / "made" / "kustomization.yaml").read_text())
    sessions = values["autoscaling"]["verifier"]["thresholds"]["sessions"]
    cap = int(values["deployments"]["verifier"]["env"]["VERIFIER_MAX_SESSIONS"])
    assert cap >= 4 * sessions  # half of the plan, for a start as long as traffic takes to double
    assert component["kind"] == "Component" and json.dumps(str(sessions)) in component["patches"][0]["patch"].replace(
        "\\", ""
    )
