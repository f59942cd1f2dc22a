"""vLLM's own speculators beside a target: texts are the embedded engine's without candidates, whatever is drafted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from slipstream.engine.factory import open_engine
from slipstream.errors import ResourceExhausted
from slipstream.proposers.eagle_checkpoint import save_head
from slipstream.speculation.sampling_params import SamplingParams
from tests.support.dflash_heads import BLOCK, config_of, random_tensors, save_dflash, save_dspark
from tests.support.eagle_heads import knowing_head, save_easy_target
from tests.support.fleet import drafter, gateway
from tests.support.loopback_addresses import ANY
from tests.support.mtp_targets import EASY, save_mtp_target
from tests.vllm.conftest import open_executor, settings
from tests.vllm.decoding import Case, decode, texts
from tests.vllm.speculated import CASES, DEPTH, TOKENS, Speculated, embedded, near, save_pair, setting, speculate
from verifier_svc.execution.vllm.messages import SampledStep
from verifier_svc.verifier import running

PROMPT = [(3 + at * 7) % 190 for at in range(40)]


class Served(NamedTuple):
    executor: Any
    plain: dict[Case, list[int]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With KV for all cases and little more."""
    target, head = save_pair(tmp_path_factory.mktemp("pair"))
    executor = open_executor(model=target, vllm_speculator=setting("eagle3", head), kv_tokens=1536)
    yield Served(executor, texts(decode(embedded(target), CASES)))
    executor.close()


def test_the_texts_are_those_without_it_and_take_fewer_steps(served: Served) -> None:
    """At temperatures above 0 it draws with the target's noise. With tokens of its own likelihood alone 0.08 of the
    candidates are accepted there."""
    decoded = speculate(served.executor, CASES, seed=3)
    assert texts(decoded) == served.plain
    for case, least in zip(CASES, (0.6, 0.3, 0.3), strict=False):
        assert decoded[case].accepted > least * decoded[case].drafted > least * TOKENS / 2, case.sampling
    assert served.executor.kv.blocks_free == served.executor.kv.blocks_total


def test_other_candidates_take_its_place_and_sequences_are_left_out(served: Served) -> None:
    """Chains of other sources, right and wrong ones, half of the time: what the head's KV has of them is the text's."""
    decoded = speculate(served.executor, CASES, near(served.plain, 0.7), seed=4, skipped=0.2)
    assert texts(decoded) == served.plain
    alone = speculate(served.executor, CASES, near(served.plain, 0.0), seed=4)
    assert texts(alone) == served.plain
    greedy = alone[CASES[0]]
    assert greedy.accepted > 0.25 * greedy.drafted  # the head's half of them, behind rejected ones


def test_rolled_back_and_shared_sequences_go_on_with_the_same_texts(served: Served) -> None:
    decoding = Speculated(served.executor)
    for case in CASES:
        decoding.open(case)
    for _ in range(6):
        decoding.step()
    for case, tokens in zip(CASES, (1, 2, 3, 4, 5, 6), strict=True):
        decoding.rollback(case, tokens)
    assert texts(decoding.run()) == served.plain
    second = Speculated(served.executor)
    for number, case in enumerate(CASES):
        second.open(case, served.plain[case][:20] if number % 2 else ())
    assert all(each.sequence is not None and each.sequence.length for each in list(second.live.values())[2:])
    assert texts(second.run()) == served.plain


def test_a_step_that_fails_is_run_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, decoding = served.executor.requests, Speculated(served.executor)
    for case in CASES:
        decoding.open(case)
    for _ in range(4):
        decoding.step()
    succeeded = requests.step_succeeded

    def failing(step: Any, sampled: SampledStep) -> None:
        monkeypatch.setattr(requests, "step_succeeded", succeeded)
        raise RuntimeError("the step failed")

    monkeypatch.setattr(requests, "step_succeeded", failing)
    with pytest.raises(RuntimeError, match="the step failed"):
        decoding.step()
    assert texts(decoding.run()) == served.plain


