"""`slipstream doctor --target`: what it measures is what serving would accept, and what is wrong is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.cli.pair_check import (
    DEPTH,
    PROMPTS,
    PairCheck,
    Round,
    _Calls,
    _check_models,
    _summarise,
    _warn,
    run_rounds,
    write_text,
)
from slipstream.engine.factory import open_engine
from slipstream.engine.model_info import ModelInfo
from slipstream.proposers.base import ProposerSettings, open_proposer
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.tokenizer.vocabulary import shipped_model
from tests.eagle_heads import LAYERS, knowing_head, save_easy_target
from tests.fleet import gateway, verifier

TARGET, DRAFT = shipped_model("target"), shipped_model("draft")


def test_the_draft_that_is_the_target_is_always_right() -> None:
    engine, sampling = open_engine(TARGET, "float32", 2048), SamplingParams(temperature=0.0)
    opened = open_proposer("model", ProposerSettings(model=TARGET, target=TARGET, dtype="float32", kv_tokens=2048))
    text, states = write_text(engine, list(range(5, 40)), 30, sampling, None)
    assert states is None and engine.blocks_free == engine.blocks_total
    calls = _Calls()
    rounds = list(run_rounds(opened, text, 35, None, sampling, "all", calls))
    assert all(each.accepted == each.proposed > 0 for each in rounds)
    assert calls.rounds == len(rounds) and calls.count >= sum(each.proposed for each in rounds)
    assert sum(each.accepted for each in rounds) + len(rounds) >= len(text) - 35


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_it_accepts_what_serving_accepts(temperature: float) -> None:
    """Of prompt lookup, whose chains are one call's in both places."""
    prompt = [*range(5, 30), *range(5, 30), *range(5, 20)]
    sampling = SamplingParams(temperature=temperature, seed=3)
    engine = open_engine(TARGET, "float32", 4096)
    opened = open_proposer("ngram", ProposerSettings())
    text, _ = write_text(engine, prompt, 48, sampling, None)
    rounds = list(run_rounds(opened, text, len(prompt), None, sampling, "all", _Calls()))
    async with (
        verifier(engine, local_drafters=("ngram",), model=TARGET, always_speculate=True) as server,
        gateway(server.address) as client,
    ):
        served = await client.decode(
            prompt, tokens=48, sampling=sampling, drafters=["verifier:ngram"], max_draft_tokens=DEPTH
        )
    assert served.token_ids == text[len(prompt) :]
    assert abs(sum(each.accepted for each in rounds) - served.accepted) <= 0.2 * served.accepted + 4


def test_heads_read_the_hidden_states_of_the_text(tmp_path: Path) -> None:
    from slipstream.proposers.eagle_checkpoint import save_head

    target = save_easy_target(tmp_path / "target")
    save_head(knowing_head(target, LAYERS), tmp_path / "head", str(target))
    opened = open_proposer("eagle", ProposerSettings(model=str(tmp_path / "head"), target=str(target), dtype="float32"))
    engine, sampling = open_engine(str(target), "float32", 2048), SamplingParams(temperature=0.0)
    text, states = write_text(engine, list(range(3, 60)), 40, sampling, opened.hidden)
    assert states is not None and len(states.last) == len(text) - 1 and set(states.layers) == set(LAYERS)
    rounds = list(run_rounds(opened, text, 57, states, sampling, "all", _Calls()))
    assert sum(each.accepted for each in rounds) > 0.1 * len(rounds)


def rounds_of(context: int, workload: str, accepted: int, count: int = 10, temperature: float = 0.0) -> list[Round]:
    return [Round(context, workload, temperature, DEPTH, accepted)] * count


def test_figures_are_sorted_by_depth_slice_context_and_temperature() -> None:
    check = PairCheck("t", "d", "model")
    rounds = rounds_of(100, "code", 4) + rounds_of(3000, "prose", 1) + rounds_of(100, "code", 1, temperature=1.0)
    _summarise(check, rounds)
    assert check.by_depth == [1.0, 0.5, 1.0, 1.0, 0.0]
    assert check.by_slice == {"code": 5.0, "prose": 2.0}
    assert check.by_context == {"0-127": 5.0, "2048-8191": 2.0}
    assert check.by_temperature == {"0": 3.5, "1": 2.0} and check.rounds == 20


def test_each_danger_has_its_warning_and_none_comes_without() -> None:
    engine = open_engine("emulated:")
    calm = PairCheck("t", "d", "model", speed_up={2: 1.5})
    quiet = rounds_of(8000, "code", 4) + rounds_of(9000, "prose", 4) + rounds_of(9000, "prose", 4, temperature=1.0)
    _summarise(calm, quiet)
    engine.model = replace(engine.model, max_length=16384)
    _warn(calm, quiet, [64, 64], engine)
    assert [level for level, _ in calm.findings] == ["ok"]
    bad = PairCheck("t", "d", "model", speed_up={1: 0.9})
    rounds = rounds_of(100, "code", 4) + rounds_of(3000, "prose", 1) + rounds_of(100, "code", 1, temperature=1.0)
    _summarise(bad, rounds)
    _warn(bad, rounds, [3, 4], engine)
    said = " ".join(sentence for level, sentence in bad.findings if level == "warning")
    for danger in ("hardly pays", "temperature:", "short outputs:", "long context: acceptance decays", "domain shift:",
                   "long context: the prompts reach"):  # fmt: skip
        assert danger in said


def test_the_command_prints_one_screen_and_json(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": PROMPTS[0].prompt, "workload": "mine", "max_tokens": 12}))
    command = ["doctor", "--target", TARGET, "--drafter", "ngram", "--prompts", str(file), "--dtype", "float32"]
    run = CliRunner()
    shown = run.invoke(app, command)
    assert shown.exit_code == 0 and len(shown.output.splitlines()) <= 24
    for word in ("vocabulary", "chat template", "accepted by depth", "mine", "speed-up", "target weights 44.1 MB"):
        assert word in shown.output
    found = json.loads(run.invoke(app, [*command, "--json"]).output)
    assert found["by_slice"].keys() == {"mine"} and found["rounds"] > 0 and len(found["speed_up"]) == DEPTH


@pytest.mark.parametrize(
    ("theirs", "level", "says"),
    [("t", "ok", "nothing differs"), ("d", "warning", "another chat template"), ("", "warning", "no chat template")],
)
def test_the_templates_of_target_and_draft_are_compared(theirs: str, level: str, says: str) -> None:
    target: Any = SimpleNamespace(model=ModelInfo("target", "local-1", 8, "v", 64, "float32", 1, (0,), "t"))
    draft: Any = SimpleNamespace(model=replace(target.model, name="draft", chat_template=theirs))
    check = PairCheck("target", "", "model")
    _check_models(check, target, draft)
    [found] = [(how, text) for how, text in check.findings if text.startswith("chat template: ")]
    assert found[0] == level and says in found[1]


def test_another_vocabulary_and_a_method_that_cannot_be_tried_are_refused(tmp_path: Path) -> None:
    run = CliRunner()
    other = run.invoke(app, ["doctor", "--target", TARGET, "--draft", "emulated:vocabulary=99", "--dtype", "float32"])
    assert other.exit_code == 1 and "WRONG   vocabulary" in other.output
    lookahead = run.invoke(app, ["doctor", "--target", TARGET, "--drafter", "lookahead"])
    assert lookahead.exit_code == 1 and "slipstream bench" in lookahead.output
    missing = run.invoke(app, ["doctor", "--target", str(tmp_path / "none"), "--draft", DRAFT])
    assert missing.exit_code == 1
