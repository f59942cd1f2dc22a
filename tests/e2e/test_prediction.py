"""Through the whole running system: a prediction changes no token, and a right one is most of the text."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.prompts import held_out, request
from slipstream.load import Load, run_load
from tests.e2e.conftest import ROOT, serving

TOKENS = 48
DRAFTERS = ([], ["prediction"], ["model", "prediction"])


@pytest.fixture(scope="module")
def fleet() -> Iterator[str]:
    with serving("--dtype", "float32", "--drafter=model", "--drafter=prediction") as address:
        yield address


async def decoded(server: str, predictions: list[str], temperature: float, drafters: list[str]) -> Load:
    requests = [
        request(prompt, TOKENS, speculate=True, temperature=temperature, seed=seed)
        for seed, prompt in enumerate(held_out(len(predictions), seed=2))
    ]
    for one, prediction in zip(requests, predictions, strict=True):
        one.prediction.text = prediction
        one.speculation.drafters.extend(drafters)
    return await run_load(server, requests, 2)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_right_wrong_and_half_right_predictions_change_no_token(fleet: str, temperature: float) -> None:
    prompts = held_out(3, seed=2)
    plain = [
        request(prompt, TOKENS, speculate=False, temperature=temperature, seed=seed)
        for seed, prompt in enumerate(prompts)
    ]
    texts = (await run_load(fleet, plain, 2)).completions
    right = [completion.text for completion in texts]
    half = [text[: len(text) // 3] + " zebra(17) " + text[len(text) // 2 :] for text in right]
    wrong = ["Completely other words, which no program says. " * 5] * len(right)
    accepted = {}
    for drafters in DRAFTERS:
        for name, predictions in (("right", right), ("half", half), ("wrong", wrong)):
            load = await decoded(fleet, predictions, temperature, drafters)
            assert [c.token_ids for c in load.completions] == [c.token_ids for c in texts], (name, drafters)
            accepted[name, *drafters] = load.total("accepted_prediction_tokens")
    for drafters in DRAFTERS:
        right_ones, half_ones, wrong_ones = (accepted[name, *drafters] for name in ("right", "half", "wrong"))
        assert wrong_ones < 0.2 * right_ones < half_ones
    assert accepted["right", "prediction"] > 0.5 * TOKENS * len(texts)


def test_the_command_takes_a_prediction_and_tells_what_became_of_it(fleet: str, tmp_path: Path) -> None:
    def report(*options: str) -> dict[str, object]:
        command = [sys.executable, "-m", "slipstream", "generate", held_out(1, seed=2)[0], "--server", fleet]
        command += ["--max-tokens", str(TOKENS), "--temperature", "0", "--ignore-eos", "--json", *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return dict(json.loads(done.stdout))

    plain = report("--no-speculation")
    assert (plain["hits"], plain["misses"], plain["accepted_prediction_tokens"]) == (0, {}, 0)
    (tmp_path / "expected").write_text(str(plain["text"]))
    for options in (["--prediction", str(plain["text"])], ["--prediction-file", str(tmp_path / "expected")]):
        told = report(*options, "--drafter", "prediction", "--workload", "edit")
        assert told["token_ids"] == plain["token_ids"]
        assert told["accepted_prediction_tokens"] == told["accepted"]
        assert told["drafters"] == {"prediction": {"drafted": told["drafted"], "accepted": told["accepted"]}}
        hits, misses = told["hits"], told["misses"]
        assert isinstance(hits, int) and isinstance(misses, dict)
        assert hits > 0 and hits + sum(misses.values()) == told["rounds"]


async def test_a_drafter_that_predicts_is_left_alone_without_a_prediction(fleet: str) -> None:
    load = await run_load(fleet, [request(held_out(1)[0], 16, speculate=True)], 1)
    assert {share.name for share in load.completions[0].finished.statistics.drafters} <= {"model"}
