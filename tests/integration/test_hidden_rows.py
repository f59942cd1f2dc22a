"""Hidden states that reach a method inside the verifier are those of the committed text; none is asked for in vain."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.engine.engine import Engine, HiddenRequest, HiddenStates, ModelOutput
from slipstream.engine.factory import open_engine
from slipstream.engine.segment import Segment
from slipstream.errors import FailedPrecondition, SlipstreamError
from slipstream.proposers import registry
from slipstream.proposers.base import (
    HiddenNeed,
    HiddenRows,
    OpenedProposer,
    Proposal,
    ProposedNode,
    ProposerContext,
    ProposerSettings,
    any_vocabulary,
)
from slipstream.proposers.pair_cache import NewPairs, PairReader
from slipstream.proposers.registry import ProposerMethod
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.v1 import verifier_pb2
from tests.support.checkpoints import save_checkpoint
from tests.support.fleet import gateway, opening, verifier
from verifier_svc.execution.fault_isolation import _probe_session
from verifier_svc.hidden_feed import ComputedRows, HiddenFeed
from verifier_svc.sources.shadow import Double

NEED = HiddenNeed(layers=(1,), every_row=True)
TOKENS = 40


class Reader:
    """Keeps all rows that come, and guesses two branches, so that rows of a tree are chosen from."""

    def __init__(self) -> None:
        self.rows: dict[Hashable, list[HiddenRows]] = {}
        self.tokens: dict[Hashable, list[int]] = {}

    def propose(self, contexts: list[ProposerContext]) -> list[Proposal | SlipstreamError]:
        for context in contexts:
            self.rows.setdefault(context.handle, []).extend(context.hidden)
            self.tokens[context.handle] = context.tokens
        return [Proposal(self._guesses(context), context.length) for context in contexts]

    def close_sequence(self, handle: Hashable) -> None:
        """Tests look at what came."""

    def _guesses(self, context: ProposerContext) -> list[ProposedNode]:
        """The same text as of the session before it, and a wrong branch first."""
        known = max((tokens for tokens in self.tokens.values()), key=len)[context.length : context.length + 3]
        nodes = [ProposedNode(-1, 5, -0.1)] if context.expand else []
        for token in known if context.expand else []:
            nodes.append(ProposedNode(len(nodes) - 1 if len(nodes) > 1 else -1, token, -0.1))
        return nodes


READER = Reader()


def open_reader(settings: ProposerSettings) -> OpenedProposer:
    return OpenedProposer(any_vocabulary("reader"), READER, NEED)


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    READER.rows.clear()
    READER.tokens.clear()
    method = ProposerMethod("reader", f"{__name__}:open_reader", "reads", needs_hidden_states=True)
    monkeypatch.setitem(registry.METHODS, "reader", method)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("target") / "llama", seed=0)


def watched(engine: Engine, requests: list[HiddenRequest | None]) -> Engine:
    forward = engine.forward

    def watching(segments: list[Segment], hidden: HiddenRequest | None = None) -> ModelOutput:
        requests.append(hidden)
        return forward(segments, hidden)

    engine.forward = watching  # type: ignore[method-assign]
    return engine


CASES: dict[str, dict[str, Any]] = {
    "in one piece": {},
    "chunked prefill": {"prefill_tokens": 16, "step_tokens": 24},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
async def test_rows_are_those_of_the_committed_text(settings: dict[str, Any], folder: Path) -> None:
    prompts = [[3 + (at * number) % 190 for at in range(70)] for number in (1, 7)]
    engine = open_engine(str(folder), "float32", 4096)
    options: dict[str, Any] = {"local_drafters": ("reader",), "always_speculate": True, "model": str(folder)}
    accepted = 0
    async with verifier(engine, **options, **settings) as server, gateway(server.address) as client:
        for _ in range(2):  # the second time the prompts' blocks are shared, and their texts are known
            sessions = await client.open_at_once(prompts, tokens=TOKENS, drafters=["verifier:reader"])
            async with asyncio.timeout(60):
                await asyncio.gather(*(session.done.wait() for session in sessions))
            accepted += sum(session.accepted for session in sessions)
            assert not any(event.HasField("failure") for session in sessions for event in session.events)
        assert server.executor.hidden_feed is not None and not server.executor.hidden_feed._of_session
    assert accepted > 0 and len(READER.rows) == 4
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for handle, chunks in READER.rows.items():
        tokens = READER.tokens[handle]
        with torch.inference_mode():
            states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        for before, after in pairwise(chunks):
            assert after.first == before.end, "a row is missing or came twice"
        assert chunks[0].first % 32 == 0 and chunks[0].first < 70
        for rows in chunks:
            end = min(rows.end, len(tokens))
            for number, of_layer in ((-1, rows.states.last), (1, rows.states.layers[1])):
                expected = states[number][0, rows.first : end]
                assert torch.allclose(of_layer[: end - rows.first], expected, atol=1e-4)
    shared = {chunks[0].first for chunks in READER.rows.values()} - {0}
    assert shared == {64}, "blocks found in the prefix cache have no rows"


async def test_hidden_states_are_asked_for_only_for_sessions_that_read_them(folder: Path) -> None:
    requests: list[HiddenRequest | None] = []
    engine = watched(open_engine(str(folder), "float32", 4096), requests)
    async with (
        verifier(engine, local_drafters=("reader", "ngram"), model=str(folder)) as server,
        gateway(server.address) as client,
    ):
        assert requests.pop() == HiddenRequest((1,)), "the check before the first step"
        await client.decode([5, 6, 7], tokens=8, drafters=["verifier:ngram"])
        assert set(requests) == {None} or not requests
        requests.clear()
        await client.decode([5, 6, 7], tokens=8, drafters=["verifier:reader"])
        assert set(requests) == {HiddenRequest((1,))}


async def test_a_shadow_has_no_hidden_states_and_the_session_goes_on(folder: Path) -> None:
    async with (
        verifier(open_engine(str(folder), "float32", 4096), local_drafters=("reader",), model=str(folder)) as server,
        gateway(server.address) as client,
    ):
        plain = await client.decode([5, 6, 7], tokens=8)
        command = opening([5, 6, 7], tokens=8, session_id="shadowed")
        command.drafters.append(verifier_pb2.DrafterAddress(address="verifier:reader", name="r", shadow=True))
        number = 900
        client.sessions[number] = shadowed = type(plain)()
        await client.send(verifier_pb2.DecodeCommand(session=number, epoch=1, open=command))
        async with asyncio.timeout(60):
            await shadowed.done.wait()
    assert shadowed.token_ids == plain.token_ids and not READER.rows


async def test_a_target_without_hidden_states_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FailedPrecondition, match="emulated model has no hidden states"):
        async with verifier(open_engine("emulated:"), local_drafters=("reader",)):
            pass


async def test_a_rolled_back_session_reads_its_own_rows(folder: Path) -> None:
    """A rollback opens the session again on its shorter prefix: rows come from the first block that is not cached."""
    prompt = list(range(3, 73))
    async with (
        verifier(
            open_engine(str(folder), "float32", 4096),
            local_drafters=("reader",),
            model=str(folder),
            always_speculate=True,
        ) as server,
        gateway(server.address) as client,
    ):
        first = await client.decode(prompt, tokens=TOKENS, drafters=["verifier:reader"], session_id="s")
        again = await client.decode(
            prompt, tokens=TOKENS, drafters=["verifier:reader"], session_id="s", epoch=2, output=first.token_ids[:5],
            sampling=SamplingParams(temperature=0.0),
        )  # fmt: skip
    assert again.token_ids == first.token_ids[5:]
    assert sorted(chunks[0].first for chunks in READER.rows.values()) == [0, 64]


def test_rows_that_are_computed_again_after_a_preemption_come_once() -> None:
    session = Double(_probe_session(), "s")
    feed = HiddenFeed(open_engine("emulated:"))
    every, last = feed.subscribe(session, HiddenNeed(every_row=True)), feed.subscribe(session, HiddenNeed())
    states = HiddenStates(torch.arange(12.0)[:, None], {})
    steps = (0, [0, 1], False), (2, [2, 3, 6], True), (0, [7, 8, 9], False), (3, [9, 10, 11], True)
    for first, rows, complete in steps:
        feed.deliver([ComputedRows(session, first, rows, complete)], states)
    assert [(rows.first, rows.states.last[:, 0].tolist()) for rows in every.take()] == [
        (0, [0.0, 1.0]),
        (2, [2.0, 3.0, 6.0]),
        (5, [11.0]),
    ]
    assert [(rows.first, rows.states.last[:, 0].tolist()) for rows in last.take()] == [(5, [11.0])]
    feed.unsubscribe(session, every)
    feed.unsubscribe(session, last)
    assert feed.request([session]) is None


def states(first: int, count: int) -> HiddenStates:
    """Rows that hold their token's number; 16 bytes each."""
    rows = torch.arange(first, first + count, dtype=torch.float32)[:, None].expand(count, 2)
    return HiddenStates(rows.clone(), {1: rows.clone()})


