"""Two builds side by side: this one, and an earlier one of another contract out of the repository's own history.
Drafters, verifiers and gateways are replaced one by one under load, up and down again.

`pytest -s tests/e2e/test_upgrade.py` prints how much was served; `-m "not slow"` replaces one of two of each role.
SLIPSTREAM_UPGRADE_FROM names another commit than the one before the last CHANGES changes of the contract.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from slipstream.client.async_client import AsyncClient
from slipstream.client.client import RetrySettings
from slipstream.errors import Unavailable
from slipstream.serving.role import Role
from tests.e2e.conftest import ROOT
from tests.support.fleet import emulated_text
from tests.support.forked_processes import forking_from, run_command
from tests.support.loopback_addresses import HOST, free_port
from tests.support.redis_server import redis_process

CHANGES = 3
"""Commits that changed the contract, between the two builds."""
CLIENTS = 2
TOKENS = 16
ROLES = {"drafter": "drafter_svc", "verifier": "verifier_svc", "gateway": "gateway"}

pytestmark = pytest.mark.timeout(480)


def git(*words: str) -> bytes:
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, check=False, timeout=60)
    if done.returncode:
        pytest.fail(
            f"git {' '.join(words)}: {done.stderr.decode()} This test needs the repository's whole history: "
            "git fetch --unshallow, or SLIPSTREAM_UPGRADE_FROM=COMMIT of one that is there.",
            pytrace=False,
        )
    return done.stdout


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The source tree of the earlier build, whose roles are forked from a process that has imported them."""
    commit = os.environ.get("SLIPSTREAM_UPGRADE_FROM", "")
    if not commit:
        changes = git("rev-list", "--no-merges", f"-{CHANGES}", "HEAD", "--", "protos").split()
        if len(changes) < CHANGES:
            pytest.skip("this clone is shallow and has no build of an earlier contract: git fetch --unshallow")
        commit = f"{changes[-1].decode()}^"
    folder = tmp_path_factory.mktemp("former")
    subprocess.run(["tar", "-x", "-C", folder], input=git("archive", commit), check=True, timeout=60)
    ours, theirs = (
        {stub.name: stub.read_text() for stub in (tree / "slipstream" / "v1").glob("*_pb2.py")}
        for tree in (ROOT, folder)
    )
    assert ours != theirs, f"{commit} has the contract of this build"
    with forking_from(folder):
        yield folder


class Replica:
    """One process at an address that stays its own, whichever build runs it."""

    def __init__(self, role: str, stack: AsyncExitStack, **settings: str) -> None:
        self.role, self._stack = role, stack
        self.address = f"{HOST}:{free_port()}"
        own = {"LISTEN": self.address, "GRACE_S": "1", "LOG_LEVEL": "warning"} | settings
        self._settings = {f"{role.upper()}_{name}": value for name, value in own.items()}
        self._running: Role | None = None

    async def run(self, tree: Path) -> None:
        """Ends the process that runs, as a kubelet does, and starts the build in `tree`."""
        if self._running is not None:
            await self._running.end()
            assert await self._running.ended() == 0
        # Without the first entry of the path, which is the folder that tests run in.
        build = {} if tree == ROOT else {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
        self._running = Role(ROLES[self.role], self._settings | build)
        self._stack.push_async_callback(self._running.end)
        await asyncio.wait_for(self._running.start(), 60)


class Load:
    """Clients that ask for one text after the other, and compare each with the target's own."""

    def __init__(self, gateways: list[str]) -> None:
        self._gateways = gateways
        self._prompts = itertools.count()
        self.texts = self.drafted = 0
        self.earlier_starts = False
        """Whether a gateway of the earlier build starts: it may refuse requests until a verifier has answered it."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(self._ask(number)) for number in range(CLIENTS)]
            yield
            for client in clients:
                client.cancel()

    async def _ask(self, number: int) -> None:
        servers = self._gateways[number % 2 :] + self._gateways[: number % 2]
        async with AsyncClient(servers, retry=RetrySettings(begin_anywhere=True)) as client:
            while True:
                prompt = [next(self._prompts) % 200, 8, 9]
                try:
                    completion = await client.generate(prompt, max_tokens=TOKENS, temperature=0.0)
                except Unavailable as error:
                    if self.earlier_starts and error.reason == "NO_VERIFIER":
                        await asyncio.sleep(0.05)
                        continue
                    raise
                assert completion.token_ids == emulated_text(prompt, TOKENS)
                assert completion.finished is not None
                self.texts += 1
                self.drafted += completion.finished.statistics.accepted

    async def goes_on(self) -> tuple[int, int]:
        """Texts, and accepted tokens of them, that were finished from now until there are enough of both: a mixture of
        builds that only decoded plainly would not pass."""
        texts, drafted = self.texts, self.drafted
        async with asyncio.timeout(60):
            while self.texts < texts + 2 * CLIENTS or self.drafted == drafted:
                await asyncio.sleep(0.05)
        return self.texts - texts, self.drafted - drafted


@pytest.fixture
async def replicas(tmp_path: Path) -> AsyncIterator[dict[str, list[Replica]]]:
    async with AsyncExitStack() as stack:
        store = stack.enter_context(redis_process(tmp_path))
        target = {"MODEL": "emulated:base_ms=80", "KV_TOKENS": "500000", "MEASURE_S": "0.2"}
        draft = {"MODEL": "emulated:base_ms=5&acceptance=0.9", "KV_TOKENS": "500000"}
        found = {
            "drafter": [Replica("drafter", stack, **draft) for _ in range(2)],
            "verifier": [Replica("verifier", stack, **target) for _ in range(2)],
        }
        first, second = (replica.address for replica in found["drafter"])
        paired = {
            "VERIFIERS": ",".join(replica.address for replica in found["verifier"]),
            "DRAFTERS": f"model={first},other={second}",
            "TOKENIZER": str(ROOT / "models" / "target"),
            "STORE": store.url,
        }
        found["gateway"] = [Replica("gateway", stack, **paired) for _ in range(2)]
        yield found


@pytest.mark.parametrize("replaced", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_builds_of_two_contracts_serve_together(
    replicas: dict[str, list[Replica]], former: Path, replaced: int
) -> None:
    """Up, drafters first as the documents say, and down in the same order: then new gateways meet old workers. No
    request fails, every text is the target's, and drafts are accepted in every mixture."""
    for role in ROLES:
        await asyncio.gather(*(replica.run(former) for replica in replicas[role]))
    load = Load([replica.address for replica in replicas["gateway"]])
    async with load.running():
        await load.goes_on()
        for tree, build in ((ROOT, "this build"), (former, "the earlier one")):
            for replica in (replica for role in ROLES for replica in replicas[role][:replaced]):
                load.earlier_starts = tree is former and replica.role == "gateway"
                await replica.run(tree)
                load.earlier_starts = False
                texts, accepted = await load.goes_on()
                print(f"{replica.role} of {build}: {texts} texts, {accepted} accepted tokens, no error")


def test_the_earlier_build_runs_from_its_own_tree(former: Path, tmp_path: Path) -> None:
    """Else both were one."""
    (tmp_path / "told.py").write_text(
        "import gateway, slipstream.v1, verifier_svc.service\n"
        "for each in (gateway, slipstream.v1, verifier_svc.service):\n    print(each.__file__)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(former)}
    command = run_command(["told"], environment, tmp_path)
    paths = command.stdout.readlines()
    command.stdout.close()
    assert command.wait(60) == 0
    assert len(paths) == 3 and all(path.startswith(str(former)) for path in paths)
