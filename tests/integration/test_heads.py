"""Heads and windows inside the verifier, good ones and bad ones: the text is the one without, whatever happens.

The EAGLE heads know the easy target they read, so that many of their candidates are accepted.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.engine.factory import open_engine
from slipstream.errors import FailedPrecondition
from slipstream.proposers.eagle_checkpoint import save_head
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.tokenizer.vocabulary import load_tokenizer, shipped_model
from tests.integration.test_ratio_rules import PROMPT as SHORT
from tests.integration.test_ratio_rules import distributions
from tests.support.checkpoints import save_checkpoint
from tests.support.draft_bias import MOST_DEVIATIONS, Leaning, ranks, uniformity
from tests.support.eagle_heads import LAYERS, config_of, knowing_head, random_head, save_easy_target
from tests.support.fleet import Decoded, Gateway, gateway, until, verifier
from tests.support.heads import random_heads, save_heads

TOKENS = 48
PROMPTS = [[3 + (at * number) % 190 for at in range(70)] for number in (1, 7)]
SAMPLINGS = {"greedy": SamplingParams(temperature=0.0), "sampled": SamplingParams(temperature=0.8, seed=11)}
KINDS = "eagle-1", "eagle-3", "medusa", "lookahead"
DRAWING = "eagle-3", "medusa", "lookahead"
"""Kinds whose draws the short suite judges: level by level, all at once, and none."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_easy_target(tmp_path_factory.mktemp("target") / "llama")


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Entries of `local_drafters`."""
    place = tmp_path_factory.mktemp("heads")
    for name, layers in (("eagle-1", ()), ("eagle-3", LAYERS)):
        save_head(knowing_head(target, layers), place / name, str(target), speculators=name == "eagle-3")
    medusa = save_heads(random_heads(target, scale=0.002), place / "medusa")
    others = {"medusa": f"medusa={medusa}", "lookahead": "lookahead"}
    return others | {name: f"eagle={place / name}" for name in ("eagle-1", "eagle-3")}


def address_of(entry: str) -> list[str]:
    return [f"verifier:{entry.partition('=')[0]}"]


def options_of(target: Path, entry: str, **settings: Any) -> dict[str, Any]:
    """Heads that were never trained are not tried."""
    floor = 0.05 if entry.startswith("eagle") else 0.0
    own = {"local_drafters": (entry,), "always_speculate": True, "model": str(target), "min_head_accuracy": floor}
    return own | settings


async def decode_all(client: Gateway, sampling: SamplingParams, *, short: bool, **options: Any) -> list[Decoded]:
    """`short`: prompts of one block, which are all admitted, and answers that have no room beside each other."""
    prompts, tokens = ([prompt[:20] for prompt in PROMPTS], 90) if short else (PROMPTS, TOKENS)
    sessions = await client.open_at_once(prompts, tokens=tokens, sampling=sampling, **options)
    async with asyncio.timeout(120):
        await asyncio.gather(*(session.done.wait() for session in sessions))
    assert not any(event.HasField("failure") for session in sessions for event in session.events)
    return sessions


CASES: dict[str, dict[str, Any]] = {
    "in one piece": {},
    "chunked prefill": {"prefill_tokens": 16, "step_tokens": 24},
    "preemption": {"kv_tokens": 160},
}
SHORT_CASE = {
    "eagle-1": "in one piece",
    "medusa": "preemption",
    "lookahead": "chunked prefill",
}
"""Of each kind in the short suite. EAGLE 3, which keeps rows of several layers and of its own, has all."""


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(kind, case, marks=() if case == SHORT_CASE.get(kind, case) else pytest.mark.slow)
        for kind in KINDS
        for case in CASES
    ],
)
async def test_the_text_is_the_one_without_heads(kind: str, case: str, target: Path, heads: dict[str, str]) -> None:
    """Twice each, so that the second time the prompts' blocks are shared. Greedy texts in one piece alone."""
    settings = CASES[case]
    given = dict(settings)
    short = "kv_tokens" in given
    engine = open_engine(str(target), "float32", given.pop("kv_tokens", 4096))
    entry = heads[kind]
    async with verifier(engine, **options_of(target, entry, **given)) as server, gateway(server.address) as client:
        for sampling in [SAMPLINGS["sampled"]] if settings else SAMPLINGS.values():
            plain = await decode_all(client, sampling, short=short)
            for _ in range(2):
                drafted = await decode_all(client, sampling, short=short, drafters=address_of(entry))
                assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
                assert all(each.drafted > 0 for each in drafted)
                if kind.startswith("eagle"):
                    rounds = sum(len(each.rounds) for each in drafted)
                    assert sum(each.accepted for each in drafted) > 0.1 * rounds, "a good head is hardly accepted"
        assert short == (server.scheduler.kv_admission.preemptions > 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_rolled_back_session_goes_on_with_the_same_text(kind: str, target: Path, heads: dict[str, str]) -> None:
    entry = heads[kind]
    options: dict[str, Any] = {"tokens": TOKENS, "sampling": SAMPLINGS["sampled"], "drafters": address_of(entry)}
    engine = open_engine(str(target), "float32", 4096)
    async with verifier(engine, **options_of(target, entry)) as server, gateway(server.address) as client:
        first = await client.decode(PROMPTS[0], session_id="s", **options)
        again = await client.decode(PROMPTS[0], session_id="s", epoch=2, output=first.token_ids[:5], **options)
    assert again.token_ids == first.token_ids[5:] and again.drafted > 0


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in DRAWING else pytest.mark.slow) for kind in KINDS]
)
async def test_drawn_tokens_follow_the_target_distribution(kind: str, tmp_path: Path) -> None:
    """The rule `rejection`, with heads that were never trained: what they draw must not show. Lookahead draws nothing:
    the coupled rule."""
    shape = {"vocab_size": 4, "hidden_size": 16, "num_hidden_layers": 3, "initializer_range": 0.3}
    rule = "coupled" if kind == "lookahead" else "rejection"
    small = save_checkpoint("llama", tmp_path / "target", seed=0, **shape)
    if kind == "medusa":
        entry = f"medusa={save_heads(random_heads(small, scale=0.3), tmp_path / 'heads')}"
    elif kind == "lookahead":
        entry = kind
    else:
        layers = LAYERS if kind == "eagle-3" else ()
        save_head(random_head(small, config_of(small, layers=layers), scale=0.3), tmp_path / "heads", str(small))
        entry = f"eagle={tmp_path / 'heads'}"
    texts: list[list[int]] = []
    drafted = 0
    engine = open_engine(str(small), "float32")
    options = options_of(small, entry, max_wait_s=1.0, min_head_accuracy=0.0)
    async with verifier(engine, **options) as server, gateway(server.address) as client:
        for start in range(0, 300, 20):
            runs = [
                client.decode(
                    SHORT, tokens=30, sampling=SamplingParams(seed=seed, acceptance=rule),
                    drafters=address_of(entry), trusted=True,
                )
                for seed in range(start, start + 20)
            ]  # fmt: skip
            for decoded in await asyncio.gather(*runs):
                assert not any(event.HasField("failure") for event in decoded.events)
                texts.append(decoded.token_ids)
                drafted += decoded.drafted
            if drafted > 3000:
                break
    assert drafted > 3000
    p, tokens = distributions(small, texts), [token for text in texts for token in text]
    leaning = Leaning()
    leaning.add(p, np.full_like(p, 0.25), tokens)
    assert uniformity(ranks(p, tokens, np.random.default_rng(1))) > 1e-4
    assert abs(leaning.deviations) < MOST_DEVIATIONS