@pytest.mark.parametrize("every_row", [True, False])
def test_rows_that_no_method_takes_are_bounded_and_the_newest_stay(every_row: bool) -> None:
    """As while drafting pauses: nobody asks for them, and the target goes on."""
    feed = HiddenFeed(None, most_bytes=64 * 16)  # type: ignore[arg-type]
    busy, quiet = _probe_session(), _probe_session()
    long, short = (feed.subscribe(each, HiddenNeed((1,), every_row)) for each in (busy, quiet))
    feed.deliver([ComputedRows(quiet, 0, list(range(8)), complete=True)], states(0, 8))
    for token in range(1000):
        feed.deliver([ComputedRows(busy, token, [0], complete=True)], states(token, 1))
        assert long.waiting_bytes + short.waiting_bytes <= 64 * 16
    kept = long.take()
    tokens = [int(value) for rows in kept for value in rows.states.last[:, 0]]
    assert tokens == list(range(1000 - len(tokens), 1000)) and long.waiting_bytes == 0
    assert len(tokens) == (56 if every_row else 1)
    assert [rows.first for rows in short.take()] == [0 if every_row else 7], "the other session lost none"


def test_a_text_whose_rows_were_dropped_goes_on_behind_them() -> None:
    reader, text = PairReader(1000), list(range(100))

    def read(length: int, *parts: HiddenRows) -> NewPairs:
        rest: Any = {"prompt_length": 1, "max_length": 100, "sampling": SamplingParams()}
        _, new = reader.read([ProposerContext(handle=0, tokens=text, length=length, hidden=parts, **rest)])
        (pairs,) = new
        heads = torch.zeros(1, len(pairs.tokens), 2)
        pairs.cache.append(heads, heads)
        pairs.cache.length += len(pairs.tokens)
        return pairs

    read(11, HiddenRows(0, states(0, 10)))
    pairs = read(41, HiddenRows(20, states(20, 5)), HiddenRows(30, states(30, 10)))
    assert (pairs.cache.start, pairs.cache.end) == (30, 40)
    assert pairs.tokens == text[31:41] and pairs.states.last[:, 0].tolist() == list(range(30, 40))
