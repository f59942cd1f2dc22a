"""`slipstream doctor --target`: what it measures is what serving would accept, and what is wrong is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from benchmarks.translation import permuted
from measurement.cli.doctor import NOT_WORTH_IT
from measurement.cli.pair_report import render
from measurement.load.workload import Asked
from measurement.pairs.check import PROMPTS, Calls, TargetText, check_pair, first_right, run_rounds, write_text
from measurement.pairs.figures import DEPTH, PairCheck, Round, summarise
from measurement.pairs.findings import check_models, decide, largest_draft, warn
from slipstream.cli.commands import app
from slipstream.engine.factory import open_engine
from slipstream.engine.model_info import ModelInfo
from slipstream.proposers.base import Proposal, ProposerSettings, open_proposer
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.tokenizer.vocabulary import shipped_model
from tests.support.checkpoints import save_checkpoint, save_tokenizer
from tests.support.eagle_heads import LAYERS, knowing_head, save_easy_target
from tests.support.fleet import gateway, verifier

TARGET, DRAFT = shipped_model("target"), shipped_model("draft")


def test_the_draft_that_is_the_target_is_always_right() -> None:
    engine, sampling = open_engine(TARGET, "float32", 2048), SamplingParams(temperature=0.0)
    opened = open_proposer("model", ProposerSettings(model=TARGET, target=TARGET, dtype="float32", kv_tokens=2048))
    text = write_text(engine, list(range(5, 40)), 30, sampling, None)
    assert text.states is None and engine.kv.blocks_free == engine.kv.blocks_total
    calls = Calls()
    rounds = list(run_rounds(opened, text, "all", calls))
    assert all(each.accepted == each.proposed > 0 for each in rounds)
    assert calls.rounds == len(rounds) and len(calls.seconds) >= sum(each.proposed for each in rounds)
    assert sum(each.accepted for each in rounds) + len(rounds) >= len(text.written)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_the_doctors_accepted_tokens_are_those_of_serving(temperature: float) -> None:
    """Of prompt lookup, whose chains are one call's in both places."""
    prompt = [*range(5, 30), *range(5, 30), *range(5, 20)]
    sampling = SamplingParams(temperature=temperature, seed=3)
    engine = open_engine(TARGET, "float32", 4096)
    opened = open_proposer("ngram", ProposerSettings())
    text = write_text(engine, prompt, 48, sampling, None)
    rounds = list(run_rounds(opened, text, "all", Calls()))
    async with (
        verifier(engine, local_drafters=("ngram",), model=TARGET, always_speculate=True) as server,
        gateway(server.address) as client,
    ):
        served = await client.decode(
            prompt, tokens=48, sampling=sampling, drafters=["verifier:ngram"], max_draft_tokens=DEPTH
        )
    assert served.token_ids == text.written
    assert abs(sum(each.accepted for each in rounds) - served.accepted) <= 0.2 * served.accepted + 4


def test_heads_read_the_hidden_states_of_the_text(tmp_path: Path) -> None:
    from slipstream.proposers.eagle_checkpoint import save_head

    target = save_easy_target(tmp_path / "target")
    save_head(knowing_head(target, LAYERS), tmp_path / "head", str(target))
    opened = open_proposer("eagle", ProposerSettings(model=str(tmp_path / "head"), target=str(target), dtype="float32"))
    engine, sampling = open_engine(str(target), "float32", 2048), SamplingParams(temperature=0.0)
    text = write_text(engine, list(range(3, 60)), 40, sampling, opened.hidden)
    states = text.states
    assert states is not None and len(states.last) == len(text.tokens) - 1 and set(states.layers) == set(LAYERS)
    rounds = list(run_rounds(opened, text, "all", Calls()))
    assert sum(each.accepted for each in rounds) > 0.1 * len(rounds)


def rounds_of(context: int, workload: str, accepted: int, count: int = 10, temperature: float = 0.0) -> list[Round]:
    return [Round(context, workload, temperature, DEPTH, accepted)] * count


def test_figures_are_sorted_by_depth_slice_context_and_temperature() -> None:
    check = PairCheck("t", "d", "model")
    rounds = rounds_of(100, "code", 4) + rounds_of(3000, "prose", 1) + rounds_of(100, "code", 1, temperature=1.0)
    summarise(check, rounds)
    assert check.by_depth == [1.0, 0.5, 1.0, 1.0, 0.0]
    assert check.by_slice == {"code": 5.0, "prose": 2.0}
    assert check.by_context == {"0-127": 5.0, "2048-8191": 2.0}
    assert check.by_temperature == {"0": 3.5, "1": 2.0} and check.rounds == 20


