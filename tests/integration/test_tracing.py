"""One trace shows a request in all three services: what an OTLP receiver gets, over real gRPC, models emulated."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from gateway.store.memory import MemoryBackend
from gateway.telemetry.request_metrics import Objectives
from slipstream.telemetry import spans
from slipstream.telemetry.tracing import Clocks
from slipstream.v1 import gateway_pb2, types_pb2
from tests.support.collector import Collected, Collector
from tests.support.fleet import emulated_text, until
from tests.support.fleet import gateway as decoding
from tests.support.traced_system import CLIENT, PARENT, UNSAMPLED, Refusing, System, read_events
from verifier_svc.sources.drafter_link import DrafterLink

SLACK_S = 10.0
"""Of moments that two tasks of a busy machine saw."""
PARENTS = {
    spans.PREFILL: {spans.GENERATE, spans.RESUME},
    spans.ROUND: {spans.GENERATE, spans.RESUME},
    spans.VERIFY: {spans.ROUND},
    spans.DRAFT: {spans.ROUND},
    spans.COMMIT: {spans.ROUND},
}


def of(collected: list[Collected], name: str) -> list[Collected]:
    return sorted((span for span in collected if span.name == name), key=lambda span: span.began)


async def test_one_trace_shows_a_request_in_all_three_services(system: System) -> None:
    await system.start()
    call = system.call(60)
    statistics = (await read_events(call))[-1].finished.statistics
    everything = await system.collector.spans()
    trace = [span for span in everything if span.name != spans.STEP]
    known = {span.id: span for span in trace}
    [root] = of(trace, spans.GENERATE)
    assert root.attributes[spans.ASKED]
    assert {span.trace for span in trace} == {"ab" * 16} == {dict(await call.trailing_metadata())["trace-id"]}
    assert (root.parent, root.span.kind) == (CLIENT, root.span.SPAN_KIND_SERVER)
    services = {spans.ROUND: "gateway", spans.COMMIT: "gateway", spans.VERIFY: "verifier", spans.PREFILL: "verifier"}
    for span in trace:
        if span is not root:
            assert span.service == f"slipstream-{services.get(span.name, 'drafter')}"
    rounds, verifies = of(trace, spans.ROUND), of(trace, spans.VERIFY)
    assert len(of(trace, spans.PREFILL)) == 1
    assert len(rounds) == len(verifies) == statistics.rounds == root.attributes[spans.ROUNDS]
    for name in (spans.DRAFTED, spans.ACCEPTED):
        total = root.attributes[name]
        assert total > 0
        assert sum(span.attributes[name] for span in rounds) == total
        assert sum(span.attributes[name] for span in verifies) == total
    assert [span.attributes[spans.INDEX] for span in rounds] == list(range(len(rounds)))
    assert sum(span.attributes[spans.TOKENS] for span in rounds) == 60
    drafts = of(trace, spans.DRAFT)
    for draft in drafts:  # of a pass that a commit came into, a span has its own part
        assert 0.0 <= draft.attributes[spans.COMPUTE] <= draft.ended - draft.began + 1e-5, draft
        assert draft.span.name == f"draft {draft.attributes[spans.DRAFTER]}"
    beyond = [span for span in drafts if span.parent == root.id]  # the end, when the session was closed
    assert len(beyond) <= 1
    assert all(span.attributes[spans.DISCARDED] for span in beyond)
    for span in trace:
        if span not in (root, *beyond):
            assert known[span.parent].name in PARENTS[span.name], span
    assert any(draft.overlaps(verify) for draft in drafts for verify in verifies if draft.parent == verify.parent)


async def test_a_verification_has_its_step_s_facts_and_is_linked_to_the_drafts_it_took(system: System) -> None:
    await system.start()
    await asyncio.gather(*(read_events(system.call(40, prompt, parent=None)) for prompt in range(4)))
    everything = await system.collector.spans()
    steps = {span.attributes[spans.INDEX]: span for span in of(everything, spans.STEP)}
    drafts = {span.id: span for span in of(everything, spans.DRAFT)}
    traces = {span.id: span.trace for span in everything}
    for verify in of(everything, spans.VERIFY):
        step = steps[verify.attributes[spans.STEP_NUMBER]]
        assert verify.attributes.get(spans.DISCARDED) or verify.parent in step.links
        assert (step.began, step.ended) == pytest.approx((verify.began, verify.ended), abs=1e-3)
        for fact in (spans.SESSIONS, spans.TOKENS):
            assert verify.attributes[fact] == step.attributes[fact]
        assert bool(verify.links) == (verify.attributes[spans.DRAFTED] > 0)
        for each in verify.links:
            assert drafts[each].trace == verify.trace
            assert drafts[each].began <= verify.began
    assert max(len({traces[each] for each in step.links}) for step in steps.values()) > 1
    for step in steps.values():
        assert not step.parent
        assert len(step.links) <= step.attributes[spans.SESSIONS]
    assert len({step.trace for step in steps.values()}) == len(steps)


async def test_spans_separate_waiting_from_computing(system: System) -> None:
    """Every duration is of one clock; together they are no more than the round."""
    await system.start()
    await read_events(system.call(60))
    trace = await system.collector.spans()
    verifies = {span.parent: span for span in of(trace, spans.VERIFY)}
    commits = {span.parent: span for span in of(trace, spans.COMMIT)}
    for span in of(trace, spans.ROUND):
        told, verify = span.attributes, verifies[span.id]
        assert told[spans.COMPUTE] == pytest.approx(verify.ended - verify.began, abs=1e-5)
        assert told[spans.COMPUTE] >= 0.015
        if told[spans.INDEX]:
            assert told[spans.WAIT] == pytest.approx(told[spans.QUEUE] + told[spans.BUBBLE], abs=1e-5)
        parts = (spans.WAIT, spans.COMPUTE, spans.WIRE, spans.COMMITTING)
        assert sum(told.get(part, 0.0) for part in parts) == pytest.approx(span.ended - span.began, abs=1e-4)
        if commit := commits.get(span.id):
            assert told[spans.COMMITTING] == pytest.approx(commit.ended - commit.began, abs=1e-5)


SKEWS = {"verifier behind": (-60.0, 0.0), "drafter ahead": (0.0, 3600.0), "both": (60.0, -60.0), "none": (0.0, 0.0)}


@pytest.mark.parametrize("skew", SKEWS)
async def test_spans_lie_in_their_parents_though_clocks_disagree(system: System, skew: str) -> None:
    late, later = (Clocks(lambda off=off: time.time_ns() + int(off * 1e9)) for off in SKEWS[skew])  # type: ignore[misc]
    await system.open([await system.verifier(clocks=late)], [await system.drafter(later)])
    await read_events(system.call(40))
    trace = [span for span in await system.collector.spans() if span.name != spans.STEP]
    known = {span.id: span for span in trace}
    for span in trace:
        if parent := known.get(span.parent):
            assert parent.began - SLACK_S <= span.began, (span, parent)
            assert span.ended <= parent.ended + SLACK_S, (span, parent)


def discarded(trace: list[Collected]) -> list[Collected]:
    """Rounds that were given up."""
    return [span for span in of(trace, spans.ROUND) if span.attributes.get(spans.DISCARDED)]


async def test_a_client_that_leaves_leaves_nothing_open(system: System) -> None:
    target = await system.verifier()
    await system.open([target], [await system.drafter()])
    await system.interrupted()
    await until(lambda: not len(target.scheduler))
    trace: list[Collected] = []
    async with asyncio.timeout(60):
        while not (of(trace, spans.GENERATE) and discarded(trace)):
            trace = [span for span in await system.collector.spans() if span.name != spans.STEP]
    [root] = of(trace, spans.GENERATE)
    assert root.attributes[spans.STATUS] == "CANCELLED"
    assert not root.failed
    given_up = discarded(trace)
    assert len(given_up) == 1
    assert given_up[0].attributes[spans.LENGTH] == max(span.attributes[spans.LENGTH] for span in of(trace, spans.ROUND))
    await no_orphans(system)


async def no_orphans(system: System) -> None:
    """Returns once every span's parent is there."""
    async with asyncio.timeout(30):
        while True:
            trace = [span for span in await system.collector.spans() if span.name != spans.STEP]
            if not {span.parent for span in trace} - {span.id for span in trace} - {CLIENT}:
                return


