"""A session that no message to a drafter can hold loses the drafter; the link and its other sessions go on."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.errors import MESSAGE_TOO_LARGE
from slipstream.rpc import multiplexed_stream
from slipstream.rpc.multiplexed_stream import SendQueue
from slipstream.v1 import drafter_pb2, types_pb2, verifier_pb2
from tests.support.verifier_sessions import Sent, new_session
from verifier_svc.sources.candidate_sources import CandidateSources
from verifier_svc.sources.drafter_link import DrafterLink

ADDRESS = "127.0.0.1:1"


async def test_a_session_too_large_for_a_link_loses_its_drafter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiplexed_stream, "MAX_ITEM_BYTES", 500)
    sources = CandidateSources(types_pb2.ModelInfo(vocabulary_size=100, max_length=4096), 0.0)
    reported: list[Any] = []
    small = new_session([1, 2, 3], id="small", number=1)
    large = new_session([1] * 600, id="large", number=2, max_length=700, stream=Sent(reported.append))
    wanted = [verifier_pb2.DrafterAddress(address=ADDRESS, name="model")]
    sources.attach_session(small, wanted)
    link = sources._links[ADDRESS]
    assert isinstance(link, DrafterLink)
    queue = SendQueue[drafter_pb2.DraftCommand]()
    link._link._queue = queue  # as when it is connected
    sources.attach_session(large, wanted)
    assert [event.failure.reason for event in reported] == [MESSAGE_TOO_LARGE]
    link.connected()
    small.tokens.append(4)
    sources.committed(small, 3, [4])
    sent = await queue.take()
    assert [each.open.key.id for each in sent if each.HasField("open")] == ["small"]
    assert [list(each.commit.token_ids) for each in sent if each.HasField("commit")] == [[4]]
    assert sources.has_source(small) and not sources.has_source(large)
    await link._channel.close()


async def test_a_commit_too_large_for_a_link_costs_its_session_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiplexed_stream, "MAX_ITEM_BYTES", 500)
    sources = CandidateSources(types_pb2.ModelInfo(vocabulary_size=100, max_length=4096), 0.0)
    reported: list[Any] = []
    session = new_session([1, 2, 3], max_length=1000, stream=Sent(reported.append))
    sources.attach_session(session, [verifier_pb2.DrafterAddress(address=ADDRESS, name="model")])
    link = sources._links[ADDRESS]
    queue = SendQueue[drafter_pb2.DraftCommand]()
    link._link._queue = queue
    link.connected()
    session.tokens.extend([5] * 600)
    sources.committed(session, 3, [5] * 600)
    assert [event.failure.reason for event in reported if event.HasField("failure")] == [MESSAGE_TOO_LARGE]
    assert (await queue.take())[-1].HasField("close")
    assert link.idle
    await link._channel.close()
