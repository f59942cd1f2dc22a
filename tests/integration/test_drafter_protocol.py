"""The drafter over real gRPC, spoken to as a verifier does, rightly and wrongly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from slipstream.engine.factory import open_engine
from slipstream.rpc import proto_conversion
from slipstream.rpc.channel import channel
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.frame import Frame
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.v1 import drafter_pb2, drafter_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from tests.support.fleet import drafter, emulated_text, until

PROMPT = [7, 8, 9]
CODE = {code.value[0]: code for code in grpc.StatusCode}


class Speaker:
    """One Draft stream, spoken by hand; keeps what came, by session."""

    def __init__(self, line: grpc.aio.Channel) -> None:
        self._call = drafter_pb2_grpc.DrafterServiceStub(line).Draft()
        self.frames: dict[int, list[types_pb2.Candidates]] = {}
        self.refusals: list[drafter_pb2.DraftRefusal] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for response in self._call:
            for candidates in response.candidates:
                self.frames.setdefault(candidates.session, []).append(candidates)
            self.refusals.extend(response.refusals)

    async def send(self, number: int, epoch: int = 1, **command: Any) -> None:
        item = drafter_pb2.DraftCommand(session=number, epoch=epoch, **command)
        await self._call.write(drafter_pb2.DraftRequest(commands=[item]))

    async def open(self, number: int, prompt: list[int] = PROMPT, epoch: int = 1, **changes: Any) -> None:
        await self.send(number, epoch, open=request(prompt, **changes))

    async def commit(self, number: int, base: int, tokens: Iterable[int], epoch: int = 1) -> None:
        await self.send(number, epoch, commit=drafter_pb2.DraftCommit(base_length=base, token_ids=tokens))

    def tokens(self, number: int) -> list[int]:
        return tokens(self.frames.get(number, []))

    def texts(self, number: int, committed: list[int]) -> list[list[int]]:
        """The text up to each candidate of the newest tree, which stands on some of the `committed` tokens."""
        frames = self.frames.get(number, [])
        newest = [frame for frame in frames if frame.generation == frames[-1].generation]
        texts = {0: committed[: frames[-1].base_length]} if frames else {}
        for frame in newest:
            for node, token in enumerate(frame.token_ids, frame.first_node):
                parent = frame.parents[node - frame.first_node] if frame.parents else node - 1
                texts[node] = [*texts[parent], token]
        return list(texts.values())

    async def refused(self, number: int) -> types_pb2.Failure:
        await until(lambda: any(refusal.session == number for refusal in self.refusals))
        (refusal,) = (refusal for refusal in self.refusals if refusal.session == number)
        return refusal.failure

    async def settled(self) -> None:
        """All commands so far were applied, and every session drafted what it may: a new one is served last."""
        await self.send(999, close=drafter_pb2.DraftClose())
        await self.open(998, [1, 2], max_nodes=40)
        await until(lambda: len(self.tokens(998)) >= 32)
        await self.send(998, close=drafter_pb2.DraftClose())
        self.frames.pop(998)

    async def close(self) -> None:
        self._call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


def tokens(frames: list[types_pb2.Candidates]) -> list[int]:
    return [token for frame in frames for token in frame.token_ids]


def numbers(frames: list[types_pb2.Candidates]) -> list[int]:
    """The nodes' numbers: a frame may hold several levels of a tree."""
    return [frame.first_node + index for frame in frames for index in range(len(frame.token_ids))]


def request(prompt: list[int], **changes: Any) -> drafter_pb2.DraftOpen:
    policy = drafter_pb2.DraftPolicy(max_nodes=changes.pop("max_nodes", 8))
    fields: dict[str, Any] = {
        "key": types_pb2.SessionKey(id="s", epoch=1),
        "prefix": types_pb2.Prefix(token_ids=prompt, prompt_length=len(prompt)),
        "sampling": proto_conversion.sampling_to_proto(SamplingParams(temperature=0.0)),
        "target": proto_conversion.model_to_proto(open_engine("emulated:").model),
        "policy": policy,
        "max_length": 4000,
    }
    return drafter_pb2.DraftOpen(**fields | changes)


@asynccontextmanager
async def speaking(kv_tokens: int = 65_536, **options: Any) -> AsyncIterator[Speaker]:
    async with drafter(open_engine("emulated:", kv_tokens=kv_tokens), **options) as address, channel(address) as line:
        speaker = Speaker(line)
        try:
            yield speaker
        finally:
            await speaker.close()


