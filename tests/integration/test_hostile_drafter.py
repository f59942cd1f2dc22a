"""Nothing that a drafter does changes a token, stalls a step, or harms another session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from slipstream.engine.factory import open_engine
from slipstream.rpc import proto_conversion
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.v1 import drafter_pb2, types_pb2, verifier_pb2
from tests.support.fleet import Decoded, Gateway, VerifierServer, drafter, emulated_text, gateway, until, verifier
from tests.support.hostile_drafter import Command, HostileDrafter, frame, hostile, refusal
from verifier_svc.scheduling.planner import Planner
from verifier_svc.scheduling.step_plan import StepPlan
from verifier_svc.sources import candidate_sources
from verifier_svc.sources.drafter_link import MAX_REOPENS
from verifier_svc.wait_policy.drafting_trial import DraftingTrial

PROMPT = [7, 8, 9]
NEIGHBOUR, NEIGHBOURS_PROMPT = "neighbour", [1, 2]
TOKENS = 60
MiB = 1024 * 1024
CLOSE = verifier_pb2.DecodeClose()

Responses = Iterable[drafter_pb2.DraftResponse | Exception]
Trick = Callable[[HostileDrafter, Command], Responses]


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return emulated_text(PROMPT, TOKENS)


@pytest.fixture(autouse=True)
def no_trial_pauses_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine one finds that drafting slows steps; tests here wait for candidates."""
    monkeypatch.setattr(DraftingTrial, "observe", lambda trial, step: None)


@asynccontextmanager
async def fleet(trick: Trick) -> AsyncIterator[tuple[HostileDrafter, VerifierServer, Gateway, str]]:
    async with (
        hostile(trick) as enemy,
        drafter(open_engine("emulated:acceptance=0.9")) as friend,
        verifier(open_engine("emulated:base_ms=2")) as server,
        gateway(server.address) as client,
    ):
        yield enemy, server, client, friend


async def undisturbed(client: Gateway, friend: str) -> None:
    """Another session with a good drafter speculates."""
    number, decoded = await client.open([1, 2], tokens=8000, drafters=[friend], session_id="good")
    await until(lambda: decoded.accepted > 10)
    assert not any(event.HasField("failure") for event in decoded.events)
    await client.command(number, close=CLOSE)
    await until(decoded.done.is_set)


