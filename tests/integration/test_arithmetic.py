"""Verifiers of one model name that differ in what decides their numbers: a text is one's alone, or it is marked."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from gateway.sessions.arithmetic_spans import with_spans
from gateway.store.memory import MemoryBackend, MemoryStore
from slipstream.errors import ARITHMETIC_GONE, OTHER_ARITHMETIC, ResourceExhausted, Unavailable
from slipstream.rpc.channel import error_of
from slipstream.telemetry import spans as telemetry
from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2
from tests.support.collector import Collector
from tests.support.http_client import CHAT_TEMPLATE
from tests.support.scraping import scrape
from tests.support.scripted_gateway import Answer, Front, Setting
from tests.support.scripted_verifier import ScriptedVerifier, served

LENGTH = 40
SEEN = 9


def verifier(setting: Setting, weights: str, arithmetic: str = "", **options: Any) -> ScriptedVerifier:
    """Its text is of its weights and arithmetic."""
    model = types_pb2.ModelInfo()
    model.CopyFrom(setting.model)
    model.revision, model.arithmetic = weights, arithmetic or weights
    script = setting.tokenizer.encode(f"{model.arithmetic} " * LENGTH).ids[:LENGTH]
    return ScriptedVerifier(model, script, **({"limit": SEEN} | options))


def home(front: Front) -> int:
    """The verifier that has a session."""
    return next(index for index, each in enumerate(front.verifiers) if each.sessions)


def spans(finished: gateway_pb2.Finished) -> list[tuple[str, int]]:
    return [(each.arithmetic, each.offset) for each in finished.statistics.arithmetics]


async def until_seen(front: Front, answer: Answer, **request: Any) -> Any:
    """The call of a session of which SEEN tokens have come."""
    call = front.call(**request)
    async for event in call:
        answer.add(event)
        if len(answer.tokens) == SEEN and event.HasField("delta"):
            return call
    raise AssertionError("the text ended early")


async def rest(call: Any, answer: Answer) -> None:
    try:
        async for event in call:
            answer.add(event)
    except grpc.RpcError as error:
        raise error_of(error) from error


async def test_a_session_waits_for_its_own_arithmetic_and_ends_typed_without_it(setting: Setting) -> None:
    front = await setting.front(verifier(setting, "one"), verifier(setting, "two"), rehoming_wait_s=0.3)
    answer = Answer()
    call = await until_seen(front, answer)
    first = home(front)
    front.verifiers[1 - first].limit = None
    await front.servers[first].stop(0)
    with pytest.raises(Unavailable) as caught:
        await rest(call, answer)
    assert caught.value.reason == ARITHMETIC_GONE and front.verifiers[first].model.arithmetic in caught.value.message
    assert "mixed_arithmetic" in caught.value.message
    assert answer.tokens == front.verifiers[first].script[:SEEN] and not front.verifiers[1 - first].opens()
    record = await front.record(answer.started.session_id)
    assert (record.finish_reason, list(record.output_token_ids)) == (0, answer.tokens)
    assert [each.arithmetic for each in record.arithmetics] == [front.verifiers[first].model.arithmetic]


async def test_a_session_whose_arithmetic_comes_back_goes_on_there(setting: Setting) -> None:
    front = await setting.front(verifier(setting, "one"), verifier(setting, "two"), rehoming_wait_s=3.0)
    answer = Answer()
    call = await until_seen(front, answer)
    first = home(front)
    weights = front.verifiers[first].model.revision
    front.verifiers[1 - first].limit = None
    await front.servers[first].stop(0)
    with pytest.raises(Unavailable):
        await rest(call, answer)
    again = verifier(setting, weights, limit=None)
    async with served(again, front.addresses[first]):
        async with asyncio.timeout(60):  # dialling again takes longer than a session waits here
            while not any(each.ready and each.weights == weights for each in front.gateway.router.verifiers):
                await asyncio.sleep(0.01)
        await front.resume(answer.started.session_id, answer)
    assert answer.tokens == again.script and spans(answer.finished) == [(weights, 0)]
    assert not front.verifiers[1 - first].opens()


async def mixed(front: Front, by: str) -> tuple[Answer, ScriptedVerifier, ScriptedVerifier]:
    """A text that the first verifier began and the second one ended, by the choice of the `request`, of the operator,
    or of a `resume`."""
    answer = Answer()
    call = await until_seen(front, answer, **({"mixed_arithmetic": True} if by == "request" else {}))
    first = home(front)
    one, two = front.verifiers[first], front.verifiers[1 - first]
    two.limit = None
    await front.servers[first].stop(0)
    if by == "resume":
        with pytest.raises(Unavailable):
            await rest(call, answer)
        await front.resume(answer.started.session_id, answer, mixed_arithmetic=True)
    else:
        await rest(call, answer)
    return answer, one, two


@pytest.mark.parametrize("by", ["request", "operator", "resume"])
async def test_by_choice_a_session_goes_on_with_another_arithmetic_and_is_marked(
    setting: Setting, by: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"mixed_arithmetic": "mark"} if by == "operator" else {}
    front = await setting.front(verifier(setting, "one"), verifier(setting, "two"), rehoming_wait_s=0.2, **config)
    answer, one, two = await mixed(front, by)
    assert answer.tokens == one.script[:SEEN] + two.script[SEEN:]
    names = [one.model.arithmetic, two.model.arithmetic]
    assert spans(answer.finished) == [(names[0], 0), (names[1], SEEN)]
    record = await front.record(answer.started.session_id)
    assert [(each.arithmetic, each.offset) for each in record.arithmetics] == spans(answer.finished)
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert f"the text goes on with arithmetic {names[1]}, and was written by {names[0]} so far" in warned
    assert front.gateway.metrics.arithmetic_changes == 1


@pytest.mark.parametrize("by", ["request", "resume"])
async def test_a_trace_marks_where_a_text_goes_on_with_another_arithmetic(
    setting: Setting, collector: Collector, by: str
) -> None:
    front = await setting.front(
        verifier(setting, "one"), verifier(setting, "two"), rehoming_wait_s=0.2, tracing=collector.tracing("gateway")
    )
    answer, one, two = await mixed(front, by)
    await front.generate(max_tokens=3)
    calls = [each for each in await collector.spans() if each.name in (telemetry.GENERATE, telemetry.RESUME)]
    marked = [(each, at) for each in calls for name, at in each.events if name == telemetry.ARITHMETIC_CHANGED]
    names = one.model.arithmetic, two.model.arithmetic
    length = len(answer.started.prompt_token_ids) + SEEN
    ((span, event),) = marked
    assert span.name == (telemetry.RESUME if by == "resume" else telemetry.GENERATE)
    assert event == {telemetry.ARITHMETIC: names[1], telemetry.LENGTH: length}
    assert span.attributes[telemetry.ARITHMETIC] == f"{names[0]} from 0, {names[1]} from {SEEN}"


async def test_a_request_that_refuses_comes_before_the_operators_choice(setting: Setting) -> None:
    front = await setting.front(
        verifier(setting, "one"), verifier(setting, "two"), rehoming_wait_s=0.2, mixed_arithmetic="mark"
    )
    answer = Answer()
    call = await until_seen(front, answer, mixed_arithmetic=False)
    first = home(front)
    front.verifiers[1 - first].limit = None
    await front.servers[first].stop(0)
    with pytest.raises(Unavailable) as caught:
        await rest(call, answer)
    assert caught.value.reason == ARITHMETIC_GONE


async def test_another_verifier_of_the_same_arithmetic_takes_a_session_over_at_once(setting: Setting) -> None:
    front = await setting.front(
        *(verifier(setting, weights) for weights in ("one", "two", "one", "two")), rehoming_wait_s=5.0
    )
    answer = Answer()
    call = await until_seen(front, answer)
    first = home(front)
    for each in front.verifiers:
        each.limit = None
    await front.servers[first].stop(0)
    await rest(call, answer)
    assert answer.tokens == front.verifiers[first].script and answer.finished.statistics.rehomed == 1
    assert len(spans(answer.finished)) == 1


async def test_another_gateway_goes_on_with_the_same_arithmetic(setting: Setting) -> None:
    memory = MemoryBackend()
    stores = [MemoryStore(memory, owner=name, ttl_s=60, lease_s=60) for name in ("one", "two")]
    front = await setting.front(verifier(setting, "one"), verifier(setting, "two"), store=stores[0])
    answer = Answer()
    call = await until_seen(front, answer)
    first = home(front)
    call.cancel()
    while (await front.store.read(answer.started.session_id)).leased:
        await asyncio.sleep(0.01)
    for each in front.verifiers:
        each.limit = None
    beside = await setting.beside(front, stores[1])
    await beside.resume(answer.started.session_id, answer)
    assert answer.tokens == front.verifiers[first].script


async def test_a_session_without_a_token_goes_anywhere_and_is_its_new_homes(setting: Setting) -> None:
    front = await setting.front(verifier(setting, "one", limit=0), verifier(setting, "two", limit=0))
    answer = Answer()
    call = asyncio.create_task(front.generate())
    while not any(each.sessions for each in front.verifiers):
        await asyncio.sleep(0.01)
    first = home(front)
    other = front.verifiers[1 - first]
    other.limit = None
    await front.servers[first].stop(0)
    answer = await call
    assert answer.tokens == other.script and spans(answer.finished) == [(other.model.arithmetic, 0)]


async def test_a_rollback_goes_on_with_the_arithmetic_of_what_it_keeps(setting: Setting) -> None:
    front = await setting.front(verifier(setting, "one"), verifier(setting, "two"), rehoming_wait_s=0.2)
    answer = Answer()
    call = await until_seen(front, answer, mixed_arithmetic=True)
    first = home(front)
    two = front.verifiers[1 - first]
    two.limit = None
    await front.servers[first].stop(0)
    await rest(call, answer)
    session = answer.started.session_id
    await front.roll_back(session, SEEN + 3)  # two's tokens are kept
    after = await front.resume(session)
    assert after.tokens == answer.tokens and spans(after.finished) == spans(answer.finished)
    for change in ({}, {"branch": True}):
        back = await front.roll_back(session, 4, **change)  # one's alone
        with pytest.raises(Unavailable) as caught:
            await front.resume(back.key.id, mixed_arithmetic=False)
        assert caught.value.reason == ARITHMETIC_GONE
    back = await front.roll_back(session, 0, text="two")  # nobody's
    fresh = await front.resume(session)
    ((name, edited),) = spans(fresh.finished)
    assert (name, fresh.tokens[edited:]) == (two.model.arithmetic, two.script[edited:]) and edited > 0


async def test_a_record_of_an_older_gateway_goes_on_anywhere_as_before(setting: Setting) -> None:
    store = MemoryStore(MemoryBackend(), owner="me", ttl_s=60, lease_s=60)
    front = await setting.front(verifier(setting, "one"), verifier(setting, "two"), store=store)
    answer = Answer()
    call = await until_seen(front, answer)
    first = home(front)
    call.cancel()
    session = answer.started.session_id
    while (record := await store.read(session)).leased:
        await asyncio.sleep(0.01)
    await store.truncate(session, record.epoch + 1, record.length, with_spans(record.params, ()))
    await store.release(session, record.epoch + 1)
    other = front.verifiers[1 - first]
    other.limit = None
    await front.servers[first].stop(0)
    await front.resume(session, answer)
    assert answer.tokens == front.verifiers[first].script[:SEEN] + other.script[SEEN:]
    assert spans(answer.finished) == [] and not (await front.record(session)).arithmetics


async def test_a_verifier_at_the_address_of_another_one_does_not_get_its_sessions(setting: Setting) -> None:
    """A session is opened with the name of the verifier that was chosen; whoever is there by then refuses another."""
    front = await setting.front(verifier(setting, "one"), rehoming_wait_s=4.0)
    answer = Answer()
    call = await until_seen(front, answer)
    await front.servers[0].stop(0)
    other = verifier(setting, "two", limit=None)
    async with served(other, front.addresses[0]):
        with pytest.raises(Unavailable) as caught:
            await rest(call, answer)
    assert caught.value.reason == ARITHMETIC_GONE and not other.opens()
    assert [each.arithmetic for each in front.verifiers[0].opens()] == ["one"]


async def test_a_refusal_for_another_arithmetic_makes_the_gateway_ask_the_verifier_again(setting: Setting) -> None:
    changed = verifier(setting, "one", refuse=Unavailable("another is here", reason=OTHER_ARITHMETIC), started_ms=9)
    front = await setting.front(changed, verifier(setting, "two", limit=None))
    changed.model.arithmetic = changed.model.revision = "three"  # behind the gateway's back
    assert (await front.generate()).tokens == front.verifiers[1].script and len(changed.opens()) == 1
    async with asyncio.timeout(10):
        while {each.arithmetic for each in front.gateway.router.verifiers} != {"two", "three"}:
            await asyncio.sleep(0.01)


async def test_new_sessions_go_to_the_newest_weights_and_old_ones_end_on_the_old(setting: Setting) -> None:
    old, new = verifier(setting, "old"), verifier(setting, "new", limit=None)
    old.started_ms, new.started_ms = 1_000, 2_000
    front = await setting.front(old, new)
    (served_model,) = (await front.stub.ListModels(gateway_pb2.ListModelsRequest())).models
    assert [(each.arithmetic, each.verifiers, each.newest) for each in served_model.arithmetics] == [
        ("new", 1, True),
        ("old", 1, False),
    ]
    assert served_model.model.revision == "new"
    assert [(await front.generate()).tokens for _ in range(3)] == [new.script] * 3 and not old.opens()
    await front.servers[1].stop(0)
    answer = Answer()
    call = await until_seen(front, answer)
    again = verifier(setting, "new", limit=None, started_ms=3_000)
    async with served(again, front.addresses[1]):
        while (await front.generate(max_tokens=5)).tokens != again.script[:5]:
            await asyncio.sleep(0.02)
        old.limit = None
        await rest(call, answer)
    assert answer.tokens == old.script and spans(answer.finished) == [("old", 0)]


async def test_the_prefix_of_an_older_weights_verifier_attracts_no_new_session(setting: Setting) -> None:
    old, new = verifier(setting, "old", limit=None), verifier(setting, "new", limit=None)
    old.started_ms, new.started_ms = 1_000, 2_000
    front = await setting.front(old, new)
    prompt = {"prompt_token_ids": gateway_pb2.TokenIds(token_ids=[5] * 100)}
    new.refuse = ResourceExhausted("no room")
    assert (await front.generate(**prompt)).tokens == old.script  # which has computed the prompt now
    new.refuse = None
    assert (await front.generate(**prompt)).tokens == new.script


async def test_a_session_goes_on_though_its_arithmetic_came_back_in_the_middle_of_the_wait(setting: Setting) -> None:
    front = await setting.front(verifier(setting, "one"), rehoming_wait_s=20.0)
    answer = Answer()
    call = await until_seen(front, answer)
    await front.servers[0].stop(0)
    other, twin = verifier(setting, "two", limit=None), verifier(setting, "one", limit=None)
    reading = asyncio.create_task(rest(call, answer))
    async with served(other, front.addresses[0]) as (_, server):
        while {each.arithmetic for each in front.gateway.router.verifiers} != {"two"}:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert not reading.done()
        await server.stop(0)
    async with served(twin, front.addresses[0]):
        await reading
    assert answer.tokens == twin.script and not other.opens()
    assert answer.finished.reason == verifier_pb2.FINISH_REASON_LENGTH


async def test_relaxed_a_session_that_is_taken_up_keeps_the_name_though_its_tokens_are_lost(setting: Setting) -> None:
    """A client may have tokens that no log has: whoever goes on must write the same ones."""
    memory = MemoryBackend()
    stores = [MemoryStore(memory, owner=name, ttl_s=60, lease_s=60) for name in ("one", "two")]
    relaxed = {"durability": "relaxed", "rehoming_wait_s": 0.2}
    front = await setting.front(verifier(setting, "one"), verifier(setting, "two"), store=stores[0], **relaxed)
    answer = Answer()
    call = await until_seen(front, answer)
    first = home(front)
    call.cancel()
    session = answer.started.session_id
    while (record := await front.store.read(session)).leased or record.length == record.prompt_length:
        await asyncio.sleep(0.01)
    await stores[0].truncate(session, record.epoch + 1, record.prompt_length)  # as a store that lost its last writes
    await stores[0].release(session, record.epoch + 1)
    for each in front.verifiers:
        each.limit = None
    front.verifiers[1 - first].started_ms = 1 << 40
    again = await setting.beside(front, stores[1], **relaxed)
    await again.resume(session, answer)
    assert answer.tokens == front.verifiers[first].script


async def test_http_names_the_arithmetic_and_marks_a_text_of_two(setting: Setting) -> None:
    front = await setting.front(
        verifier(setting, "one"), verifier(setting, "two"), http="127.0.0.1:0", rehoming_wait_s=0.2
    )
    assert front.gateway.server.http_address
    base = f"http://{front.gateway.server.http_address}/v1"
    async with httpx.AsyncClient(timeout=30.0) as client:
        (model,) = (await client.get(f"{base}/models")).json()["data"]
        assert {each["name"]: each["verifiers"] for each in model["arithmetics"]} == {"one": 1, "two": 1}
        assert sum(each["newest_weights"] for each in model["arithmetics"]) == 1
        body = {"model": model["id"], "prompt": "Tell me.", "max_tokens": LENGTH}
        asking = asyncio.create_task(client.post(f"{base}/completions", json=body | {"mixed_arithmetic": True}))
        async with asyncio.timeout(20):
            while not any(s.output == SEEN for each in front.verifiers for s in each.sessions.values()):
                await asyncio.sleep(0.01)
        first = home(front)
        one, two = front.verifiers[first], front.verifiers[1 - first]
        two.limit = None
        await front.servers[first].stop(0)
        answer = (await asking).json()
        names = [one.model.arithmetic, two.model.arithmetic]
        spans = [(each["arithmetic"], each["offset"]) for each in answer["choices"][0]["arithmetics"]]
        assert [name for name, _ in spans] == names and spans[0][1] == 0 and spans[1][1] == SEEN
        assert answer["system_fingerprint"] == names[1]
        whole = (await client.post(f"{base}/completions", json=body)).json()
        assert whole["system_fingerprint"] == names[1] and "arithmetics" not in whole["choices"][0]


class Held(MemoryStore):
    """Carries out what cuts a log once it may."""

    asked: asyncio.Event
    may: asyncio.Event

    async def truncate(self, *args: Any, **options: Any) -> None:
        self.asked.set()
        await self.may.wait()
        await super().truncate(*args, **options)


async def test_relaxed_no_token_comes_from_an_arithmetic_that_the_record_does_not_name(setting: Setting) -> None:
    """Else a gateway that takes the session up after a crash would go on with the one that the record names."""
    store = Held(MemoryBackend(), owner="me", ttl_s=60, lease_s=60)
    store.asked, store.may = asyncio.Event(), asyncio.Event()
    both = verifier(setting, "one", limit=0), verifier(setting, "two", limit=0)
    front = await setting.front(*both, store=store, durability="relaxed", rehoming_wait_s=20.0)
    answering = asyncio.create_task(front.generate())
    while not any(each.sessions for each in front.verifiers):
        await asyncio.sleep(0.01)
    first = home(front)
    other = front.verifiers[1 - first]
    other.limit = None
    await front.servers[first].stop(0)
    await store.asked.wait()
    await asyncio.sleep(0.3)
    assert not other.opens()
    store.may.set()
    answer = await answering
    assert answer.tokens == other.script and spans(answer.finished) == [(other.model.arithmetic, 0)]


MESSAGES = [{"role": "user", "content": "Tell me."}]
ANSWERS: dict[str, tuple[dict[str, Any], Callable[[list[dict[str, Any]]], list[dict[str, Any]]]]] = {
    "completions": ({"prompt": "Tell me."}, lambda events: [e["choices"][0] for e in events]),
    "chat/completions": ({"messages": MESSAGES}, lambda events: [e["choices"][0] for e in events]),
    "responses": ({"input": "Tell me."}, lambda events: [e.get("response", {}) for e in events]),
    "messages": ({"messages": MESSAGES}, lambda events: events),
}
"""By route: its input, and the parts of its events that may have the mark."""


@pytest.mark.parametrize("route", ANSWERS)
async def test_every_route_takes_the_choice_and_marks_the_end_of_its_stream(
    setting: Setting, route: str, tmp_path: Path
) -> None:
    (tmp_path / "chat.jinja").write_text(CHAT_TEMPLATE)
    front = await setting.front(
        verifier(setting, "one"),
        verifier(setting, "two"),
        http="127.0.0.1:0",
        rehoming_wait_s=0.2,
        chat_template=str(tmp_path / "chat.jinja"),
    )
    given, parts = ANSWERS[route]
    body = given | {"model": "toy", "max_tokens": LENGTH, "stream": True, "mixed_arithmetic": True}
    async with httpx.AsyncClient(base_url=f"http://{front.gateway.server.http_address}/v1", timeout=30.0) as client:
        asking = asyncio.create_task(client.post(route, json=body))
        async with asyncio.timeout(20):
            while not any(s.output == SEEN for each in front.verifiers for s in each.sessions.values()):
                await asyncio.sleep(0.01)
        first = home(front)
        one, two = front.verifiers[first], front.verifiers[1 - first]
        two.limit = None
        await front.servers[first].stop(0)
        lines = [line.removeprefix("data: ") for line in (await asking).text.splitlines() if line.startswith("data: {")]
        marked = [part["arithmetics"] for part in parts(list(map(json.loads, lines))) if "arithmetics" in part]
        spans = [
            {"arithmetic": one.model.arithmetic, "offset": 0},
            {"arithmetic": two.model.arithmetic, "offset": SEEN},
        ]
        assert marked == [spans]
        whole = (await client.post(route, json=body | {"stream": False})).text
        assert "arithmetics" not in whole and two.model.arithmetic in whole


async def test_metrics_count_the_verifiers_of_each_arithmetic(setting: Setting) -> None:
    fleet = [verifier(setting, weights) for weights in ("one", "two", "two")]
    fleet[0].model.batch_invariant = True
    front = await setting.front(*fleet, metrics_listen="127.0.0.1:0")
    seen = await scrape(front.gateway.server.metrics_address)
    assert seen.value("slipstream_model_info", arithmetic="one", promise="tokens") == 1
    assert seen.value("slipstream_model_info", arithmetic="two", promise="distribution") == 2
    assert seen.value("slipstream_arithmetic_changes_total") == 0