@pytest.fixture
async def speaker() -> AsyncIterator[Speaker]:
    async with speaking() as speaker:
        yield speaker


async def test_the_chain_never_exceeds_what_was_asked_for(speaker: Speaker) -> None:
    await speaker.open(1, max_nodes=8)
    await speaker.settled()
    assert speaker.tokens(1) == emulated_text(PROMPT, 8)
    await speaker.commit(1, 3, emulated_text(PROMPT, 3))
    await speaker.settled()
    assert speaker.tokens(1) == emulated_text(PROMPT, 11)
    assert numbers(speaker.frames[1]) == list(range(1, 12))


async def test_the_drafters_own_bound_is_the_lower_one() -> None:
    async with speaking(max_nodes=4) as speaker:
        await speaker.open(1, max_nodes=1000)
        await until(lambda: len(speaker.tokens(1)) == 4)
        await speaker.commit(1, 3, emulated_text(PROMPT, 1))
        await until(lambda: len(speaker.tokens(1)) == 5)


async def test_policy_zero_pauses_and_a_higher_one_resumes(speaker: Speaker) -> None:
    await speaker.open(1, max_nodes=0)
    await speaker.settled()
    assert speaker.tokens(1) == []
    await speaker.send(1, policy=drafter_pb2.DraftPolicy(max_nodes=3))
    await until(lambda: speaker.tokens(1) == emulated_text(PROMPT, 3))
    await speaker.send(1, policy=drafter_pb2.DraftPolicy(max_nodes=0))
    await speaker.commit(1, 3, emulated_text(PROMPT, 3))
    await speaker.settled()
    assert len(speaker.tokens(1)) == 3


async def test_below_the_least_probability_only_the_best_candidate_for_the_next_token_is_sent(speaker: Speaker) -> None:
    """A step that it is wrong for costs what a step without candidates costs; what lies below it is not told."""
    policy = drafter_pb2.DraftPolicy(max_nodes=8, min_path_probability=1.1)
    await speaker.open(1, policy=policy)
    for told in range(1, 4):
        await speaker.settled()
        assert speaker.tokens(1) == emulated_text(PROMPT, told)
        await speaker.commit(1, 2 + told, emulated_text(PROMPT, told)[-1:])


async def test_a_policy_that_allows_more_is_answered_from_the_present_tree_without_a_pass(speaker: Speaker) -> None:
    """The tree may be grown as far as it goes: no pass has to come along for guesses that are worth telling now."""
    await speaker.open(1, max_length=5, policy=drafter_pb2.DraftPolicy(max_nodes=8, min_path_probability=1.1))
    await speaker.settled()
    assert speaker.tokens(1) == emulated_text(PROMPT, 1)
    await speaker.send(1, policy=drafter_pb2.DraftPolicy(max_nodes=8, min_path_probability=0.5))
    await speaker.settled()
    assert speaker.tokens(1) == emulated_text(PROMPT, 2)


async def test_a_long_prompt_does_not_hold_up_the_guesses_of_others(speaker: Speaker) -> None:
    for number in (1, 2):
        await speaker.open(number, [7] * 20_000, max_length=20_100)
    await speaker.open(3)
    await until(lambda: len(speaker.tokens(3)) == 8)
    assert speaker.tokens(1) == speaker.tokens(2) == []
    await until(lambda: len(speaker.tokens(1)) == len(speaker.tokens(2)) == 8)


async def test_a_session_drafts_no_further_than_its_length(speaker: Speaker) -> None:
    await speaker.open(1, max_length=8)
    await speaker.settled()
    assert len(speaker.tokens(1)) == 5


async def test_a_commit_outside_the_chain_starts_a_generation_on_it(speaker: Speaker) -> None:
    await speaker.open(1)
    await speaker.settled()
    before = len(speaker.frames[1])
    wrong = [(emulated_text(PROMPT, 1)[0] + 1) % 256]
    await speaker.commit(1, 3, wrong)
    await speaker.settled()
    after = speaker.frames[1][before:]
    assert {(candidates.generation, candidates.base_length) for candidates in after} == {(2, 4)}
    assert numbers(after) == list(range(1, 9))
    assert tokens(after) == emulated_text([*PROMPT, *wrong], 8)