def test_each_risk_has_its_warning_and_a_sound_pair_has_none() -> None:
    engine = open_engine("emulated:")
    calm = PairCheck("t", "d", "model", speed_up={2: 1.5})
    quiet = rounds_of(8000, "code", 4) + rounds_of(9000, "prose", 4) + rounds_of(9000, "prose", 4, temperature=1.0)
    summarise(calm, quiet)
    engine.model = replace(engine.model, max_length=16384)
    warn(calm, quiet, [64, 64], engine)
    assert not calm.findings
    bad = PairCheck("t", "d", "model", speed_up={1: 0.9})
    rounds = rounds_of(100, "code", 4) + rounds_of(3000, "prose", 1) + rounds_of(100, "code", 1, temperature=1.0)
    summarise(bad, rounds)
    warn(bad, rounds, [3, 4], engine)
    said = " ".join(sentence for level, sentence in bad.findings if level == "warning")
    for danger in ("temperature:", "short outputs:", "long context: acceptance decays", "domain shift:",
                   "long context: the prompts reach"):  # fmt: skip
        assert danger in said


def test_the_command_prints_one_screen_and_json(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": PROMPTS[0].prompt, "workload": "mine", "max_tokens": 12}))
    command = ["doctor", "--target", TARGET, "--drafter", "ngram", "--prompts", str(file), "--dtype", "float32"]
    run = CliRunner()
    shown = run.invoke(app, command)
    assert shown.exit_code == NOT_WORTH_IT and len(shown.output.splitlines()) <= 26
    assert "do not ship: only 12 places were measured" in shown.output
    for word in ("vocabulary", "chat template", "accepted by depth", "mine", "speed-up", "target weights 44.1 MB"):
        assert word in shown.output
    found = json.loads(run.invoke(app, [*command, "--json"]).stdout)
    assert (
        found["ships"] is False
        and found["places"] == 12
        and found["by_slice"].keys() == {"mine"}
        and found["rounds"] > 0
        and len(found["speed_up"]) == DEPTH
    )


@pytest.mark.parametrize(
    ("theirs", "level", "says"),
    [("t", "ok", "nothing differs"), ("d", "warning", "another chat template"), ("", "warning", "no chat template")],
)
def test_the_templates_of_target_and_draft_are_compared(theirs: str, level: str, says: str) -> None:
    target: Any = SimpleNamespace(model=ModelInfo("target", "local-1", 8, "v", 64, "float32", 1, (0,), "t"))
    draft: Any = SimpleNamespace(model=replace(target.model, name="draft", chat_template=theirs))
    check = PairCheck("target", "", "model")
    check_models(check, target, draft)
    [found] = [(how, text) for how, text in check.findings if text.startswith("chat template: ")]
    assert found[0] == level and says in found[1]


def test_another_vocabulary_and_a_method_that_cannot_be_tried_are_refused(tmp_path: Path) -> None:
    run = CliRunner()
    other = run.invoke(app, ["doctor", "--target", TARGET, "--draft", "emulated:vocabulary=99", "--dtype", "float32"])
    assert other.exit_code == 1 and "WRONG   vocabulary" in other.output and "try `--translate`" in other.output
    assert "memory" not in other.output
    lookahead = run.invoke(app, ["doctor", "--target", TARGET, "--drafter", "lookahead"])
    assert lookahead.exit_code == 1 and "slipstream bench" in lookahead.output
    missing = run.invoke(app, ["doctor", "--target", str(tmp_path / "none"), "--draft", DRAFT])
    assert missing.exit_code == 1


def test_another_vocabulary_is_found_before_weights_are_read(tmp_path: Path) -> None:
    """Neither model has any: what would read them fails otherwise."""
    for name, size in (("target", 40), ("draft", 41)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_tokenizer(tmp_path / name, size)
    run = CliRunner()
    pair = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")]
    refused = run.invoke(app, ["doctor", *pair])
    assert refused.exit_code == 1 and "WRONG   vocabulary" in refused.output
    assert "(41 tokens)" in refused.output and "(40 tokens)" in refused.output and "--translate" in refused.output
    assert "do not ship" in refused.output and "memory" not in refused.output
    served = run.invoke(app, ["serve", *pair, "--listen", "127.0.0.1:0"])
    assert served.exit_code == 1 and "VOCABULARY_MISMATCH" in served.output and "--translate" in served.output


def test_padding_is_named_and_serves(tmp_path: Path) -> None:
    for name, size in (("target", 64), ("draft", 80)):
        save_checkpoint("llama", tmp_path / name, vocab_size=size, num_hidden_layers=1)
        save_tokenizer(tmp_path / name, 60)
    check = PairCheck(str(tmp_path / "target"), str(tmp_path / "draft"), "model")
    check_pair(check, [Asked("t1 t2 t3", "mine")], 20, "float32", lambda stage: None)
    assert not check.wrong
    assert any("80 columns" in sentence and "64" in sentence for level, sentence in check.findings if level == "ok")


def measured(**changes: Any) -> PairCheck:
    """A draft that ships."""
    figures: dict[str, Any] = {
        "places": 500, "first": 0.6, "rounds": 200, "speed_up": {2: 1.4, 4: 1.6}, "plain_ms": 10.0, "draft_ms": 1.0,
        "verify_ms": {2: 11.0, 4: 12.0}, "draft_parameters": 10_000_000, "target_parameters": 200_000_000,
    }  # fmt: skip
    return PairCheck("t", "d", "model", **(figures | changes))


@pytest.mark.parametrize(
    ("changes", "ships", "says"),
    [
        ({}, True, "1.60 times"),
        ({"places": 399}, False, "only 399 places"),
        ({"first": 0.2}, False, "up to about"),
        ({"speed_up": {2: 1.05}, "draft_ms": 30.0}, False, "a smaller draft"),
        ({"rounds": 0}, False, "all texts at temperature 0 loop"),
        ({"findings": [("WRONG", "vocabulary: differs")]}, False, "--translate"),
        ({"method": "suffix", "first": None, "draft_parameters": 0, "speed_up": {2: 1.0}}, False, "--draft"),
        ({"method": "suffix", "first": None, "draft_parameters": 0}, True, "1.60 times"),
    ],
)
def test_the_verdict_is_ship_or_not_with_what_to_try(changes: dict[str, Any], ships: bool, says: str) -> None:
    method = changes.pop("method", "model")
    check = replace(measured(**changes), method=method)
    decide(check)
    *_, last = [line for line in render(check).splitlines() if line.startswith(("ship", "do not ship"))]
    assert check.ships == ships and last.startswith("ship:" if ships else "do not ship:")
    assert says in render(check) and bool(check.remedies) != ships


def test_a_larger_draft_is_named_by_what_its_calls_would_take() -> None:
    """With 60 % right, two candidates give 1.96 tokens a round, so a round may take 17.8 ms of which verifying takes
    11: two calls of 3.4 ms, of a draft 3.4 times as large."""
    check = measured(verify_ms={2: 11.0})
    assert largest_draft(check) == pytest.approx(34_090_909, rel=1e-3)


@pytest.mark.parametrize(
    ("sampled", "looping", "places", "says"),
    [
        ([5, 6] * 15, {"0": 1, "1": 1}, 30, "at temperature 0 loop, 1 of 2 texts at temperature 1 loop; "),
        (list(range(30, 60)), {"0": 1, "1": 0}, 30, "1 of 2 texts at temperature 0 loop, 0 of 2 texts at"),
    ],
)
def test_looping_texts_are_counted_by_temperature_and_left_out(
    sampled: list[int],
    looping: dict[str, int],
    places: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One prompt's greedy text repeats itself, the other one's does not."""
    check = looping_check({0.0: [5, 6] * 15, 1.0: sampled}, list(range(10, 40)), tmp_path, monkeypatch)
    assert (check.looping, check.texts, check.places) == (sum(looping.values()), 4, places)
    assert check.looping_by_temperature == looping
    assert "does not" in check.by_slice and 0.5 < check.distinct < 0.8
    assert says in render(check)


def test_where_all_greedy_texts_loop_the_verdict_gives_that_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of four texts loop, which is every greedy one: "2 of 4" beside "every greedy text" was read as an error."""
    check = looping_check({0.0: [5, 6] * 15, 1.0: list(range(30, 60))}, [5, 6] * 15, tmp_path, monkeypatch)
    assert (check.looping, check.texts, check.rounds) == (3, 4, 0)
    shown = render(check)
    assert "2 of 2 texts at temperature 0 loop, 1 of 2 texts at temperature 1 loop; those are left out" in shown
    assert "do not ship: all texts at temperature 0 loop, so acceptance was not measured." in shown


def looping_check(
    first: dict[float, list[int]], second: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> PairCheck:
    """Of a target that answers the first of two prompts by temperature, and the second with one text."""
    from measurement.pairs import check as pair_check

    folder = str(save_checkpoint("llama", tmp_path / "target", vocab_size=64, num_hidden_layers=1))

    def write(engine: Any, prompt: list[int], tokens: int, sampling: SamplingParams, need: Any) -> TargetText:
        written = first[sampling.temperature] if len(prompt) == 3 else second
        return TargetText(prompt + written, len(prompt), sampling)

    monkeypatch.setattr(pair_check, "write_text", write)
    save_spaced_tokenizer(tmp_path / "target", 64)
    check = PairCheck(folder, folder, "model")
    prompts = [Asked("t1 t2 t3", "loops"), Asked("t1 t2 t3 t4", "does not")]
    check_pair(check, prompts, 30, "float32", lambda stage: None)
    return check


def save_spaced_tokenizer(folder: Path, size: int) -> None:
    tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_the_first_candidate_is_judged_at_every_place(tmp_path: Path) -> None:
    """Of a draft that is the target all are right; places inside accepted chains count as well."""
    engine, sampling = open_engine(TARGET, "float32", 2048), SamplingParams(temperature=0.0)
    opened = open_proposer("model", ProposerSettings(model=TARGET, target=TARGET, dtype="float32", kv_tokens=2048))
    text = write_text(engine, list(range(5, 40)), 20, sampling, None)
    assert first_right(opened, text) == [True] * len(text.written)


def test_other_work_on_the_machine_and_the_prompt_count_for_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes 2 ms, one that reads the prompt a second, and every seventh waits half a second for its core."""
    from measurement.pairs import check as pair_check

    now, made, closed = [0.0], [0], list[object]()
    known = set[object]()

    def propose(views: list[Any]) -> list[Proposal]:
        made[0] += 1
        now[0] += (0.002 if views[0].handle in known else 1.0) + 0.5 * (made[0] % 7 == 0)
        known.add(views[0].handle)
        return [Proposal([], 0)]

    proposer = SimpleNamespace(propose=propose, close_sequence=closed.append)
    opened: Any = SimpleNamespace(proposer=proposer, depth=1, hidden=None, model=SimpleNamespace(fingerprint=""))
    monkeypatch.setattr(pair_check.time, "perf_counter", lambda: now[0])

    def rounds_of(calls: Calls) -> Any:
        text = TargetText(list(range(60)), 10, SamplingParams(temperature=0.0))
        return run_rounds(opened, text, "all", calls)

    assert pair_check.call_seconds(rounds_of) == pytest.approx(0.002)
    assert set(closed) == known and len(known) == pair_check.TRIES


def test_a_draft_with_other_tokens_is_measured_as_it_translates_and_ships(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shipped draft under other token ids is right as often as without; few places and no gain are enough here."""
    monkeypatch.setattr("measurement.pairs.verdict.LEAST_PLACES", 10)
    monkeypatch.setattr("measurement.pairs.verdict.LEAST_GAIN", 0.0)
    shuffled = str(permuted(Path(DRAFT), tmp_path / "permuted"))
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": PROMPTS[0].prompt, "max_tokens": 12}))
    command = ["doctor", "--target", TARGET, "--draft", shuffled, "--prompts", str(file), "--dtype", "float32"]
    run = CliRunner()
    assert run.invoke(app, command).exit_code == 1  # wrong, without weights
    shown = run.invoke(app, [*command, "--translate"])
    assert shown.exit_code == 0 and " tokens, translated" in shown.output, shown.output
    assert shown.output.splitlines()[-1].startswith("ship: ")


@pytest.mark.parametrize("method", ["model", "eagle"])
def test_a_method_without_its_model_is_refused_in_the_words_of_the_command(method: str, tmp_path: Path) -> None:
    """No shipped draft has this tokenizer."""
    save_checkpoint("llama", tmp_path, vocab_size=64, num_hidden_layers=1)
    save_tokenizer(tmp_path, 64)
    refused = CliRunner().invoke(app, ["doctor", "--target", str(tmp_path), "--drafter", method])
    assert refused.exit_code == 1 and "--draft" in refused.output and "--drafter suffix" in refused.output