class Hesitating(Refusing):
    """Refuses after a while in which the verifier goes on."""

    async def append(self, *args: Any, **options: Any) -> None:
        await asyncio.sleep(0.3 if self.writes else 0.0)
        await super().append(*args, **options)


async def test_rounds_that_were_under_way_when_a_session_ended_have_spans(system: System) -> None:
    """The store refuses: what the verifier did meanwhile is in nobody's text, and its spans have their rounds."""
    store = Hesitating(MemoryBackend(), owner="me", ttl_s=60, lease_s=60)
    await system.open([await system.verifier()], [await system.drafter()], store)
    with pytest.raises(grpc.RpcError):
        await read_events(system.call(100_000))
    await no_orphans(system)
    trace = await system.collector.spans()
    assert len([span for span in of(trace, spans.ROUND) if span.attributes.get(spans.DISCARDED)]) > 1


async def test_a_lost_verifier_and_a_lost_drafter_appear_in_the_trace(system: System) -> None:
    async with AsyncExitStack() as doomed:
        first = await system.verifier()
        await system.open([first, await system.verifier()], [await system.drafter(stack=doomed)])
        call = system.call(400)
        events: list[Any] = []

        async def hear(until: int) -> None:
            while sum(len(event.delta.token_ids) for event in events) < until:
                events.append(await call.read())
                assert events[-1] is not grpc.aio.EOF

        await hear(30)
        await doomed.aclose()
        await hear(60)
        busy = first if len(first.scheduler) else None
        assert busy is not None
        await busy.server.stop(0)
        await read_events(call)
    trace = await system.collector.spans()
    [root] = of(trace, spans.GENERATE)
    names = Counter(name for name, _ in root.events)
    assert dict(root.events)[spans.LOST].keys() == spans.EVENTS[spans.LOST]
    assert names[spans.OPENED] == 2
    assert names[spans.LOST] == 1
    assert names[spans.DRAFTER_LOST] >= 1
    assert root.attributes[spans.REHOMED] == 1
    assert [span.attributes[spans.EPOCH] for span in of(trace, spans.PREFILL)] == [1, 2]
    assert Counter(span.attributes.get(spans.DISCARDED, False) for span in of(trace, spans.ROUND))[True] == 1


