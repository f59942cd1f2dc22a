"""What one key sends at most doubles another key's times: every attack of the table, on real processes.

`make isolation` prints the table. Alone and under attack are measured in turns, in one run, so that what else the
machine does reaches both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.isolation.attacks import OUR_FAULT
from tests.isolation.system import Seen, Tenants, two_tenants
from tests.isolation.table import HTTP, NONE, RPCS
from tests.isolation.watched_gateway import longest_callback

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

TURNS, TEXTS = 3, 2
"""Turns of alone and under attack, and the neighbour's texts in each."""
MOST = 2.0
"""Times as long."""
NOISE_S = {"ttft": 0.05, "tpot": 0.005, "gap": 0.05}
"""Seconds that are not counted: a process that wakes up on a busy core waits for as much."""
MOST_LOOP_S = 0.05
"""CPU seconds of the gateway's longest callback; most attacks stay below a tenth of it. `test_items` holds what large
requests may take to less."""
MOST_MIB = 256
"""That an attack may add to the gateway's memory."""
ANYWHERE = ("idle connections", "streams of health")
"""Attacks on a listener, alike whatever the route."""


def pairs() -> list[tuple[str, str]]:
    """Attacks and what they are made on, each once."""
    found = {(name, target) for target, row in (HTTP | RPCS).items() for name in row.values()}
    once = {name: target for name, target in sorted(found, reverse=True) if name in ANYWHERE}
    return sorted(
        (name, target) for name, target in found if not name.startswith(NONE) and once.get(name, target) == target
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Tenants]:
    async with two_tenants(Path(tmp_path_factory.mktemp("isolation"))) as tenants:
        for _ in range(8):
            await tenants.text()
        heads = "".join(f"{head:>14}" for head in ("TTFT ms", "TPOT ms", "gap ms"))
        print(f"\n{'attack':22} {'on':52}{heads} loop ms   MiB  answers")
        yield tenants


@pytest.mark.parametrize(("name", "target"), pairs())
async def test_a_neighbour_s_times_at_most_double(both: Tenants, name: str, target: str) -> None:
    alone, attacked, answers, loop_s, code = Seen(), Seen(), Counter[str](), 0.0, ""
    before = both.memory_mib()
    before = min(before, both.memory_mib())
    for _ in range(TURNS):
        alone.texts += [await both.text() for _ in range(TEXTS)]
        longest_callback(both.loop_file)
        async with both.attacker.attacking(name, target) as so_far:
            attacked.texts += [await both.text() for _ in range(TEXTS)]
        answers += so_far
        loop_s, code = max((loop_s, code), longest_callback(both.loop_file))
    grown = both.memory_mib() - before
    figures = {name: (alone.middle(name), attacked.middle(name)) for name in NOISE_S}
    shown = " ".join(f"{1e3 * quiet:6.1f}{1e3 * loud:7.1f}" for quiet, loud in figures.values())
    ended = ", ".join(f"{each or 'ok'}: {times}" for each, times in sorted(answers.items()))
    print(f"{name:22} {target:52} {shown} {1e3 * loop_s:7.0f} {grown:5.0f}  {ended}")
    assert not any(each.startswith(OUR_FAULT) for each in answers), answers
    assert loop_s < MOST_LOOP_S, code
    assert grown < MOST_MIB
    for figure, (quiet, loud) in figures.items():
        assert loud <= MOST * quiet + NOISE_S[figure], figure