@pytest.fixture(autouse=True)
def no_step_is_held_back_for_longer_than_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The verifier decides so by its own measure of a step, however slow the machine is."""
    hold_s, too_long = Planner.hold_s, list[tuple[float, float]]()

    def watched(planner: Planner, plan: StepPlan, waited_s: float) -> float:
        asked = hold_s(planner, plan, waited_s)
        if asked and waited_s + asked > 2.0 * plan.seconds + 1e-9:
            too_long.append((waited_s + asked, plan.seconds))
        return asked

    monkeypatch.setattr(Planner, "hold_s", watched)
    yield
    assert not too_long


def two_faced(trick: Trick) -> Trick:
    """A drafter that guesses all tokens of the session NEIGHBOUR, and plays the trick on every other."""
    text, served = emulated_text(NEIGHBOURS_PROMPT, 5000), set[int]()

    def answer(drafter: HostileDrafter, command: Command) -> Responses:
        if command.HasField("open") and command.open.key.id == NEIGHBOUR:
            served.add(command.session)
        if command.session not in served:
            return trick(drafter, command)
        right = frame(command, [])
        start = right.candidates[0].base_length - len(NEIGHBOURS_PROMPT)
        moved = command.HasField("open") or command.HasField("commit")
        return [frame(command, text[start : start + 8])] if moved else []

    return answer


@dataclass
class Neighbour:
    """A session that the same drafter serves well, on the same stream and at the same time."""

    client: Gateway
    number: int
    decoded: Decoded

    async def speculates(self) -> None:
        """Go on, until candidates were accepted again."""
        accepted = self.decoded.accepted
        async with asyncio.timeout(60):
            while self.decoded.accepted < accepted + 10:
                tokens = len(self.decoded.token_ids) + 16
                await self.client.command(self.number, credit=verifier_pb2.DecodeCredit(tokens=16))
                await until(lambda tokens=tokens: len(self.decoded.token_ids) == tokens)


@asynccontextmanager
async def neighbour(client: Gateway, enemy: HostileDrafter) -> AsyncIterator[Neighbour]:
    options: dict[str, Any] = {"tokens": 50_000, "credit": 1, "drafters": [enemy.address], "session_id": NEIGHBOUR}
    # A tenant of its own: what becomes of the other session's candidates is not held against it.
    number, decoded = await client.open(NEIGHBOURS_PROMPT, tenant="neighbour", **options)
    await until(lambda: len(decoded.token_ids) == 1)
    good = Neighbour(client, number, decoded)
    await good.speculates()
    yield good
    await good.speculates()
    await client.command(number, close=CLOSE)
    await until(decoded.done.is_set)
    assert decoded.token_ids == emulated_text(NEIGHBOURS_PROMPT, len(decoded.token_ids))
    assert codes(decoded) == []
    assert [each.open.key.id for each in enemy.kinds("open")].count(NEIGHBOUR) == 1
    assert enemy.streams == 1


def codes(decoded: Decoded) -> list[int]:
    return [event.failure.code for event in decoded.events if event.HasField("failure")]


def on(kind: str, *responses: Callable[[Command], drafter_pb2.DraftResponse | Exception]) -> Trick:
    def trick(drafter: HostileDrafter, command: Command) -> Responses:
        return [response(command) for response in responses] if command.WhichOneof("command") == kind else []

    return trick


def distributed(*pairs: tuple[list[int], list[int]]) -> list[types_pb2.Distribution]:
    return [types_pb2.Distribution(token_ids=tokens, weights=weights) for tokens, weights in pairs]


UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]
INVALID, AHEAD = grpc.StatusCode.INVALID_ARGUMENT.value[0], grpc.StatusCode.FAILED_PRECONDITION.value[0]


def _too_many_entries(command: Command) -> drafter_pb2.DraftResponse:
    return frame(command, [1], distributions=distributed((list(range(257)), [1] * 257)))


QUARANTINED: dict[str, tuple[int, list[Callable[[Command], drafter_pb2.DraftResponse]]]] = {
    "token out of range": (INVALID, [lambda c: frame(c, [256])]),
    "huge token": (INVALID, [lambda c: frame(c, [2**32 - 1])]),
    "no confidences": (INVALID, [lambda c: frame(c, [1, 2], confidences=b"")]),
    "its own parent": (INVALID, [lambda c: frame(c, [1, 2], parents=[0, 2])]),
    "parent from the future": (INVALID, [lambda c: frame(c, [1, 2], parents=[0, 9])]),
    "node zero": (INVALID, [lambda c: frame(c, [1], first_node=0)]),
    "base from the future": (AHEAD, [lambda c: frame(c, [1], base_length=100_000)]),
    "base moves": (INVALID, [lambda c: frame(c, [1]), lambda c: frame(c, [1], first_node=2, base_length=1)]),
    "ten thousand nodes": (INVALID, [lambda c: frame(c, [1] * 10_000)]),
    "weight zero": (INVALID, [lambda c: frame(c, [1], distributions=distributed(([1], [0])))]),
    "empty distribution": (INVALID, [lambda c: frame(c, [1], distributions=distributed(([], [])))]),
    "huge distribution": (INVALID, [_too_many_entries]),
}


@pytest.mark.parametrize("kind", QUARANTINED)
async def test_one_bad_frame_costs_the_session_its_drafter_and_nothing_else(expected: list[int], kind: str) -> None:
    """Distributions are read under a ratio rule alone, and only those of nodes that come before their place is taken:
    the ones behind the last commit do."""
    code, responses = QUARANTINED[kind]
    distribution = kind in ("weight zero", "empty distribution", "huge distribution")
    sampling = SamplingParams(temperature=0.0, acceptance="rejection" if distribution else "coupled")
    options: dict[str, Any] = {"sampling": sampling, "trusted": True}
    async with (
        fleet(two_faced(on("commit" if distribution else "open", *responses))) as (enemy, _, client, _),
        neighbour(client, enemy) as good,
    ):
        number, decoded = await client.open(PROMPT, tokens=TOKENS, drafters=[enemy.address], credit=10, **options)
        await until(lambda: codes(decoded) == [code])
        await good.speculates()
        await client.command(number, credit=verifier_pb2.DecodeCredit(tokens=TOKENS))
        await until(decoded.done.is_set)
    assert decoded.token_ids == expected
    assert codes(decoded) == [code]


IGNORED: dict[str, Trick] = {
    "silence": on("open"),
    "another session": on("commit", lambda c: frame(c, [1, 2], session=c.session + 1)),
    "lower epoch": on("commit", lambda c: frame(c, [1], epoch=0)),
    "higher epoch": on("commit", lambda c: frame(c, [1], epoch=9)),
    "stale generation": on("commit", lambda c: frame(c, [1]), lambda c: frame(c, [1, 2], generation=0)),
    "orphans": on("open", lambda c: frame(c, [1, 2], first_node=50)),
    "nothing in it": on("commit", lambda c: frame(c, []), lambda c: drafter_pb2.DraftResponse()),
    "wrong guesses": on("commit", lambda c: frame(c, range(200, 208))),
    "repeats": on("commit", *[lambda c: frame(c, [1, 2, 3])] * 20),
    "unlikely": on("commit", lambda c: frame(c, [1, 2], confidences=b"\xff\xff")),
    "refuses others": on("commit", lambda c: refusal(Command(session=c.session + 1, epoch=1), 8)),
    "distributions that no rule needs": on("commit", _too_many_entries),
    "highest numbers": on("open", lambda c: frame(c, [1], generation=2**32 - 1, first_node=2**32 - 1)),
}


@pytest.mark.parametrize("trick", IGNORED.values(), ids=IGNORED.keys())
async def test_meaningless_frames_are_ignored(expected: list[int], trick: Trick) -> None:
    async with fleet(two_faced(trick)) as (enemy, _, client, _), neighbour(client, enemy) as good:
        number, decoded = await client.open(PROMPT, tokens=TOKENS, drafters=[enemy.address], credit=10)
        await until(lambda: len(decoded.token_ids) == 10)
        await good.speculates()
        await client.command(number, credit=verifier_pb2.DecodeCredit(tokens=TOKENS))
        await until(decoded.done.is_set)
    assert decoded.token_ids == expected
    assert decoded.events == []  # the link was up before, and stays


def oversized(command: Command) -> drafter_pb2.DraftResponse:
    return refusal(command, 3, "x" * 5 * MiB)


BROKEN: dict[str, tuple[Trick, int]] = {
    "message above the limit": (on("open", oversized), 8),
    "dies at once": (on("open", lambda c: ValueError("boom")), 13),
    "dies later": (on("commit", lambda c: frame(c, [1]), lambda c: ValueError("boom")), 13),
}


@pytest.mark.parametrize(("trick", "code"), BROKEN.values(), ids=BROKEN.keys())
async def test_a_stream_that_breaks_is_dialled_again_ever_more_slowly(
    expected: list[int], trick: Trick, code: int
) -> None:
    async with fleet(trick) as (enemy, _, client, friend):
        number, decoded = await client.open(PROMPT, tokens=8000, credit=TOKENS, drafters=[enemy.address])
        await undisturbed(client, friend)
        await until(lambda: enemy.streams >= 3)
        await client.command(number, close=CLOSE)
        await until(decoded.done.is_set)
    assert decoded.token_ids[:TOKENS] == expected[: len(decoded.token_ids)]
    assert codes(decoded)[0] in (code, UNAVAILABLE)  # which, where a commit is being written at that moment


def in_peace(context: Any) -> None:
    pass


def with_garbage(context: Any) -> None:
    context.set_trailing_metadata((("grpc-status-details-bin", b"\xff\xff\xff"),))
    context.set_code(grpc.StatusCode.UNAVAILABLE)
    context.set_details("away")


@pytest.mark.parametrize("ends", [in_peace, with_garbage])
async def test_a_stream_that_is_closed_at_once_disturbs_no_session(
    expected: list[int], ends: Callable[[Any], None]
) -> None:
    async with fleet(on("open")) as (enemy, _, client, friend):
        enemy.ends = ends
        number, decoded = await client.open(PROMPT, tokens=8000, credit=TOKENS, drafters=[enemy.address])
        await until(lambda: enemy.streams >= 4 and len(decoded.token_ids) >= TOKENS)
        await undisturbed(client, friend)
        await client.command(number, close=CLOSE)
        await until(decoded.done.is_set)
    assert decoded.token_ids[:TOKENS] == expected
    assert len(decoded.events) <= 2 * enemy.streams


async def test_an_address_without_a_drafter_is_plain_decoding(expected: list[int]) -> None:
    async with fleet(on("open")) as (_, _, client, friend):
        decoded = await client.decode(PROMPT, tokens=TOKENS, drafters=["127.0.0.1:1"])
        await undisturbed(client, friend)
    assert decoded.token_ids == expected


@pytest.mark.parametrize("code", [0, 1, 3, 7, 8, 9, 13, 14, 99])
async def test_a_session_refused_by_its_drafter_gets_one_event_and_goes_on_alone(
    expected: list[int], code: int
) -> None:
    async with fleet(on("open", lambda c: refusal(c, code, "x" * 3_000_000))) as (enemy, _, client, friend):
        decoded = await client.decode(PROMPT, tokens=TOKENS, drafters=[enemy.address])
        await undisturbed(client, friend)
    assert decoded.token_ids == expected
    assert len(codes(decoded)) == 1
    assert len(enemy.kinds("open")) == 1


async def test_a_drafter_that_always_missed_something_is_opened_again_only_so_often(expected: list[int]) -> None:
    async with fleet(on("open", lambda c: frame(c, [1]), lambda c: refusal(c, 11))) as (enemy, _, client, friend):
        decoded = await client.decode(PROMPT, tokens=TOKENS, drafters=[enemy.address])
        await undisturbed(client, friend)
    assert decoded.token_ids == expected
    assert len(enemy.kinds("open")) == 1 + MAX_REOPENS
    assert codes(decoded) == [11]


async def test_a_drafter_that_missed_a_commit_is_opened_on_the_whole_prefix(expected: list[int]) -> None:
    def trick(drafter: HostileDrafter, command: Command) -> Responses:
        return [refusal(command, 11)] if len(drafter.kinds("commit")) == 1 and command.HasField("commit") else []

    async with fleet(trick) as (enemy, _, client, _):
        decoded = await client.decode(PROMPT, tokens=TOKENS, drafters=[enemy.address])
    first, second = enemy.kinds("open")
    assert first.session != second.session
    prefix = list(second.open.prefix.token_ids)
    assert prefix == (PROMPT + expected)[: len(prefix)] and len(prefix) > len(PROMPT)
    assert codes(decoded) == []


async def test_late_frames_are_walked_along_the_committed_tokens(expected: list[int]) -> None:
    """A slow drafter answers each command with guesses that stand on the prefix of the command before."""
    last: list[Command] = []

    def trick(drafter: HostileDrafter, command: Command) -> Responses:
        last.append(command)
        if len(last) < 3:
            return []
        base = frame(last[-3], []).candidates[0].base_length - len(PROMPT)
        return [frame(last[-3], expected[base : base + 8])] if 0 <= base < TOKENS else []

    async with fleet(trick) as (enemy, _, client, friend):
        decoded = await client.decode(PROMPT, tokens=TOKENS, drafters=[enemy.address])
        await undisturbed(client, friend)
    assert decoded.token_ids == expected
    assert codes(decoded) == []
    assert decoded.accepted > 5


async def test_each_gateway_receives_events_of_a_drafter_under_its_own_name_for_it() -> None:
    """One address, three sessions, three names; a fourth is given by attaching it again."""
    silent = on("open", lambda c: frame(c, [1, 2]), lambda c: refusal(c, 8))
    async with fleet(silent) as (enemy, server, client, friend), gateway(server.address) as other:
        names = {"one": (client, enemy.address), "two": (other, enemy.address), "three": (other, friend)}
        for name, (speaker, address) in names.items():
            number, decoded = await speaker.open(PROMPT, tokens=20_000, session_id=name)
            named = verifier_pb2.DrafterAddress(address=address, name=name)
            await speaker.command(number, attach=verifier_pb2.DecodeAttach(drafters=[named]))
            if address == friend:
                await until(lambda decoded=decoded: decoded.accepted > 10)
                named.name = "four"
                await speaker.command(number, attach=verifier_pb2.DecodeAttach(drafters=[named]))
                await until(lambda decoded=decoded: shares(decoded) == {"three", "four"})
                assert len([event for event in decoded.events if event.HasField("failure")]) == 0
            else:
                await until(lambda decoded=decoded: bool(codes(decoded)))
                assert {event.drafter for event in decoded.events} == {name}
            await speaker.command(number, close=CLOSE)
            await until(decoded.done.is_set)


def shares(decoded: Decoded) -> set[str]:
    return {share.drafter for done in decoded.rounds for share in done.drafters}


async def test_a_link_that_does_not_come_up_is_reported_once() -> None:
    async with (
        verifier(open_engine("emulated:base_ms=2"), silence_s=0.2) as server,
        gateway(server.address) as client,
    ):
        number, decoded = await client.open(PROMPT, tokens=20_000, drafters=["127.0.0.1:1"])
        await until(lambda: bool(decoded.events))
        rounds = len(decoded.rounds)
        await until(lambda: len(decoded.rounds) > rounds + 200)
        await client.command(number, close=CLOSE)
        await until(decoded.done.is_set)
    assert [event.failure.reason for event in decoded.events] == ["LINK_LOST"]


@pytest.mark.parametrize("why", ["paused", "too long", "none"])
async def test_a_drafter_of_which_nothing_is_due_is_not_counted_as_silent(why: str) -> None:
    """Control: the same drafter, of which something is wanted, is."""
    engine = open_engine("emulated:base_ms=2")
    model = proto_conversion.model_to_proto(engine.model)
    model.max_length = 5 if why == "too long" else model.max_length
    async with (
        hostile(lambda *_: [], model) as mute,
        verifier(engine, silence_s=0.3) as server,
        gateway(server.address) as client,
    ):
        most = 0 if why == "paused" else 8
        number, decoded = await client.open(PROMPT, tokens=20_000, drafters=[mute.address], max_draft_tokens=most)
        await until(lambda: bool(mute.kinds("open")))
        if why == "none":
            await until(lambda: "SILENT" in failures_of(decoded))
        rounds = len(decoded.rounds)
        await until(lambda: sum(done.wait_us + done.verify_us for done in decoded.rounds[rounds:]) > 1_000_000)
        await client.command(number, close=CLOSE)
        await until(decoded.done.is_set)
    assert ("SILENT" in failures_of(decoded)) == (why == "none")


def failures_of(decoded: Decoded) -> list[str]:
    return [event.failure.reason for event in decoded.events if event.HasField("failure")]


async def test_drafters_without_sessions_make_room_for_others(
    expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidate_sources, "MAX_DRAFTERS", 2)
    async with fleet(on("open")) as (enemy, _, client, friend):
        for port in range(1, 6):
            decoded = await client.decode(PROMPT, tokens=3, drafters=[f"127.0.0.1:{port}", enemy.address])
            assert decoded.token_ids == expected[:3]
        number, kept = await client.open(PROMPT, tokens=8000, drafters=[friend, enemy.address])
        full = await client.decode(PROMPT, tokens=3, drafters=["127.0.0.1:9"])
        assert full.token_ids == expected[:3] and failures_of(full) == ["RESOURCE_EXHAUSTED"]
        await until(lambda: kept.accepted > 10)
        await client.command(number, close=CLOSE)
        await until(kept.done.is_set)


async def test_a_tree_forgets_the_streams_that_are_gone(expected: list[int]) -> None:
    """Each time it is opened a session gets a source of its own; a flapping drafter once left one behind each time."""
    trick = on("open", lambda c: frame(c, [1, 2, 3]), lambda c: ValueError("boom"))
    async with fleet(trick) as (enemy, server, client, _):
        number, decoded = await client.open(PROMPT, tokens=50_000, drafters=[enemy.address])
        await until(lambda: enemy.streams >= 4)
        (session,) = server.scheduler._sessions
        assert len(session.tree._sources) <= 1
        await client.command(number, close=CLOSE)
        await until(decoded.done.is_set)


async def test_a_trusted_drafter_with_a_false_q_is_not_used_again_under_a_ratio_rule(expected: list[int]) -> None:
    def lie(command: Command) -> drafter_pb2.DraftResponse:
        return frame(command, [200, 201, 202], distributions=distributed(*[([1, 2], [9, 1])] * 3))

    sampling = SamplingParams(temperature=1.0, seed=4, acceptance="rejection")
    options: dict[str, Any] = {"sampling": sampling, "trusted": True, "tokens": TOKENS}
    async with fleet(lambda drafter, command: [lie(command)] if not command.HasField("close") else []) as world:
        enemy, server, client, friend = world
        plain = await client.decode(PROMPT, **options)
        number, decoded = await client.open(PROMPT, **options | {"credit": 1}, drafters=[enemy.address])
        await until(lambda: len(decoded.token_ids) == 1)
        (session,) = server.scheduler._sessions
        await until(lambda: not session.tree.empty)
        await client.command(number, credit=verifier_pb2.DecodeCredit(tokens=29))
        await until(lambda: len(decoded.token_ids) == 30)
        assert session.tree.empty
        assert codes(decoded) == [INVALID]
        await client.command(number, credit=verifier_pb2.DecodeCredit(tokens=1000))
        await until(decoded.done.is_set)
        await undisturbed(client, friend)
    assert decoded.token_ids == plain.token_ids
    assert len(enemy.kinds("open")) == 1


async def test_a_drafter_that_restarts_is_used_again() -> None:
    async with verifier(open_engine("emulated:base_ms=10")) as server, gateway(server.address) as client:
        async with drafter(open_engine("emulated:acceptance=0.9")) as address:
            number, decoded = await client.open(PROMPT, tokens=20_000, drafters=[address])
            await until(lambda: decoded.accepted > 10)
        await until(lambda: len(codes(decoded)) == 1)
        rounds, accepted = len(decoded.rounds), decoded.accepted
        await until(lambda: len(decoded.rounds) > rounds + 20)
        async with drafter(open_engine("emulated:acceptance=0.9"), listen=address):
            await until(lambda: decoded.accepted > accepted + 50)
            await client.command(number, close=CLOSE)
            await until(decoded.done.is_set)
    assert decoded.token_ids == emulated_text(PROMPT, len(decoded.token_ids))
    assert [event.failure.code for event in decoded.events] == [0, 14, 0]
