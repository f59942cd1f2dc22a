"""Training drafters for a target: what is measured is what drafting computes, and a resumed run is the same run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from slipstream.cli.commands import app
from slipstream.engine.engine import HiddenStates
from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound
from slipstream.proposers.eagle import fuse
from slipstream.proposers.eagle_checkpoint import load_head
from slipstream.proposers.head_file import read_target
from slipstream.proposers.medusa_heads import load_heads
from slipstream.proposers.parallel_drafting import RANKS
from tests.support.checkpoints import save_checkpoint
from tests.support.eagle_heads import save_easy_target
from training.acceptance import SimulatedAcceptance, simulate
from training.answers import AnswerSettings, TargetAnswer
from training.corpus import TrainingBatch
from training.loss import divergence
from training.plan import Estimate, TrainingPlanner
from training.report import Report, render
from training.request import TrainRequest, read_request
from training.run import TrainingRun, open_drafter
from training.samples import LEAST_TRIED, SampleMaker
from training.speed import Speed
from training.target import Target
from training.texts import Sample, Samples, read_texts
from training.trained_drafter import UNKNOWN
from training.trainer import Position

KINDS = "draft", "medusa", "eagle"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer of words."""
    folder = save_easy_target(tmp_path_factory.mktemp("target") / "llama")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    lines = [
        {"prompt": f"t{3 * number} t{number + 7} t{100 - number}", "workload": "ab"[number % 2]} for number in range(60)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def request_of(kind: str, target: Path, out: Path, **settings: Any) -> TrainRequest:
    small = {"rows": 4, "window": 24, "depth": 3, "steps": 9, "evaluate_steps": 4, "answers": 40, "answer_tokens": 16,
             "held_out": 0.3, "held_out_answers": 12, "hidden": 32, "feed_forward": 64}  # fmt: skip
    return TrainRequest(kind, str(target), str(out), **(small | settings))


def batch_of(rows: int = 2, length: int = 12) -> TrainingBatch:
    tokens = torch.randint(199, (rows, length), generator=torch.Generator().manual_seed(5))
    learned = torch.ones_like(tokens, dtype=torch.bool)
    learned[0, :4] = False
    return TrainingBatch(tokens, learned)


@pytest.mark.parametrize("version", [1, 3])
def test_the_training_time_test_computes_what_drafting_does(version: int, target: Path, tmp_path: Path) -> None:
    """Pass d at root t: the states of t's text, then the layer's own, one candidate behind the other."""
    opened = Target(str(target))
    drafter: Any = open_drafter(
        request_of("eagle", target, tmp_path, version=version), opened, torch.ones(199, dtype=torch.int64)
    )
    batch = batch_of()
    states = opened.read(batch.tokens.tolist(), drafter.layers)
    with torch.no_grad():
        passes = drafter._passes(batch, states)
        fused = fuse(drafter.module, HiddenStates(states.last, states.layers))
        ranks = drafter.ranks(batch, states)
        for root in (0, 4, 7):
            hidden = fused[:, : root + 1]
            for depth in range(3):
                tokens = batch.tokens[:, 1 : root + 2 + depth]
                alone = drafter.module(tokens, hidden, torch.arange(root + 1 + depth)[None])
                torch.testing.assert_close(passes[depth][:, root], alone[:, -1], rtol=1e-4, atol=1e-5)
                hidden = torch.cat((hidden, alone[:, -1:]), dim=1)
                order = drafter.module.target_logits(alone[:, -1]).argsort(-1, descending=True)
                place = int((order[1] == batch.tokens[1, root + 2 + depth]).nonzero())
                assert int(ranks[depth, 1, root]) == min(place, RANKS)
    assert ranks[0, 0, 1] == UNKNOWN != ranks[0, 0, 2]  # token 3 of the first row is not learned, token 4 is
    assert ranks[2, 1, 7] != UNKNOWN == ranks[2, 1, 8]  # the text has 12 tokens


def run_of(request: TrainRequest, *, resume: bool = False) -> list[float]:
    return TrainingRun(request).run(resume=resume).position.losses


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_losses_of_a_run_without_a_break(
    kind: str, target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = request_of(kind, target, tmp_path / "whole", data=str(data))
    losses = run_of(whole)
    assert len(losses) == 9
    parts = replace(whole, out=str(tmp_path / "parts"), checkpoint_minutes=0.0)

    def update(_: object, used: float, step: int, *rest: object) -> None:
        if step == 6:  # the checkpoint of step 5 is the last one
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("training.trainer.TrainingProgress.update", update)
        with pytest.raises(KeyboardInterrupt):
            run_of(parts)
    assert run_of(parts, resume=True) == losses
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "parts" / file.name).read_bytes() == file.read_bytes()
    with pytest.raises(FailedPrecondition, match="other settings"):
        run_of(replace(parts, rate=0.5), resume=True)


def trained(kind: str, target: Path, data: Path, out: Path, *more: str) -> dict[str, Any]:
    config = out.parent / "train.toml"
    config.write_text(
        "answers = 40\nanswer_tokens = 24\nheld_out = 0.3\nheld_out_answers = 12\nwindow = 32\nrows = 4\ndepth = 2\n"
        "hidden = 32\nfeed_forward = 64\nevaluate_steps = 30\nrate = 0.5\n"
    )
    command = ["train", kind, "--config", config, "--target", target, "--data", data, "--out", out, "--json", *more]
    result = CliRunner().invoke(app, [str(each) for each in command], env={"MALLOC_MMAP_THRESHOLD_": "1"})
    assert result.exit_code == 0, result.output
    assert ("answers of the target  100.0%" in result.stderr) is ("--dry-run" not in more)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_is_trained_measured_and_exported(kind: str, target: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / kind
    planned = trained(kind, target, data, out, "--steps", "60", "--dry-run")
    assert planned["steps"] == 60 and planned["seconds"] > 0 and planned["memory_bytes"] > planned["checkpoint_bytes"]
    assert "60 steps of 4 x 27 tokens" in planned["summary"]
    assert not out.exists() and not out.with_name(f"{kind}-training").exists()
    found = trained(kind, target, data, out, "--steps", "60")
    page = Path(found["report"]).read_text()
    assert "Ship it" in page or "Do not ship it" in page
    assert page.count("<svg") == 4 and "http" not in page and "src=" not in page
    assert "<td>a</td>" in page and "<td>b</td>" in page
    kept = torch.load(out.with_name(f"{kind}-training") / "last.pt", weights_only=True)["position"]
    assert kept["losses"][-1] < kept["losses"][0]
    assert max(each["length"] for each in kept["evaluations"]) == pytest.approx(found["tokens_a_round"]["16"], abs=0.05)
    tokens = batch_of().tokens
    if kind == "draft":
        model = AutoModelForCausalLM.from_pretrained(out)
        assert model.dtype == torch.bfloat16 and model(input_ids=tokens).logits.isfinite().all()
        assert model.config.sliding_window == 32  # a row
        assert (out / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
    elif kind == "medusa":
        assert len(load_heads(str(out), str(target))) == 2
    else:
        head = load_head(str(out), read_target(str(target)), torch.float32)
        assert head.config.layers == (0, 1, 2) and head.config.norm_before_residual


def test_a_draft_model_to_start_from_gets_a_sliding_window_if_one_is_asked_for(target: Path, tmp_path: Path) -> None:
    """`target` is a Llama, and stands for a draft model here."""
    opened, tokens = Target(str(target)), batch_of().tokens
    before = AutoModelForCausalLM.from_pretrained(target)(input_ids=tokens).logits

    def logits(**settings: Any) -> Any:
        request = request_of("draft", target, tmp_path, start=str(target), **settings)
        drafter: Any = open_drafter(request, opened, torch.ones(199, dtype=torch.int64))
        drafter.save(tmp_path / "draft", [])
        return AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32)(input_ids=tokens).logits

    torch.testing.assert_close(logits(), before, rtol=0.05, atol=0.05)
    windowed = logits(sliding_window=4)
    torch.testing.assert_close(windowed[:, :4], before[:, :4], rtol=0.05, atol=0.05)
    assert (windowed[:, 6:] - before[:, 6:]).abs().max() > 0.1
    other = save_checkpoint("qwen2", tmp_path / "qwen", vocab_size=199)
    shutil.copyfile(target / "tokenizer.json", other / "tokenizer.json")
    with pytest.raises(InvalidArgument, match="not for qwen2"):
        request = request_of("draft", target, tmp_path, start=str(other), sliding_window=4)
        open_drafter(request, opened, torch.ones(199, dtype=torch.int64))


def test_texts_are_read_from_folders_lines_and_chats(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    for number in range(40):
        (tmp_path / "code" / f"{number}.py").write_text(f"a = {number}\n")
        (tmp_path / f"{number}.txt").write_text(f"text {number}\n")
    (tmp_path / "broken.bin").write_bytes(b"\xff\xfe")
    chat = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "workload": "chat"}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat) + "\n\n" + json.dumps({"text": "text 0\n"}))
    train, held_out = read_texts(str(tmp_path), 0.2)
    assert len(train) + len(held_out) == 81 and len(held_out) > 4  # the second "text 0" is left out
    assert {text.workload for text in train + held_out} == {"code", "txt", "chat"}
    [asked] = [text for text in train + held_out if text.messages]
    assert [each["role"] for each in asked.messages] == ["user"]
    assert read_texts(str(tmp_path), 0.2)[1] == held_out
    (tmp_path / "lines.txt").write_text("\n".join(f"prompt {number}" for number in range(50)))
    prompts = [text for part in read_texts(str(tmp_path / "lines.txt"), 0.2) for text in part]
    assert len(prompts) == 50 and all(text.prompt and not text.text for text in prompts)
    (tmp_path / "bad.jsonl").write_text('{"question": 1}\n')
    with pytest.raises(InvalidArgument, match=r"bad\.jsonl:1: a line has"):
        read_texts(str(tmp_path), 0.2)
    with pytest.raises(NotFound):
        read_texts(str(tmp_path / "nowhere"), 0.2)