async def test_a_number_in_use_is_refused_and_free_again_after_that(speaker: Speaker) -> None:
    await speaker.open(1)
    await speaker.settled()
    await speaker.open(1, [*PROMPT, 1, 2], epoch=2)
    assert CODE[(await speaker.refused(1)).code] is grpc.StatusCode.INVALID_ARGUMENT
    await speaker.commit(1, 3, [1, 2, 3])  # of a session that was refused: ignored
    before = len(speaker.frames[1])
    await speaker.open(1, [*PROMPT, 1, 2], epoch=3)
    await speaker.settled()
    after = speaker.frames[1][before:]
    assert {(candidates.epoch, candidates.base_length) for candidates in after} == {(3, 5)}
    assert tokens(after) == emulated_text([*PROMPT, 1, 2], 8)
    assert len(speaker.refusals) == 1


def grafted(candidates: types_pb2.Candidates) -> Frame:
    return Frame(
        candidates.base_length,
        candidates.generation,
        candidates.first_node,
        tuple(candidates.token_ids),
        proto_conversion.confidences_from_proto(candidates.confidences),
    )


async def test_frames_of_a_whole_session_fit_the_verifiers_tree(speaker: Speaker) -> None:
    tree, length = CandidateTree(PROMPT), len(PROMPT)
    arrived: list[types_pb2.Candidates] = speaker.frames.setdefault(1, [])
    await speaker.open(1)
    for step in range(12):
        await until(lambda: bool(arrived))
        for candidates in arrived:
            tree.graft(grafted(candidates))
        arrived.clear()
        path = [*tree.select_first_children(2).token_ids, (step * 37) % 256]
        tree.commit(path)
        await speaker.commit(1, length, path)
        length += len(path)
    assert tree.base_length == length
    assert speaker.refusals == []


# Refusals.


async def test_another_vocabulary_is_refused_and_both_are_named(speaker: Speaker) -> None:
    target = types_pb2.ModelInfo(name="other", vocabulary_fingerprint="f00d")
    await speaker.open(1, target=target)
    failure = await speaker.refused(1)
    assert CODE[failure.code] is grpc.StatusCode.FAILED_PRECONDITION
    assert "f00d" in failure.message and "emulated-256" in failure.message


@pytest.mark.parametrize("base", [0, 2, 4, 100])
async def test_a_gap_is_refused_and_the_number_is_free_again(speaker: Speaker, base: int) -> None:
    await speaker.open(1, max_nodes=2)
    await speaker.open(2, [5, 6], max_nodes=2)
    await speaker.commit(1, base, [1])
    assert CODE[(await speaker.refused(1)).code] is grpc.StatusCode.OUT_OF_RANGE
    await speaker.settled()
    speaker.frames.pop(1, None)
    await speaker.open(1, [3, 4], max_nodes=2)
    await until(lambda: speaker.tokens(1) == emulated_text([3, 4], 2))
    assert speaker.tokens(2) == emulated_text([5, 6], 2)


MALFORMED: dict[str, dict[str, Any]] = {
    "no prefix": {"prefix": None},
    "no prompt": {"prefix": types_pb2.Prefix(token_ids=[1])},
    "token out of range": {"prefix": types_pb2.Prefix(token_ids=[1, 256], prompt_length=1)},
    "no room": {"max_length": 3},
    "bias out of range": {"sampling": proto_conversion.sampling_to_proto(SamplingParams(logit_bias={256: 1.0}))},
    "allowed token out of range": {"sampling": types_pb2.SamplingOptions(top_p=1.0, allowed_token_ids=[256])},
    "no sampling": {"sampling": None},
}