async def test_an_unsampled_request_adds_nothing_to_messages_between_services(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames: list[types_pb2.Candidates] = []
    opened: list[Any] = []
    graft, request = DrafterLink._graft, DrafterLink._open_request
    monkeypatch.setattr(DrafterLink, "_graft", lambda self, a, frame: (frames.append(frame), graft(self, a, frame))[1])
    monkeypatch.setattr(DrafterLink, "_open_request", lambda self, s: (opened.append(request(self, s)), opened[-1])[1])
    target, address = await system.verifier(), await system.drafter()
    async with decoding(target.address) as plain:
        decoded = await plain.decode([7, 8, 9], tokens=40, drafters=[address])
    assert decoded.drafted > 0
    assert not any(done.HasField("ended_unix_nano") for done in decoded.rounds)
    assert not any(frame.HasField("mark") for frame in frames)
    assert not any(open.HasField("trace") for open in opened)
    assert not await system.collector.spans()
    await system.open([target], [address])
    call = system.call(20, parent=UNSAMPLED)
    await read_events(call)
    assert "trace-id" not in dict(await call.trailing_metadata())
    assert not any(open.HasField("trace") for open in opened)
    assert not await system.collector.spans()
    await read_events(system.call(20))
    assert opened[-1].HasField("trace")
    assert frames[-1].HasField("mark")


@pytest.mark.parametrize("answers", [False, True])
async def test_no_request_waits_for_a_dead_collector(answers: bool) -> None:
    """Nobody at the port, or somebody who takes the connection and never says a word."""
    dead = Collector()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if answers:
            listener.listen()
        dead.address = f"127.0.0.1:{listener.getsockname()[1]}"
        async with AsyncExitStack() as stack:
            system = System(stack, dead)
            await system.start()
            async with asyncio.timeout(20):  # one export that is waited for takes 5 s
                events = await read_events(system.call(60))
        dead.close(0.0)
    assert [token for event in events for token in event.delta.token_ids] == emulated_text([7, 8, 9], 60)


async def test_every_declared_span_event_and_attribute_is_sent(
    system: System, collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Together with `check`: what is declared and what is sent are the same."""
    target = await system.verifier()
    async with AsyncExitStack() as doomed:
        await system.open([target], [await system.drafter(stack=doomed)], experiment="every: 1 drafters=model")
        sampling = gateway_pb2.SamplingOptions(temperature=0.5, top_p=0.9, top_k=40, seed=3)
        call = system.call(240, sampling=sampling, workload="code", model=target.executor.model.name)
        session = (await call.read()).started.session_id
        heard_of = 0
        while heard_of < 60:
            heard_of += len((await call.read()).delta.token_ids)
    while not any("lost drafter" in record.getMessage() for record in caplog.records):
        assert (await call.read()) is not grpc.aio.EOF, "the text ended before the loss of its drafter was reported"
    await call.read()  # sent after the session received that report
    call.cancel()
    await read_events(system.stub.Resume(gateway_pb2.ResumeRequest(session_id=session), metadata=(PARENT,)))
    await read_events(system.stub.Resume(gateway_pb2.ResumeRequest(session_id=session)))
    for failing in (
        system.stub.Resume(gateway_pb2.ResumeRequest(session_id="nobody's")),
        system.call(8, model="nobody's"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            await read_events(failing)
        assert dict(caught.value.trailing_metadata())["trace-id"]
    await system.interrupted()
    store = Refusing(MemoryBackend(), owner="me", ttl_s=60, lease_s=60)
    await system.open([target, await system.verifier()], [await system.drafter()], store)
    with pytest.raises(grpc.RpcError):
        await read_events(system.call(100))
    collector.segment_tokens = 64
    await system.open([target], [await system.drafter()])
    lossy = gateway_pb2.SamplingOptions(temperature=0.5, acceptance=types_pb2.ACCEPTANCE_RULE_TYPICAL)
    started = (events := await read_events(system.call(200, sampling=lossy)))[0].started
    assert events[-1].finished.statistics.misses
    await read_events(system.stub.Resume(gateway_pb2.ResumeRequest(session_id=started.session_id), metadata=(PARENT,)))
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    monkeypatch.setattr(Objectives, "UNBOUND_S", 0.0)  # whatever is not sampled is worth a span
    await system.open([target], [])
    session = (await read_events(system.call(8, parent=None)))[0].started.session_id
    await read_events(system.stub.Resume(gateway_pb2.ResumeRequest(session_id=session)))
    sent: dict[str, set[str]] = {}
    happened: dict[str, set[str]] = {}
    for span in await collector.spans():
        sent.setdefault(span.name, set()).update(span.attributes)
        for name, attributes in span.events:
            happened.setdefault(name, set()).update(attributes)
    # tests/integration/test_http_shapes.py
    elsewhere = {spans.HTTP_METHOD, spans.HTTP_ROUTE, spans.HTTP_STATUS, spans.TENANT}
    assert sent == {name: attributes - elsewhere for name, attributes in spans.SPANS.items()}
    rare = {name: spans.EVENTS[name] for name in (spans.LOST, spans.ARITHMETIC_CHANGED)}
    assert happened | rare == spans.EVENTS
