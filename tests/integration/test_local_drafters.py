"""Drafters that run inside the verifier: the text is the one without them, and what they fail at costs no step."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from drafter_svc.config import DrafterConfig
from drafter_svc.drafter import running as drafter_running
from slipstream.engine.factory import open_engine
from slipstream.errors import FailedPrecondition, InvalidArgument
from slipstream.proposers.base import ROOT, Proposal, ProposedNode, ProposerContext
from slipstream.proposers.drafting.session import DraftSession
from slipstream.proposers.lookup import LookupProposer
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.tokenizer.vocabulary import load_tokenizer, shipped_model
from tests.support.fleet import Decoded, Gateway, emulated_text, gateway, until, verifier
from tests.support.heads import random_heads, save_heads
from verifier_svc.config import VerifierConfig
from verifier_svc.sources.local import LocalSource
from verifier_svc.verifier import running as verifier_running

NGRAM, MODEL, MEDUSA = "verifier:ngram", "verifier:model", "verifier:medusa"
CODE = """def area(width, height):
    return width * height


def volume(width, height, depth):
    return area(width, height) * depth


def area_of_all(shapes):
    total = 0
    for width, height in shapes:
        total = total + area(width, height)
    return total


def volume_of_all(shapes):
"""
SAMPLINGS = {"greedy": SamplingParams(temperature=0.0), "sampled": SamplingParams(temperature=0.8, seed=11)}
TOKENS = 64


@asynccontextmanager
async def shipped_verifier(*local: str, **settings: Any) -> AsyncIterator[Gateway]:
    fast = {"measure_s": 0.0, "grace_s": 0.0, "min_path_probability": 0.0, "always_speculate": True}
    config = VerifierConfig(
        model=shipped_model("target"),
        dtype="float32",
        listen="127.0.0.1:0",
        draft_dtype="float32",
        local_drafters=local,
        **(fast | settings),
    )
    async with verifier_running(config) as server, gateway(server.address) as client:
        yield client


def prompt() -> list[int]:
    return list(load_tokenizer(shipped_model("target")).encode(CODE).ids)


def failures(decoded: Decoded) -> list[str]:
    return [event.failure.reason for event in decoded.events if event.HasField("failure")]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
async def test_the_text_is_the_one_without_drafters(sampling: SamplingParams, tmp_path: Path) -> None:
    heads = save_heads(random_heads(shipped_model("target"), scale=0.002), tmp_path)
    local = "ngram", "suffix", f"model={shipped_model('draft')}", f"medusa={heads}"
    async with shipped_verifier(*local) as client:
        plain = await client.decode(prompt(), tokens=TOKENS, sampling=sampling)
        for drafters in ([NGRAM], ["verifier:suffix"], [MODEL], [NGRAM, MODEL]):
            decoded = await client.decode(prompt(), tokens=TOKENS, sampling=sampling, drafters=drafters)
            assert decoded.token_ids == plain.token_ids
            assert decoded.accepted > 0, drafters
            assert failures(decoded) == []
        for drafters in ([MEDUSA], [MEDUSA, NGRAM]):  # heads that were never trained guess badly, and as harmlessly
            decoded = await client.decode(prompt(), tokens=TOKENS, sampling=sampling, drafters=drafters)
            assert decoded.token_ids == plain.token_ids
            assert decoded.drafted > 0 and failures(decoded) == []
    assert plain.drafted == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_the_draft_model_draws_for_the_ratio_rule(temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3, acceptance="rejection")
    async with shipped_verifier("ngram", f"model={shipped_model('draft')}") as client:
        drawn = await client.decode(prompt(), tokens=TOKENS, sampling=sampling, drafters=[MODEL], trusted=True)
        looked_up = await client.decode(prompt(), tokens=TOKENS, sampling=sampling, drafters=[NGRAM], trusted=True)
    assert drawn.accepted > 0 and failures(drawn) == []
    assert looked_up.drafted == 0 and failures(looked_up) == ["NO_DISTRIBUTION"]
    assert len(looked_up.token_ids) == TOKENS


@pytest.mark.slow
async def test_a_lookup_inside_the_verifier_accepts_about_as_much_as_the_same_one_behind_grpc() -> None:
    config = DrafterConfig(method="ngram", listen="127.0.0.1:0", grace_s=0.0)
    async with drafter_running(config) as remote, shipped_verifier("ngram") as client:
        accepted: dict[str, int] = {}
        for address in (NGRAM, remote.address):
            accepted[address] = 0
            for temperature in (0.0, 0.8):
                sampling = SamplingParams(temperature=temperature, seed=5)
                decoded = await client.decode(prompt(), tokens=2 * TOKENS, sampling=sampling, drafters=[address])
                accepted[address] += decoded.accepted
    assert accepted[NGRAM] >= 0.8 * accepted[remote.address]


@pytest.mark.parametrize("drafter", [NGRAM, MODEL])
async def test_round_details_report_when_a_drafter_in_the_verifier_worked(drafter: str) -> None:
    async with shipped_verifier("ngram", f"model={shipped_model('draft')}") as client:
        decoded = await client.decode(prompt(), tokens=TOKENS, drafters=[drafter], details=True)
        untold = await client.decode(prompt(), tokens=TOKENS, drafters=[drafter])
    spans = [span for done in decoded.rounds for span in done.drafts]
    assert {span.drafter for span in spans} == {"model"}  # the name that `tests.support.fleet.opening` gives
    assert all(span.began_us >= span.ended_us and span.candidates > 0 for span in spans)
    assert sum(span.candidates for span in spans) >= decoded.accepted > 0
    assert not any(done.drafts for done in untold.rounds)


async def test_rounds_name_the_drafter_as_the_gateway_does() -> None:
    async with shipped_verifier("ngram") as client:
        decoded = await client.decode(prompt(), tokens=TOKENS, drafters=[NGRAM])
    shares = [share for done in decoded.rounds for share in done.drafters]
    assert {share.drafter for share in shares} == {"model"}  # the name that `tests.support.fleet.opening` gives
    assert sum(share.drafted for share in shares) == decoded.drafted
    assert sum(share.accepted for share in shares) == decoded.accepted


async def test_an_unknown_local_drafter_is_a_failure_of_the_drafter_and_not_of_the_session() -> None:
    async with verifier(open_engine("emulated:")) as server, gateway(server.address) as client:
        decoded = await client.decode([7, 8, 9], tokens=20, drafters=["verifier:none"])
    assert failures(decoded) == ["NO_DRAFTER"]
    assert decoded.token_ids == emulated_text([7, 8, 9], 20)


def guessing(tokens: list[int]) -> Any:
    """A proposer's method that proposes one token after another of these, by the committed length."""

    def propose(self: LookupProposer, contexts: list[ProposerContext]) -> list[Proposal]:
        if any(context.tokens[0] == 66 for context in contexts):
            raise ValueError("no such thing")
        return [
            Proposal([ProposedNode(ROOT, tokens[each.length % len(tokens)], -0.1)] * (ROOT in each.expand), each.length)
            for each in contexts
        ]

    return propose