def test_given_and_own_texts_are_mixed_evenly() -> None:
    def of(token: int, count: int) -> list[Sample]:
        return [Sample([token, number], 1, "") for number in range(count)]

    samples = Samples(of(1, 30), of(2, 4), [], own_share=0.4)
    rows = [tuple(row) for step in range(10) for row in (each.tokens for each in samples.pick(step, 4, seed=3))]
    own = [row for row in rows if row[0] == 2]
    assert len(own) == 16 and all(own.count(row) == 4 for row in own)
    assert all(3 <= sum(row[0] == 2 for row in rows[at : at + 10]) <= 5 for at in range(0, 40, 10))
    assert len({row for row in rows if row[0] == 1}) == 24  # none is read again before all were
    assert samples.frequency(200)[:4].tolist() == [2, 2, 2, 2]  # of the second tokens alone


def made_up(monkeypatch: pytest.MonkeyPatch, loops: Callable[[int], bool]) -> list[list[int]]:
    """Answers that `loops`, called with the number of each one asked for, decides on; returns the prompts asked."""
    asked: list[list[int]] = []

    def write(target: Target, prompts: list[list[int]], settings: AnswerSettings) -> Iterator[TargetAnswer]:
        for index, prompt in enumerate(prompts):
            answer = [7] * settings.length if loops(len(asked)) else list(range(settings.length))
            asked.append(prompt)
            width = target.output.shape[1]
            yield TargetAnswer(index, answer, torch.zeros(len(prompt) + len(answer) - 1, width, dtype=torch.bfloat16))

    monkeypatch.setattr("training.samples.write_answers", write)
    return asked


