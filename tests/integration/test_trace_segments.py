"""The trace of a long request is short: sums of segments, and spans of the rounds that stand out, in all processes."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack

from slipstream.telemetry import spans
from tests.support.collector import Collected, Collector
from tests.support.traced_system import PARENT, System, read_events

TOKENS, SEGMENT = 600, 128
REQUESTS = {spans.GENERATE, spans.RESUME}
PARENTS = {
    spans.PREFILL: REQUESTS,
    spans.ROUNDS_SUM: REQUESTS,
    spans.VERIFY_SUM: {spans.ROUNDS_SUM},
    spans.DRAFT_SUM: {spans.ROUNDS_SUM},
    spans.ROUND: {spans.ROUNDS_SUM, *REQUESTS},
    spans.VERIFY: {spans.ROUND},
    spans.DRAFT: {spans.ROUND, *REQUESTS},
    spans.COMMIT: {spans.ROUND},
}


def of(trace: list[Collected], name: str) -> list[Collected]:
    return sorted((span for span in trace if span.name == name), key=lambda span: span.began)


def total(found: list[Collected], key: str) -> float:
    return sum(span.attributes.get(key, 0) for span in found)


async def test_segments_add_up_to_the_request_and_few_rounds_stand_out(collector: Collector, system: System) -> None:
    collector.segment_tokens = SEGMENT
    await system.start()
    statistics = (await read_events(system.call(TOKENS)))[-1].finished.statistics
    everything = await collector.spans()
    trace = [span for span in everything if span.name != spans.STEP]
    known = {span.id: span for span in trace}
    [root] = of(trace, spans.GENERATE)
    assert root.span.name == "text_completion emulated"
    for span in trace:
        if span is not root:
            assert known[span.parent].name in PARENTS[span.name], span
    sums, verified, drafted = (of(trace, name) for name in (spans.ROUNDS_SUM, spans.VERIFY_SUM, spans.DRAFT_SUM))
    assert {each.span.name for each in drafted} == {
        f"draft {each.attributes[spans.DRAFTER]} rounds" for each in drafted
    }
    assert len(sums) == len(verified) == (TOKENS + 3 - 1) // SEGMENT + 1
    assert {span.parent for span in verified} == {span.id for span in sums} >= {span.parent for span in drafted}
    assert total(sums, spans.ROUNDS) == total(verified, spans.ROUNDS) == statistics.rounds
    assert total(sums, spans.TOKENS) == TOKENS
    for key in (spans.DRAFTED, spans.ACCEPTED):
        assert total(sums, key) == total(verified, key) == root.attributes[key]
    for key in (spans.COMPUTE, spans.BUBBLE):
        assert abs(total(sums, key) - root.attributes[key]) < 0.01
    misses = Counter[str]()
    for span in sums:
        misses.update({name: int(count) for name, count in map(str.split, span.attributes.get(spans.MISSES, ()))})
    assert misses == Counter(statistics.misses)
    [share] = root.attributes[spans.BY_DRAFTER]
    assert share == f"model {statistics.drafters[0].accepted}/{statistics.drafters[0].drafted}"
    # The rounds that stand out are whole: what the gateway has of them, the verifier has too, but for rounds that were
    # slow on the gateway alone.
    rounds, verifies = of(trace, spans.ROUND), of(trace, spans.VERIFY)
    others = {span.id for span in rounds if span.attributes[spans.REASON] != "slow"}
    assert others <= {span.parent for span in verifies} <= {span.id for span in rounds}
    assert rounds[0].attributes[spans.REASON] == "first" and rounds[0].attributes[spans.INDEX] == 0
    assert len(rounds) < statistics.rounds / 4
    reasons = Counter((span.parent, span.attributes[spans.REASON]) for span in rounds)
    assert all(count <= 5 for count in reasons.values())
    steps = {span.attributes[spans.INDEX] for span in of(everything, spans.STEP)}
    assert {span.attributes[spans.STEP_NUMBER] for span in verifies} == steps
    drafts = {span.id for span in (*of(trace, spans.DRAFT), *drafted)}
    assert {link for span in (*verifies, *verified) for link in span.links[span.name == spans.VERIFY :]} <= drafts
    assert len(everything) < statistics.rounds


async def test_a_request_that_moved_shows_where_it_went_on(collector: Collector, system: System) -> None:
    collector.segment_tokens = SEGMENT
    first = await system.verifier()
    await system.open([first, await system.verifier()], [])
    call = system.call(200)
    heard = 0
    while heard < 50:
        heard += len((await call.read()).delta.token_ids)
    assert len(first.scheduler)
    await first.server.stop(0)
    await read_events(call)
    trace = [span for span in await collector.spans() if span.name != spans.STEP]
    rounds = of(trace, spans.ROUND)
    opened = [span.attributes[spans.EPOCH] for span in rounds if span.attributes[spans.REASON] == "first"]
    assert opened == [1, 2]
    assert [span.attributes[spans.REASON] for span in rounds if span.attributes.get(spans.DISCARDED)] == ["failed"]
    assert total(of(trace, spans.ROUNDS_SUM), spans.TOKENS) == 200


async def test_a_verifier_that_is_gone_leaves_a_trace_that_can_be_read(collector: Collector) -> None:
    """What it had not sent is lost: the gateway's spans are whole without it."""
    collector.segment_tokens = SEGMENT
    gone = Collector()
    gone.address = "127.0.0.1:1"
    async with AsyncExitStack() as stack:
        system = System(stack, collector)
        collecting, system.collector = system.collector, gone
        target = await system.verifier()
        system.collector = collecting
        gone.segment_tokens = SEGMENT
        await system.open([target], [])
        await read_events(system.call(300, parent=PARENT))
        trace = await collector.spans()
    gone.close(0.0)
    known = {span.id for span in trace}
    [root] = of(trace, spans.GENERATE)
    assert {span.service for span in trace} == {"slipstream-gateway"}
    assert all(span.parent in known for span in trace if span is not root)
    assert total(of(trace, spans.ROUNDS_SUM), spans.TOKENS) == 300
