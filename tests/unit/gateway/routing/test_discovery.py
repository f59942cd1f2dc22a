"""Workers behind a name are found, and let go once the name has forgotten them and nobody answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from gateway.routing.discovery import Discovery, by_name, read_addresses, resolve
from slipstream.errors import InvalidArgument

PERIOD_S = 0.001


class Peer:
    """A worker that notes what is done with it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.away = False
        self.runs = False
        self.closed = False

    async def run(self) -> None:
        self.runs = True
        try:
            await asyncio.Event().wait()
        finally:
            self.runs = False

    async def close(self) -> None:
        assert not self.runs
        self.closed = True


class Names:
    """A resolver that says what it is told to, and counts its answers."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Iterable[str] | OSError = addresses
        self._answered = asyncio.Condition()
        self._answers = 0

    async def __call__(self, target: str) -> Iterable[str]:
        assert target == "workers:1"
        async with self._answered:
            self._answers += 1
            self._answered.notify_all()
        if isinstance(self.addresses, OSError):
            raise self.addresses
        return self.addresses

    async def say(self, addresses: Iterable[str] | OSError) -> None:
        """Return when that has been heard and worked on."""
        self.addresses = addresses
        async with self._answered:
            enough = self._answers + 2
            await self._answered.wait_for(lambda: self._answers >= enough)


@asynccontextmanager
async def discovering(names: Names, roster: list[Peer]) -> AsyncIterator[list[Peer]]:
    """Every peer that was ever made."""
    made: list[Peer] = []

    def make(address: str) -> Peer:
        made.append(Peer(address))
        return made[-1]

    discovery = Discovery("dns:///workers:1", make, roster, lambda: None)
    task = asyncio.create_task(discovery.run(names, PERIOD_S))  # type: ignore[arg-type]
    try:
        yield made
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_every_address_is_a_worker_of_its_own_beside_those_that_were_there() -> None:
    static = Peer("static:1")
    roster, names = [static], Names()
    async with discovering(names, roster) as made:
        await names.say(["b:1", "a:1"])
        assert [peer.address for peer in roster] == ["static:1", "a:1", "b:1"]
        await names.say(["b:1", "a:1", "c:1"])
        assert [peer.address for peer in made] == ["a:1", "b:1", "c:1"] and all(peer.runs for peer in made)
    assert all(peer.closed and not peer.runs for peer in made)
    assert not static.closed


async def test_a_worker_is_removed_once_its_name_is_gone_and_it_is_away_and_not_before() -> None:
    roster: list[Peer] = []
    names = Names()
    async with discovering(names, roster) as made:
        await names.say(["a:1", "b:1"])
        gone, stays = made
        await names.say(["b:1"])
        assert gone in roster and gone.runs  # it may be draining
        stays.away = True
        await names.say(["b:1"])
        assert stays in roster and stays.runs  # it may be starting again
        gone.away = True
        await names.say(["b:1"])
        assert roster == [stays] and gone.closed
        await names.say(["a:1", "b:1"])
        assert len(made) == 3 and made[2] in roster  # the address has another owner now


async def test_a_failing_name_server_changes_no_worker_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    roster: list[Peer] = []
    names = Names()
    async with discovering(names, roster) as made:
        await names.say(["a:1"])
        made[0].away = True
        await names.say(OSError("no such host"))
        assert roster == made and made[0].runs
        await names.say(OSError("no such host"))
        assert len([one for one in caplog.records if "workers:1 cannot be resolved" in one.message]) == 1
        await names.say(["b:1"])
        assert [peer.address for peer in roster] == ["b:1"]


async def test_this_machine_resolves_a_host_to_one_address_of_one_kind() -> None:
    assert list(await resolve("127.0.0.1:7")) == ["127.0.0.1:7"]
    assert list(await resolve("[::1]:7")) == ["[::1]:7"]
    assert len(await resolve("localhost:7")) == 1


@pytest.mark.parametrize(("target", "looked_up"), [("dns:///verifier.ns:50071", True), ("verifier:50071", False)])
def test_only_dns_targets_are_looked_up_by_name(target: str, looked_up: bool) -> None:
    assert by_name(target) is looked_up


@pytest.mark.parametrize("target", ["dns:///verifier", "dns:///:1", "dns:///verifier:grpc"])
def test_half_a_name_is_refused(target: str) -> None:
    with pytest.raises(InvalidArgument, match="dns:///HOST:PORT"):
        by_name(target)


async def test_a_file_names_a_worker_in_each_line(tmp_path: Path) -> None:
    file = tmp_path / "workers"
    file.write_text("# the first\n10.0.0.7:50071\n\n  big.example:50071  # the second\n[fd00::1]:5\n")
    assert by_name(f"file://{file}", "GATEWAY_VERIFIERS")
    assert await resolve(f"file://{file}") == ["10.0.0.7:50071", "big.example:50071", "[fd00::1]:5"]
    with pytest.raises(InvalidArgument, match="whole path"):
        by_name("file://workers", "GATEWAY_VERIFIERS")


@pytest.mark.parametrize("content", ["10.0.0.7", "a b:1", "http://a:1", ":1", "a:x"])
def test_a_file_with_an_invalid_address_changes_nothing(content: str, tmp_path: Path) -> None:
    """As a name server that fails: Discovery keeps what it knows."""
    (tmp_path / "workers").write_text(f"good:1\n{content}\n")
    with pytest.raises(OSError, match="is not HOST:PORT"):
        read_addresses(tmp_path / "workers")