def test_without_kv_behind_a_step_one_token_is_drafted(served: Served) -> None:
    """All of the rest is another sequence's: a head that wrote there would draft from the wrong rows for that one."""
    executor = served.executor
    decoding = Speculated(executor)
    for case in CASES[:3]:
        decoding.open(case)
    for _ in range(6):
        decoding.step()
    assert set(decoding.drafted) == {DEPTH}
    hoard = executor.kv.begin_unshared(executor.kv.blocks_free * executor.kv.block_size)
    with pytest.raises(ResourceExhausted):
        for _ in range(executor.kv.block_size):
            decoding.step()
    executor.kv.close(hoard)
    assert set(decoding.drafted) == {1, DEPTH} and decoding.drafted[-3:] == [1, 1, 1]
    assert texts(decoding.run()) == {case: served.plain[case] for case in CASES[:3]}


def test_a_head_that_does_not_draft_still_reads(served: Served) -> None:
    """While it rests its KV goes on, so that it knows the text when it drafts again."""
    decoding = Speculated(served.executor)
    case = CASES[0]
    decoding.open(case)
    opened = decoding.live[case]
    served.executor.draft_feed.subscribe(opened, wanting=False)
    for _ in range(12):
        decoding.step()
    assert not decoding.drafted
    served.executor.draft_feed.subscribe(opened, wanting=True)
    decoded = decoding.run()[case]
    assert decoded.token_ids == served.plain[case] and decoded.accepted > 0.6 * decoded.drafted > 0


@pytest.mark.parametrize("method", ["eagle", "mtp", "dflash", "dspark"])
def test_texts_with_other_methods(method: str, tmp_path: Path) -> None:
    """The EAGLE 1 head and the MTP layer are made for their target and often right; the block drafters are random."""
    if method == "mtp":
        target, plain = save_mtp_target(tmp_path)
        speculator = setting("mtp")
    else:
        target = plain = str(save_easy_target(tmp_path / "target", **EASY))
        speculator = block_or_eagle(method, target, tmp_path / "head")
    expected = texts(decode(embedded(plain), CASES))
    executor = open_executor(model=target, vllm_speculator=speculator, kv_tokens=1536)
    try:
        decoded = speculate(executor, CASES, seed=3, skipped=0.2)
        assert texts(decoded) == expected
        drafted, accepted = (sum(getattr(each, name) for each in decoded.values()) for name in ("drafted", "accepted"))
        assert drafted > TOKENS and accepted > (0.5 if method in ("eagle", "mtp") else 0.0) * drafted, accepted
    finally:
        executor.close()


def block_or_eagle(method: str, target: str, head: Path) -> str:
    if method == "eagle":
        save_head(knowing_head(target, ()), head, target)
        return setting("eagle", str(head))
    saved = save_dspark(head) if method == "dspark" else save_dflash(head, random_tensors(), config_of())
    return setting(method, saved, BLOCK - 1)


async def test_a_head_is_merged_with_lookups_and_drafters(tmp_path: Path) -> None:
    """One budget of candidates: what is accepted of all together is at least what is of each alone."""
    target, head = save_pair(tmp_path)
    config = settings(
        model=target, vllm_speculator=setting("eagle3", head), kv_tokens=4096, local_drafters=("suffix",),
        always_speculate=True, listen=ANY, measure_s=0.0, grace_s=0.0, max_draft_tokens=6,
    )  # fmt: skip
    drafters = {"head": "verifier:speculator", "lookup": "verifier:suffix"}
    async with drafter(open_engine(target, "float32", 4096)) as address, running(config) as server:
        drafters["remote"] = address
        async with gateway(server.address) as client:
            accepted = {}
            for sampling in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=7)):
                plain = await client.decode(PROMPT, tokens=TOKENS, sampling=sampling)
                for names in ((), ("head",), ("lookup",), ("head", "lookup"), ("head", "lookup", "remote")):
                    given = [drafters[name] for name in names]
                    decoded = await client.decode(
                        PROMPT, tokens=TOKENS, sampling=sampling, drafters=given, details=True
                    )
                    assert decoded.token_ids == plain.token_ids, names
                    assert not any(event.HasField("failure") for event in decoded.events), names
                    accepted[names, sampling.greedy] = TOKENS / len(decoded.rounds)
    for greedy in (True, False):
        alone = [accepted[(name,), greedy] for name in ("head", "lookup")]
        assert accepted[("head",), greedy] > 2.0, accepted
        assert accepted[("head", "lookup"), greedy] >= 0.98 * max(alone), accepted
        assert accepted[("head", "lookup", "remote"), greedy] >= 0.98 * max(alone), accepted
