"""Drafters of every kind at once, through the whole running system: whatever they guess, no token changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.load_generator import LoadResult, run_load
from benchmarks.prompts import held_out, request
from slipstream.cli.commands import app
from slipstream.v1 import gateway_pb2
from tests.e2e.conftest import MOST_TRIES, SPECULATING, accepting, serving, tokens

TOKENS = 48
KINDS = ("model", "suffix", "prediction")


@pytest.fixture(scope="module")
def fleet() -> Iterator[str]:
    with serving("--dtype", "float32", *(f"--drafter={kind}" for kind in KINDS), **SPECULATING) as address:
        yield address


def requests(
    prompts: list[str], drafters: list[str], temperature: float = 0.0, predictions: list[str] | None = None
) -> list[gateway_pb2.GenerateRequest]:
    made = [
        request(prompt, TOKENS, speculate=True, temperature=temperature, seed=seed)
        for seed, prompt in enumerate(prompts)
    ]
    for number, each in enumerate(made):
        each.speculation.drafters.extend(drafters)
        if predictions is not None:
            each.prediction.text = predictions[number]
    return made


async def plain(server: str, prompts: list[str], temperature: float = 0.0) -> LoadResult:
    made = requests(prompts, [], temperature)
    for each in made:
        each.speculation.disabled = True
    return await run_load(server, made, 2)


@pytest.mark.parametrize("drafters", [[], ["suffix"], ["model", "suffix"]], ids=str)
async def test_several_drafters_feed_one_tree_and_change_no_token(fleet: str, drafters: list[str]) -> None:
    prompts = held_out(4, seed=9)
    await accepting(fleet, requests(prompts, drafters), tokens(await plain(fleet, prompts)))


async def test_a_repeated_request_has_more_accepted_tokens_than_the_first(fleet: str) -> None:
    prompts = held_out(3, seed=6)
    first = await run_load(fleet, requests(prompts, ["suffix"]), 1)
    assert tokens(first) == tokens(await plain(fleet, prompts))

    def guessed(load: LoadResult) -> bool:
        return load.total("accepted") > max(first.total("accepted"), 0.4 * TOKENS * len(prompts))

    await accepting(fleet, requests(prompts, ["suffix"]), tokens(first), guessed)


def taken(load: LoadResult) -> float:
    return load.total("accepted_prediction_tokens")


@pytest.mark.parametrize(("temperature", "drafters"), [(0.0, ["prediction"]), (0.9, ["model", "prediction"])], ids=str)
async def test_right_wrong_and_half_right_predictions_change_no_token(
    fleet: str, temperature: float, drafters: list[str]
) -> None:
    prompts = held_out(3, seed=2)
    expected = await plain(fleet, prompts, temperature)
    right = [completion.text for completion in expected.completions]
    half = [text[: len(text) // 3] + " zebra(17) " + text[len(text) // 2 :] for text in right]
    wrong = ["Completely other words, which no program says. " * 5] * len(right)

    async def decoded(predictions: list[str], least: float) -> float:
        made = requests(prompts, drafters, temperature, predictions)
        return taken(await accepting(fleet, made, tokens(expected), lambda load: taken(load) >= least))

    wrongly = await decoded(wrong, 0.0)
    most = await decoded(right, max(0.3 * TOKENS * len(prompts), 5 * wrongly + 1))
    await decoded(half, 0.2 * most)


async def test_the_command_sends_a_prediction_and_reports_how_many_of_its_tokens_were_accepted(
    fleet: str, tmp_path: Path
) -> None:
    async def report(*options: str) -> dict[str, Any]:
        asked = ["generate", held_out(1, seed=2)[0], "--server", fleet, "--max-tokens", str(TOKENS)]
        asked += ["--temperature", "0", "--ignore-eos", "--json", *options]
        done = await asyncio.to_thread(CliRunner().invoke, app, asked)  # it has an event loop of its own
        assert done.exit_code == 0, done.stderr
        return dict(json.loads(done.stdout))

    bare = await report("--no-speculation")
    assert (bare["hits"], bare["misses"], bare["accepted_prediction_tokens"]) == (0, {}, 0)
    (tmp_path / "expected").write_text(str(bare["text"]))
    for options in (["--prediction", str(bare["text"])], ["--prediction-file", str(tmp_path / "expected")]):
        for _ in range(MOST_TRIES):
            reported = await report(*options, "--drafter", "prediction", "--workload", "edit")
            assert reported["token_ids"] == bare["token_ids"]
            assert reported["accepted_prediction_tokens"] == reported["accepted"]
            if reported["hits"]:
                break
        assert reported["drafters"] == {
            "prediction": {"drafted": reported["drafted"], "accepted": reported["accepted"]}
        }
        assert reported["hits"] > 0 and reported["hits"] + sum(reported["misses"].values()) == reported["rounds"]


async def test_a_drafter_that_predicts_is_left_alone_without_a_prediction(fleet: str) -> None:
    load = await run_load(fleet, [request(held_out(1)[0], 16, speculate=True)], 1)
    assert "prediction" not in {share.name for share in load.completions[0].finished.statistics.drafters}
