"""One fault after the other on a running system of real processes, in the middle of texts: every text is what the
target alone would have said, each client hears it once and whole, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from pathlib import Path

import pytest

from slipstream.errors import NotFound
from slipstream.rpc.channel import channel
from slipstream.telemetry import spans as names
from slipstream.telemetry.trace_reader import ReadSpan, read_spans, trace_from_folder
from slipstream.v1 import gateway_pb2_grpc
from tests.chaos.cluster import Cluster, asking
from tests.chaos.faults import FAULTS, PAIRS

pytestmark = pytest.mark.mended_faults
TEXTS, TOKENS = 4, 150
SHORT = (
    "a verifier is frozen",
    "one of each is killed",
    "gateway and verifier are cut off for 2 s",
    "other clients run out of time, cancel, and break their connection",
)
"""What every run of the suite sees: each kind of fault once. The others are in `make chaos`."""
LONG = ("verifier and drafter are reset for 2 s", "gateway and store are cut off for good on the way there")
"""The same kinds in other places: `make test-long`."""
SPARE_FILES = 10
"""Connections to the store, and to one gateway or another, come and go."""
LEVEL: dict[str, int] = {}
"""Open files of each process, after the first texts."""


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "name",
    [
        name if name in SHORT else pytest.param(name, marks=pytest.mark.long if name in LONG else pytest.mark.slow)
        for name in FAULTS
    ],
)
async def test_no_text_changes(system: Cluster, name: str) -> None:
    if not LEVEL:
        await asyncio.gather(*(text.running for text in await system.say(TEXTS, TOKENS)))
        LEVEL.update(system.open_files())
    texts = await system.busy(TEXTS, TOKENS, PAIRS.values())
    try:
        async with asyncio.timeout(240):
            struck = asyncio.create_task(FAULTS[name](system))
            completions = await asyncio.gather(*(text.running for text in texts))
            await struck
        for text, completion in zip(texts, completions, strict=True):
            assert completion.token_ids == text.expected()
        rest_s = await system.at_rest()
    finally:
        system.network.heal()
    await few_files(system)
    moved = sum(completion.finished.statistics.rehomed for completion in completions)
    silence = max(text.gap_s for text in texts)
    print(f"{name}: longest silence {silence:.2f} s, {moved} times on another verifier, at rest after {rest_s:.1f} s")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_trace_is_whole_though_its_verifier_was_killed(system: Cluster) -> None:
    """But for the last spans of the one that was killed: it made no other, and left none open."""
    trace_id, tokens = secrets.token_hex(16), 200
    async with channel(system.gateways[0].address) as line, asyncio.timeout(60):
        asked = (("traceparent", f"00-{trace_id}-{secrets.token_hex(8)}-01"),)
        call = gateway_pb2_grpc.GatewayServiceStub(line).Generate(asking(7, tokens), metadata=asked)
        heard = 0
        while heard < tokens:
            heard += len((event := await call.read()).delta.token_ids)
            if event.HasField("started"):
                victim = await system.deciding()
            elif victim.running and heard > tokens / 3:
                await victim.kill()
        finished = (await call.read()).finished.statistics
        await victim.start()
        spans = await whole(system.traces, trace_id)
    await system.at_rest()
    of = {name: [span for span in spans if span.name == name] for name in names.SPANS}
    [request] = of[names.GENERATE]
    lost = [event for event in request.events if event.name == names.LOST]
    rounds = [span for span in of[names.ROUND] if not span.attributes.get(names.DISCARDED)]
    given_up = [span for span in of[names.ROUND] if span not in rounds]
    assert len(given_up) == len(lost) == finished.rehomed >= 1
    assert len(rounds) == finished.rounds
    assert sum(span.attributes[names.TOKENS] for span in rounds) == tokens
    assert all(span.ended_ns >= span.began_ns > 0 for span in spans)
    known = {span.span_id: span for span in spans}
    assert {known[span.parent_id].name for span in of[names.COMMIT]} == {names.ROUND}
    epoch = max(span.attributes[names.EPOCH] for span in rounds)
    last = {span.span_id for span in rounds if span.attributes[names.EPOCH] == epoch}
    assert last <= {span.parent_id for span in of[names.VERIFY]}
    assert {span.attributes[names.EPOCH] for span in of[names.DRAFT]} >= {1, epoch}
    for draft in of[names.DRAFT]:  # of rounds that the gateway heard of, or of those that died with the verifier
        beyond = [each for each in given_up if each.attributes[names.EPOCH] == draft.attributes[names.EPOCH]]
        assert draft.parent_id in known or draft.attributes[names.LENGTH] > beyond[0].attributes[names.LENGTH]


async def whole(folder: Path, trace_id: str) -> list[ReadSpan]:
    """Once the request's own span and a verifier's last one are written."""
    while True:
        with contextlib.suppress(NotFound):
            spans = list(read_spans(trace_from_folder(folder, trace_id)))
            ended = [span.ended_ns for span in spans if span.name == names.GENERATE]
            verified = {span.parent_id for span in spans if span.name == names.VERIFY}
            rounds = [span for span in spans if span.name == names.ROUND]
            if ended and max(rounds, key=lambda span: span.ended_ns).span_id in verified:
                return spans
        await asyncio.sleep(0.2)


async def few_files(system: Cluster) -> None:
    """No more connections than there were, once what is left of old ones is closed."""
    async with asyncio.timeout(180):
        while any(count > LEVEL[name] + SPARE_FILES for name, count in system.open_files().items()):
            await asyncio.sleep(0.1)