def test_where_greedy_answers_loop_other_places_are_sampled(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four answers loop here."""
    asked = made_up(monkeypatch, lambda number: number % 4 != 0)
    folder = tmp_path / "texts"
    folder.mkdir()
    for at in range(40):
        (folder / f"{at}.txt").write_text(" ".join(f"t{(at + 3 * each) % 190}" for each in range(40)))
    request = request_of(
        "medusa", target, tmp_path / "out", data=str(folder), held_out_answers=5, prompt_tokens=4, answers=1
    )
    samples = SampleMaker(request, Target(str(target)), ()).make()
    assert len(samples.held_out) == 5 and samples.looping == 12  # of 17: 2 of 5, 2 of 8, 1 of 4
    assert len(asked) == 18 and len({tuple(prompt) for prompt in asked}) > 10


def test_a_target_that_only_loops_is_refused_after_a_few_answers_with_a_remedy(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = made_up(monkeypatch, lambda number: True)
    request = request_of("medusa", target, tmp_path / "out", data=str(data), held_out=0.5, held_out_answers=40)
    with pytest.raises(FailedPrecondition, match=r"greedy answers .* loop .*messages.* answer_tokens"):
        SampleMaker(request, Target(str(target)), ()).make()
    assert LEAST_TRIED <= len(asked) < 60


def test_messages_are_asked_in_the_target_s_chat_template(target: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(target, tmp_path / "chat")
    template = "{% for each in messages %}t1 {{ each.content }} {% endfor %}{% if add_generation_prompt %}t2{% endif %}"
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    assert Target(str(folder)).prompt("", ({"role": "user", "content": "t5"},)) == [1, 5, 2]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("step = 5", "step is no setting of training"),
        ("steps = 'five'", "steps is 'five'; it must be of type int"),
        ("late_loss = 'mse'", "tv, lk"),
        ("version = 2", "version 1 or 3"),
        ("rows = 0", "at least 1"),
        ("window = 5", "need more"),
        ("steps =", "no TOML"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(content: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text(f'target = "a"\nout = "b"\n{content}\n')
    with pytest.raises(InvalidArgument, match=told):
        read_request("eagle", file, {})


def test_options_go_before_the_file_and_some_are_needed(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text('target = "a"\nout = "b"\nrate = 1\naux_layers = [1, 2]\nsteps = 5\n')
    request = read_request("eagle", file, {"steps": 7, "seed": None})
    assert (request.steps, request.seed, request.rate, request.aux_layers) == (7, 17, 1.0, (1, 2))
    with pytest.raises(InvalidArgument, match="--target"):
        read_request("eagle", None, {"out": "b"})


def test_acceptance_is_counted_on_roots_and_walked_round_by_round() -> None:
    # Rounds start at the places 0, 3 and 4.
    text = [[0, 0], [0, 5], [5, 0], [3, 0], [1]]
    found = simulate([text])
    assert found.roots == 5
    assert found.by_depth == [0.4, 0.5]
    assert found.table[0][:4] == [0.4, 0.2, 0.0, 0.2] and found.table[1][0] == 0.75
    assert found.lengths[2] == 5 / 3  # the tree (0), (0, 0): 3 tokens, 1, 1
    assert found.lengths[32] == 6 / 3  # no rank behind one that was never right: 3, 1, 2


def test_the_verdict_is_the_prediction_s(tmp_path: Path) -> None:
    """Verifying 4 candidates takes 1.5 times a plain pass, and drafting them half of one."""
    speed = Speed(0.01, {1: 0.011, 2: 0.012, 4: 0.015, 8: 0.04, 16: 0.08, 32: 0.2}, 0.005)
    lengths = {1: 1.5, 2: 2.0, 4: 3.0, 8: 3.2, 16: 3.4, 32: 3.5}
    found = SimulatedAcceptance(1000, [0.6, 0.5], [[0.6] * RANKS] * 2, lengths)
    request = TrainRequest("medusa", "target", str(tmp_path))
    report = Report(request, Position(step=9, losses=[3.0, 2.0]), 9, found, {"code": found}, speed, "Medusa-1", 0)
    assert report.measured.best == (4, pytest.approx(1.5)) and report.ships
    assert "Ship it: 60% of the first candidates are right, and with 4 candidates a pass 1.50 times" in report.verdict
    assert not replace(report, whole=replace(found, by_depth=[0.2, 0.9])).ships
    few = replace(report, whole=replace(found, roots=399))
    assert not few.ships and "only 399 places were measured" in few.verdict
    slow = replace(report, speed=replace(speed, draft_s=0.02))
    assert not slow.ships and "Do not ship it" in render(slow) and "Nothing was measured." in render(slow)


def test_divergences_are_the_textbook_ones() -> None:
    draft, target = torch.randn(2, 5, 30, generator=torch.Generator().manual_seed(0))
    p, q = target.softmax(-1), draft.softmax(-1)
    kl, tv = (p * (p / q).log()).sum(-1), 0.5 * (p - q).abs().sum(-1)
    torch.testing.assert_close(divergence(draft, target, "kl"), kl)
    torch.testing.assert_close(divergence(draft, target, "tv"), tv)
    share = (-3 * (1 - tv)).exp()
    torch.testing.assert_close(divergence(draft, target, "lk"), share * kl + (1 - share) * tv)


def test_a_place_that_no_drafter_can_be_written_to_is_refused_before_anything_is_loaded(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr("training.run.Target", load)
    (tmp_path / "file").write_text("")
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.txt").write_text("mine")
    for name, told in (
        ("file", "is a file"),
        ("papers", "holds files and no drafter"),
        ("file/head", "cannot be made"),
    ):
        with pytest.raises(FailedPrecondition, match=told):
            TrainingRun(request_of("eagle", target, tmp_path / name))
    assert (tmp_path / "papers" / "thesis.txt").read_text() == "mine"


def test_ctrl_c_prints_the_command_to_go_on(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: object, *, resume: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainingRun, "run", interrupted)
    command = ["train", "eagle", "--target", str(target), "--data", str(data), "--out", str(tmp_path / "my head")]
    monkeypatch.setattr("sys.argv", ["slipstream", *command, "--resume"])
    result = CliRunner().invoke(app, command, env={"MALLOC_MMAP_THRESHOLD_": "1"})
    assert result.exit_code == 130
    assert f"slipstream train eagle --target {target}" in result.stderr
    assert result.stderr.rstrip().endswith(f"--out '{tmp_path / 'my head'}' --resume")


def test_a_dry_run_counts_the_answers_that_the_target_has_to_write(target: Path, data: Path, tmp_path: Path) -> None:
    """Twice the answers take about twice the time; a limit of minutes holds."""

    def planned(**settings: Any) -> Estimate:
        small = {"held_out_answers": 1, "steps": 1} | settings
        return TrainingPlanner(
            TrainingRun(request_of("eagle", target, tmp_path / "out", data=str(data), **small))
        ).estimate()

    few, many = planned(answers=10), planned(answers=40)
    assert (few.answers, many.answers) == (11, 41)  # one of each is measured on
    tokens = [each.answer_seconds * each.answer_tokens_per_s for each in (few, many)]
    assert tokens == pytest.approx([11 * 16, 41 * 16])
    assert many.seconds == many.answer_seconds + many.training_seconds + many.evaluation_seconds
    assert planned(answers=40, answer_minutes=1e-9).answer_seconds < many.answer_seconds
    assert not (tmp_path / "out-training").exists()