async def test_a_local_drafter_that_raises_loses_its_session_and_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = [66, 8, 9], [7, 8, 9]
    monkeypatch.setattr(LookupProposer, "propose", guessing([*good, *emulated_text(good, 40)]))
    async with (
        verifier(open_engine("emulated:"), local_drafters=("ngram",)) as server,
        gateway(server.address) as client,
    ):
        sessions = await client.open_at_once([bad, good], tokens=40, drafters=[NGRAM])
        await until(lambda: all(session.done.is_set() for session in sessions))
    assert [failures(session) for session in sessions] == [["INTERNAL"], []]
    assert [session.token_ids for session in sessions] == [emulated_text(bad, 40), emulated_text(good, 40)]
    assert sessions[1].accepted == sessions[1].drafted > 0


async def test_a_local_drafter_that_proposes_no_token_loses_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LookupProposer, "propose", guessing([10**6]))
    async with (
        verifier(open_engine("emulated:"), local_drafters=("ngram",)) as server,
        gateway(server.address) as client,
    ):
        decoded = await client.decode([7, 8, 9], tokens=20, drafters=[NGRAM])
    assert failures(decoded) == ["PROTOCOL"] and decoded.drafted == 0
    assert decoded.token_ids == emulated_text([7, 8, 9], 20)


@pytest.mark.parametrize("nodes", [4, 16])
async def test_a_draft_model_expands_the_measured_number_of_nodes_in_a_pass(
    nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expanded, context_of = list[int](), DraftSession.context

    def context(self: DraftSession, nodes: Any, expand: Any, *rest: Any) -> ProposerContext:
        expanded.append(len(expand))
        return context_of(self, nodes, expand, *rest)

    monkeypatch.setattr("verifier_svc.sources.local_drafters.measured_expansion", lambda proposer: nodes)
    monkeypatch.setattr(DraftSession, "context", context)
    async with shipped_verifier(f"model={shipped_model('draft')}") as client:
        await client.decode(prompt(), tokens=TOKENS, max_draft_tokens=32, drafters=[MODEL])
    assert max(expanded) == nodes


async def test_an_ended_session_releases_its_state_in_local_drafters() -> None:
    async with verifier(open_engine("emulated:"), local_drafters=("ngram", "model=emulated:acceptance=0.8")) as server:
        async with gateway(server.address) as client:
            for _ in range(3):
                decoded = await client.decode([7, 8, 9] * 4, tokens=30, drafters=[NGRAM, MODEL])
                assert decoded.token_ids == emulated_text([7, 8, 9] * 4, 30)
        sources = [source for source in server.service.sources._local.values() if isinstance(source, LocalSource)]
        loops = [source._drafting for source in sources]
        await until(lambda: not any(source._sessions for source in sources))
        await until(lambda: not any(len(loop) or loop._closing or loop._pending for loop in loops))
        lookup = loops[0]._proposer
        assert isinstance(lookup, LookupProposer) and not lookup._readers


@pytest.mark.parametrize("entry", ["nothing", "model", "ngram=models/draft"])
def test_a_setting_that_names_no_method_is_refused(entry: str) -> None:
    with pytest.raises(InvalidArgument, match="VERIFIER_LOCAL_DRAFTERS"):
        VerifierConfig(model="m", local_drafters=(entry,))


async def test_a_draft_model_with_another_vocabulary_ends_the_start() -> None:
    with pytest.raises(FailedPrecondition, match="vocabulary"):
        async with verifier(open_engine("emulated:"), local_drafters=("model=emulated:vocabulary=99",)):
            pass