@pytest.mark.parametrize("changes", MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_open_costs_itself_only(speaker: Speaker, changes: dict[str, Any]) -> None:
    await speaker.open(1)
    await speaker.open(2, **changes)
    assert CODE[(await speaker.refused(2)).code] is grpc.StatusCode.INVALID_ARGUMENT
    await speaker.settled()
    assert speaker.tokens(1) == emulated_text(PROMPT, 8)
    assert len(speaker.refusals) == 1


async def test_an_empty_command_is_refused(speaker: Speaker) -> None:
    await speaker.open(1)
    await speaker.send(1)
    assert CODE[(await speaker.refused(1)).code] is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_committed_token_out_of_range_is_refused(speaker: Speaker) -> None:
    await speaker.open(1)
    await speaker.commit(1, 3, [256])
    assert CODE[(await speaker.refused(1)).code] is grpc.StatusCode.INVALID_ARGUMENT


async def test_commands_for_unknown_sessions_are_ignored(speaker: Speaker) -> None:
    await speaker.commit(5, 0, [1])
    await speaker.send(5, policy=drafter_pb2.DraftPolicy(max_nodes=9))
    await speaker.send(5, close=drafter_pb2.DraftClose())
    await speaker.send(5)
    await speaker.settled()
    assert speaker.refusals == [] and 5 not in speaker.frames


async def test_a_session_without_room_in_the_kv_cache_waits_and_drafts_once_another_one_is_closed() -> None:
    first, second = [7] * 200, [8] * 200
    async with speaking(kv_tokens=320) as speaker:
        await speaker.open(1, first)
        await until(lambda: len(speaker.tokens(1)) == 8)
        await speaker.open(2, second)
        await speaker.commit(1, 200, emulated_text(first, 1))
        await until(lambda: len(speaker.tokens(1)) == 9)
        assert speaker.tokens(2) == []
        await speaker.send(1, close=drafter_pb2.DraftClose())
        await until(lambda: speaker.tokens(2) == emulated_text(second, 8))
        assert speaker.tokens(1) == emulated_text(first, 9) and speaker.refusals == []


async def test_a_huge_max_length_takes_no_room_from_others_before_it_is_used() -> None:
    async with speaking(kv_tokens=320) as speaker:
        for number in range(1, 6):
            await speaker.open(number, [number, 9], max_length=(1 << 20) - 1)
        await until(lambda: all(len(speaker.tokens(number)) == 8 for number in range(1, 6)))
        assert speaker.refusals == []


async def test_a_full_drafter_refuses_new_sessions_and_keeps_those_it_has() -> None:
    async with speaking(max_sessions=1) as speaker:
        await speaker.open(1, max_nodes=2)
        await speaker.open(2)
        assert CODE[(await speaker.refused(2)).code] is grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: len(speaker.tokens(1)) == 2)
        assert len(speaker.refusals) == 1


async def test_a_tenant_with_most_of_a_drafters_sessions_leaves_some_to_others() -> None:
    async with speaking(max_sessions=16) as speaker:
        for number in range(1, 16):
            await speaker.open(number, max_nodes=2, tenant="alice")
        assert CODE[(await speaker.refused(15)).code] is grpc.StatusCode.RESOURCE_EXHAUSTED
        await speaker.open(16, max_nodes=2, tenant="bob")
        await until(lambda: len(speaker.tokens(16)) == 2)
        assert len(speaker.refusals) == 1


async def test_a_prefix_beyond_the_draft_model_is_refused(speaker: Speaker) -> None:
    engine = open_engine("emulated:")
    length = engine.model.max_length
    prefix = types_pb2.Prefix(token_ids=[1] * length, prompt_length=1)
    await speaker.open(1, prefix=prefix, max_length=length + 10)
    assert CODE[(await speaker.refused(1)).code] is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_stream_that_ends_takes_its_sessions_along() -> None:
    async with drafter(open_engine("emulated:")) as address, channel(address) as line:
        speaker = Speaker(line)
        await speaker.open(1)
        watch = worker_pb2_grpc.WorkerServiceStub(line).Watch(worker_pb2.WatchRequest())
        async with asyncio.timeout(60):
            while (await watch.read()).sessions != 1:
                pass
            await speaker.close()
            while (await watch.read()).sessions:
                pass
        watch.cancel()


async def test_under_a_ratio_rule_each_token_comes_with_what_it_was_drawn_from(speaker: Speaker) -> None:
    sampling = proto_conversion.sampling_to_proto(SamplingParams(temperature=1.0, seed=2, acceptance="rejection"))
    await speaker.open(1, sampling=sampling, max_nodes=4)
    await until(lambda: len(speaker.tokens(1)) == 4)
    for candidates in speaker.frames[1]:
        for token, distribution in zip(candidates.token_ids, candidates.distributions, strict=True):
            assert token in distribution.token_ids
            assert min(distribution.weights) >= 1 and len(distribution.weights) <= 32


async def test_a_drafter_reports_its_model_and_method() -> None:
    async with drafter(open_engine("emulated:vocabulary=99")) as address, channel(address) as line:
        told = await worker_pb2_grpc.WorkerServiceStub(line).GetModel(worker_pb2.GetModelRequest())
    assert (told.role, told.method, told.model.vocabulary_size) == (worker_pb2.ROLE_DRAFTER, "model", 99)
