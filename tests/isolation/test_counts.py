"""The attacks of the table in short, on a gateway of this process: work is counted and not seconds.

Behind however much of one key's work, another key's next text waits for what has begun alone; what can be refused for
nothing gets no work done, nothing is logged for each request, and no callback of the loop computes for long (the
fixture `quick_callbacks`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.config import GatewayConfig
from gateway.work.tenant_work import TenantWork
from slipstream.client.gateway_endpoint import digest
from tests.isolation.attacker import attacker, client
from tests.isolation.attacks import ATTACKS, OUR_FAULT, Attacker, under_way
from tests.isolation.table import HTTP, NONE, RPCS
from tests.support.http_client import CHAT_TEMPLATE
from tests.support.scripted_gateway import Setting
from tests.support.toy_tokenizer import toy_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {
    "long prompts": "tests/integration/test_tenants_share.py::test_another_tenant_s_times_at_most_double",
    "long texts": "tests/integration/test_tenants_share.py::test_another_tenant_s_times_at_most_double",
    "short texts": "tests/unit/gateway/store/test_memory_bound.py::test_a_tenant_that_fills_the_store_drops_its_own",
    "idle connections": "tests/e2e/test_idle_connections.py::test_idle_connections_without_a_key_keep_no_client_out",
    "unread streams": "tests/integration/test_http_hostile.py::test_a_client_that_reads_nothing_is_left",
    "unclosed tool calls": "tests/unit/gateway/text/answers/test_readers.py::test_each_character_is_read_a_bounded",
}
"""Attacks whose tokens of steps, records, connections and characters other tests count."""
FREE = {"escapes", "values", "above 4 MiB"}
"""Refused without any work, where a model would read it: only what is to be counted may be longer."""
SIZED = {"long text", "predictions", "edits"}
"""Refused for their bytes once the body is parsed, without being encoded."""
UNRENDERED = {"messages"}
"""Refused for their bytes once the body is parsed, without being rendered."""
COUNTING = {"POST /tokenize", "POST /detokenize", "slipstream.v1.GatewayService/Tokenize"}
COUNTING |= {"POST /v1/messages/count_tokens", "POST /v1/responses/input_tokens"}
LENGTH = 20_000
"""Tokens, which are bytes, that the model takes."""
TEXT_BYTES = 200_000
PROCESSES = GatewayConfig(("127.0.0.1:1",), "x").text_processes
MOST_LINES = 256 + 20
"""Of the log in this file: the names of unknown fields, and what is said once."""
PAIRS = sorted(
    {
        (name, target)
        for target, row in (HTTP | RPCS).items()
        for name in row.values()
        if not name.startswith(NONE) and name not in ELSEWHERE
    }
)


KEYS = {"bob": "b" * 40} | {f"alice-{number}": f"{number:040}" for number in range(len(PAIRS))}
"""Each attack has a tenant of its own: what an earlier one left to be done is not taken for its."""


@dataclass
class Counted:
    attacker: Callable[[str], AbstractAsyncContextManager[Attacker]]
    """A tenant -> its attacker."""
    neighbour: httpx.AsyncClient
    jobs: list[tuple[str, str]]
    """Tenant and kind of what the working processes were given, in order."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Counted]:
    folder = toy_tokenizer(tmp_path_factory.mktemp("isolation"))
    (folder / "chat.jinja").write_text(CHAT_TEMPLATE)
    lines = [f'{name} = {{ sha256 = "{digest(key).hex()}" }}\n' for name, key in KEYS.items()]
    (folder / "keys.toml").write_text("".join(lines))
    jobs: list[tuple[str, str]] = []
    serve = TenantWork._serve

    async def noted(self: TenantWork, tenant: str, job: Any) -> None:
        jobs.append((tenant, job.frame.head["kind"]))
        await serve(self, tenant, job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TenantWork, "_serve", noted)
        async with AsyncExitStack() as stack:
            setting = Setting(folder, stack)
            setting.model.max_length = LENGTH
            files = {"api_keys": str(folder / "keys.toml"), "chat_template": str(folder / "chat.jinja")}
            verifier = setting.verifier("x = 1\n" * 200)
            front = await setting.front(verifier, http="127.0.0.1:0", **files)
            http, grpc = front.gateway.server.http_address, front.gateway.address

            @asynccontextmanager
            async def alice(tenant: str) -> AsyncIterator[Attacker]:
                async with attacker(http, grpc, KEYS[tenant], "toy") as made:
                    made.text_bytes = TEXT_BYTES
                    yield made

            bob = await stack.enter_async_context(client(f"http://{http}", KEYS["bob"]))
            yield Counted(alice, bob, jobs)


def every_attack_and_target() -> set[tuple[str, str]]:
    """Pairs in which each attack and each target occurs: those of the short suite."""
    seen: set[str] = set()
    chosen = set()
    for pair in PAIRS:
        if not seen.issuperset(pair):
            seen.update(pair)
            chosen.add(pair)
    return chosen


SHORT = every_attack_and_target()


@pytest.mark.parametrize(
    ("name", "target"), [pytest.param(*pair, marks=() if pair in SHORT else pytest.mark.slow) for pair in PAIRS]
)
async def test_a_request_of_another_key_waits_only_for_work_that_has_begun(
    both: Counted, name: str, target: str
) -> None:
    alice = f"alice-{PAIRS.index((name, target))}"
    both.jobs.clear()

    def jobs() -> list[tuple[str, str]]:
        return [(tenant, kind) for tenant, kind in both.jobs if tenant in (alice, "bob")]

    async with (
        both.attacker(alice) as attacks,
        under_way(replace(ATTACKS[name], at_once=2), attacks, target) as outcomes,
    ):
        while not outcomes:
            await asyncio.sleep(0.005)
        before = len(jobs())
        answer = await both.neighbour.post("/tokenize", json={"prompt": "a text " * 500})
    assert answer.status_code == 200, answer.text
    tenants = [tenant for tenant, _ in jobs()]
    assert tenants.index("bob") - before <= PROCESSES
    assert not any(outcome.startswith(OUR_FAULT) for outcome in outcomes), outcomes
    if target not in COUNTING:
        assert not (name in FREE and alice in tenants)
        assert not (name in SIZED and (alice, "encode") in both.jobs)
        assert not (name in UNRENDERED and (alice, "chat") in both.jobs)


async def test_unknown_fields_fill_no_log(both: Counted, caplog: pytest.LogCaptureFixture) -> None:
    target = "POST /v1/completions"
    with caplog.at_level(logging.DEBUG, "gateway"):
        async with both.attacker("alice-0") as alice:
            for _ in range(20):
                await ATTACKS["unknown fields"].send(alice, target)
    assert len(caplog.records) <= MOST_LINES


@pytest.mark.parametrize("name", ELSEWHERE)
async def test_attacks_that_are_not_counted_here_have_a_test_elsewhere(name: str) -> None:
    file, _, test = ELSEWHERE[name].partition("::")
    assert f"def {test}" in (ROOT / file).read_text("utf-8")
