"""Gateways, verifiers, drafters, store and clients in one process, on virtual time, over a network that fails them.

Each seed is a world of its own. `make simulation SEEDS=1000` runs more of them; a seed that fails here fails there, in
the same way: `python -m tests.simulation --first SEED --seeds 1 --trace`.
"""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.simulation.__main__ import AGAIN
from tests.simulation.client import ERRANDS
from tests.simulation.controls import ROLLING, RULES, TWO, switched_off, worlds
from tests.simulation.storm import calm, restarts, storm
from tests.simulation.world import Report, Size, run

FIRST, SEEDS = 30, 14
"""Seeds among which each fault happens, and texts are mixed."""
MOST_SEEDS = 40
"""Within which a rule that is switched off must be missed."""
FAULTS = [
    *(f"{role} {fate}" for role in ("gateway", "verifier", "drafter", "hostile") for fate in ("killed", "frozen")),
    *(f"{role} drained" for role in ("gateway", "verifier", "drafter")),
    *(f"frames {fate}" for fate in ("late", "dropped", "repeated", "overtaken")),
    *("client frozen", "clients left", "sessions cancelled", "rollbacks", "branches"),
    *("passes failed", "devices broken", "verifiers ended", "texts poisoned"),
    *("partitions", "resets", "peers given up"),
    *("store away", "store failed over", "store forgot all", "store operations failed"),
]


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """Services log much about faults."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    return [run(seed, storm) for seed in range(FIRST, FIRST + SEEDS)]


def test_no_seed_breaks_an_invariant(reports: list[Report]) -> None:
    failed = [f"seed {each.seed}: {each.failure}\n{AGAIN.format(seed=each.seed)}" for each in reports if each.failure]
    assert not failed, "\n".join(failed)


def test_threads_of_other_tests_do_not_change_a_simulation(reports: list[Report]) -> None:
    """Such as one that still tries to export spans: it logs errors, and draws random numbers for its delays."""
    ended = threading.Event()

    def export() -> None:
        while not ended.is_set():
            random.random()
            logging.getLogger("exporter").error("Failed to export")
            ended.wait(1e-4)

    thread = threading.Thread(target=export)
    thread.start()
    try:
        report = run(FIRST + 3, storm)
    finally:
        ended.set()
        thread.join()
    assert (report.failure, report.trace) == ("", reports[3].trace)


def test_every_fault_happened(reports: list[Report]) -> None:
    counts = sum((each.counts for each in reports), Counter[str]())
    assert not [fault for fault in FAULTS if not counts[fault]]


def test_without_faults_no_recovery_takes_place() -> None:
    report = run(0, calm, Size(clients=2))
    assert not report.failure
    happened = {what for what, number in report.counts.items() if number}
    asked = {"sessions cancelled", "rollbacks", "branches", "clients left", *(f"texts to {each}" for each in ERRANDS)}
    assert happened <= {"frames", "texts", *asked}


def test_a_seed_is_replayed_exactly_in_another_process(reports: list[Report]) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.simulation",
        "--first",
        str(FIRST + 3),
        "--seeds",
        "2",
        "--jobs",
        "1",
        "--trace",
    ]
    output = subprocess.run(
        command,
        env=os.environ | {"PYTHONHASHSEED": "7"},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert output.stdout.splitlines()[:2] == [f"{each.seed} {each.trace}" for each in reports[3:5]], output.stderr


def test_no_text_goes_on_with_another_arithmetic_unless_it_is_marked() -> None:
    """Verifiers of two arithmetics, one of which takes the other's place now and then."""
    reports = [run(seed, storm, TWO) for seed in range(FIRST, FIRST + SEEDS // 2)]
    failed = [f"seed {each.seed}: {each.failure}" for each in reports if each.failure]
    assert not failed, "\n".join(failed)
    counts = sum((each.counts for each in reports), Counter[str]())
    assert counts["texts mixed"] and counts["texts of one arithmetic"] > counts["texts mixed"]


@pytest.mark.parametrize("relaxed", [0.0, 1.0], ids=["strict", "relaxed"])
def test_restarting_every_process_in_turn_disturbs_no_client(relaxed: float) -> None:
    report = run(0, restarts, replace(ROLLING, relaxed=relaxed))
    assert not report.failure
    assert report.counts["restarts"] == 7 and report.counts["texts"] == 16


@pytest.mark.mended_faults
@pytest.mark.parametrize("rule", RULES)
def test_switching_a_rule_off_makes_some_seed_fail(rule: str) -> None:
    faults, size, first = worlds(rule)
    with switched_off(rule):
        failures = (run(seed, faults, size).failure for seed in range(first, first + MOST_SEEDS))
        missed = next(filter(None, failures), "")
    assert missed
    assert "TypeError" not in missed and "AttributeError" not in missed, "the switch itself is broken"