async def test_the_lossy_rule_accepts_trees_of_several_untrusted_drafters(target: Path, heads: dict[str, str]) -> None:
    """It needs no distributions, as `rejection` does."""
    entries = heads["eagle-3"], heads["medusa"], "lookahead"
    options = options_of(target, entries[0], local_drafters=entries, min_head_accuracy=0.0)
    lossy = SamplingParams(temperature=1.0, seed=11, acceptance="typical")
    names = [name for entry in entries for name in address_of(entry)]
    engine = open_engine(str(target), "float32", 4096)
    async with verifier(engine, **options) as server, gateway(server.address) as client:
        decoded = await decode_all(client, lossy, short=False, drafters=names)
    assert all(len(each.token_ids) == TOKENS for each in decoded)
    assert sum(each.accepted for each in decoded) > 0.1 * sum(len(each.rounds) for each in decoded)


@pytest.mark.parametrize(("kind", "least"), [("eagle", 0.8), ("medusa", 0.1)])
async def test_the_shipped_heads_draft_for_the_shipped_target_and_change_no_token(kind: str, least: float) -> None:
    """They pass the trial at the start; the text is the one without them, in fewer rounds."""
    target = shipped_model("target")
    entry = f"{kind}={shipped_model(kind)}"
    prompt = list(load_tokenizer(target).encode("def read_config(path):\n    with open(path) as file:").ids)
    # On a busy machine a proposal takes longer than the default wait: then no step would have it.
    options = options_of(Path(target), entry, min_head_accuracy=0.3, max_wait_s=10.0)
    async with verifier(open_engine(target, "float32", 1024), **options) as server, gateway(server.address) as client:
        for sampling in SAMPLINGS.values():
            plain = await client.decode(prompt, tokens=TOKENS, sampling=sampling)
            drafted = await client.decode(prompt, tokens=TOKENS, sampling=sampling, drafters=address_of(entry))
            assert drafted.token_ids == plain.token_ids
            assert drafted.accepted > least * len(drafted.rounds), "the heads hardly know their target"


async def test_the_second_session_of_a_prompt_takes_the_drafts_rows_of_the_first(
    target: Path, heads: dict[str, str]
) -> None:
    engine = open_engine(str(target), "float32", 4096)
    entry = heads["eagle-3"]
    async with verifier(engine, **options_of(target, entry)) as server, gateway(server.address) as client:
        for _ in range(2):
            await client.decode(PROMPTS[0], tokens=8, drafters=address_of(entry))
        proposer: Any = next(iter(server.service.sources._local.values()))._drafting._proposer  # type: ignore[attr-defined]
        await until(lambda: len(proposer._reader.caches._ended) == 2)
        assert {each.start for each in proposer._reader.caches._ended.values()} == {0}


async def test_heads_without_layers_to_name_are_tried_too(target: Path, heads: dict[str, str]) -> None:
    engine = open_engine(str(target), "float32", 4096)
    with pytest.raises(FailedPrecondition, match=r"drafter medusa finds \d+%"):
        async with verifier(engine, **options_of(target, heads["medusa"], min_head_accuracy=0.3)):
            pass


async def test_a_head_that_follows_the_target_badly_ends_the_start(target: Path, tmp_path: Path) -> None:
    save_head(random_head(target, config_of(target, layers=LAYERS)), tmp_path, str(target))
    engine = open_engine(str(target), "float32", 4096)
    with pytest.raises(FailedPrecondition, match=r"finds \d% .* layers \[0, 1, 2\].* VERIFIER_MIN_HEAD_ACCURACY"):
        async with verifier(engine, **options_of(target, f"eagle={tmp_path}")):
            pass
    async with verifier(engine, **options_of(target, f"eagle={tmp_path}", min_head_accuracy=0.0)):
        pass
