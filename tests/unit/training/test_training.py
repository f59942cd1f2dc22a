"""Training: data and tokenizer are as stated, losses fall, a resumed run is the same run, the shipped pair works."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.errors import FailedPrecondition, InvalidArgument
from slipstream.tokenizer.vocabulary import fingerprint
from training.corpus import Windows, encode_stream, is_held_out, read_corpus, train_vocabulary
from training.evaluate import coupled_acceptance
from training.loss import Teacher, head_loss
from training.session import TrainingFolders, TrainingSession
from training.settings import Budget, Schedule, Settings, Shape, TrainingStage

MODELS = Path(__file__).parents[3] / "models"
TINY = Shape(hidden=32, layers=1, heads=2, kv_heads=1, feed_forward=64, context=128)
WORDS = ("def", "return", "self", "value", "for", "in", "range", "print", "else", "lambda", "yield", "class")


@pytest.fixture(scope="module")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    choose = random.Random(0)
    for number in range(130):
        lines = [" ".join(choose.choices(WORDS, k=6)) for _ in range(20)]
        (folder / f"file{number}.py").write_text("\n".join(lines) + "\n")
    (folder / "again.py").write_text((folder / "file0.py").read_text())
    (folder / "broken.py").write_bytes(b"\xff\xfe not utf-8")
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "foreign.py").write_text("foreign = 1\n")
    return folder


def tiny_settings(steps: int) -> Settings:
    stage = TrainingStage("target", TINY, Budget(0.0, steps), rows=4, window=32, long_window=64)
    return Settings(stage, replace(stage, name="draft"), vocabulary=300, evaluation_windows=2, compiled=False)


def losses_of(session: TrainingSession, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Runs a session and returns the loss of every step it made."""
    seen: list[float] = []

    def update(_: object, used: float, step: int, loss: float, seconds: float, tokens: int) -> None:
        seen.append(loss)

    monkeypatch.setattr("training.trainer.TrainingProgress.update", update)
    session.run("slipstream train")
    return seen


def test_a_run_learns_resumes_and_writes_everything(
    corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = read_corpus(corpus_folder)
    places = TrainingFolders(tmp_path / "models", tmp_path / "cache", resume=False)
    session = TrainingSession(tiny_settings(30), corpus, places)
    losses = losses_of(session, monkeypatch)
    assert len(losses) == 60
    assert losses[29] < losses[0] - 1.0
    assert losses[59] < losses[30]
    for name in ("target", "draft"):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "models" / name).dtype == torch.bfloat16
    card = (tmp_path / "models" / "README.md").read_text()
    assert "greedy agreement" in card and str(tmp_path) not in card

    # Finished stages are not repeated, and a run stopped half way sees the same data and ends with the same weights.
    again = TrainingSession(tiny_settings(30), corpus, replace(places, resume=True))
    assert losses_of(again, monkeypatch) == []
    stopped = replace(places, cache=tmp_path / "stopped", resume=True)
    interrupted_losses(tiny_settings(30), stopped, corpus_folder, monkeypatch)
    resumed = TrainingSession(tiny_settings(30), corpus, stopped)
    assert losses_of(resumed, monkeypatch) == losses[12:]
    with pytest.raises(FailedPrecondition, match="other settings"):
        TrainingSession(tiny_settings(31), corpus, replace(places, resume=True)).run("")


def interrupted_losses(
    settings: Settings, places: TrainingFolders, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs until step 12, where a checkpoint was just written, and dies."""

    def update(_: object, used: float, step: int, *rest: float) -> None:
        if step == 13:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("training.trainer.TrainingProgress.update", update)
        session = TrainingSession(replace(settings, checkpoint_minutes=0.0), read_corpus(folder), places)
        with pytest.raises(KeyboardInterrupt):
            session.run("")


def test_the_corpus_leaves_out_what_it_should(corpus_folder: Path) -> None:
    corpus = read_corpus(corpus_folder)
    paths = {document.path for document in (*corpus.train, *corpus.held_out)}
    assert len(paths) == 130
    assert not paths & {"broken.py", "site-packages/foreign.py"}
    assert corpus.held_out and all(is_held_out(document.path) for document in corpus.held_out)
    assert not any(is_held_out(document.path) for document in corpus.train)


def test_batches_depend_on_seed_and_step_alone(corpus_folder: Path) -> None:
    corpus = read_corpus(corpus_folder)
    tokenizer = train_vocabulary((document.text for document in corpus.train), 300)
    stream = encode_stream(tokenizer, corpus.train, seed=1)
    windows = Windows(stream, length=64, rows=4, seed=5)
    assert torch.equal(windows.batch(7), Windows(stream, 64, 4, 5).batch(7))
    assert not torch.equal(windows.batch(7), windows.batch(8))
    # One epoch shows every window once.
    steps = (len(stream) - 65) // 64 // 4
    starts = [tuple(row.tolist()) for step in range(steps) for row in windows.batch(step)]
    assert len(set(starts)) == len(starts)
    with pytest.raises(InvalidArgument, match="less than one window"):
        Windows(stream[:20], 64, 4, 5).batch(0)


def test_the_schedule_ends_at_zero() -> None:
    schedule = Schedule(warm_up=0.1, decay_from=0.6)
    assert schedule.factor(0.0) > 0
    assert schedule.factor(0.05) == 0.5
    assert schedule.factor(0.3) == 1.0
    assert schedule.factor(0.8) == pytest.approx(0.5)
    assert schedule.factor(1.0) == 0.0
    assert Budget(minutes=2.0).used(60.0, 10) == 0.5
    assert Budget(minutes=2.0, steps=40).used(60.0, 10) == 0.25


@pytest.mark.parametrize("taught", [False, True])
def test_the_loss_and_its_gradient_are_the_textbook_ones(taught: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(700, 16, requires_grad=True)
    head = torch.randn(40, 16, requires_grad=True)
    goals = torch.randint(0, 40, (700,))
    teacher = Teacher(torch.randn(700, 8), torch.randn(40, 8)) if taught else None
    logs = (hidden @ head.T).log_softmax(-1)
    if teacher is None:
        wanted = torch.nn.functional.nll_loss(logs, goals)
    else:
        wanted = torch.nn.functional.kl_div(
            logs, (teacher.hidden @ teacher.head.T).log_softmax(-1), reduction="batchmean", log_target=True
        )
    expected = torch.autograd.grad(wanted, (hidden, head))
    loss = head_loss(hidden, head, goals, teacher)
    found = torch.autograd.grad(loss, (hidden, head))
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(found, expected)


def test_coupled_acceptance_is_what_racing_gives() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(2, 12).softmax(-1)
    noise = -torch.rand(200_000, 12).log()
    raced = ((noise / p).argmin(1) == (noise / q).argmin(1)).float().mean()
    assert coupled_acceptance(p, q) == pytest.approx(float(raced), abs=0.006)
    assert coupled_acceptance(p, p) == pytest.approx(1.0)


TRAINED = train_vocabulary(["def f(self):\n    return 1\n"] * 3, 280)


@given(st.text())
def test_every_text_decodes_to_itself(text: str) -> None:
    for tokenizer in (TRAINED, *_shipped()[:1]):
        # The end-of-text token is the one text that stands for something else.
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def _shipped() -> list[Tokenizer]:
    if not _CACHE:
        _CACHE.extend(Tokenizer.from_file(str(MODELS / name / "tokenizer.json")) for name in ("target", "draft"))
    return _CACHE


_CACHE: list[Tokenizer] = []


def test_the_shipped_pair_loads_and_predicts_python() -> None:
    assert fingerprint(_shipped()[0]) == fingerprint(_shipped()[1])
    files = [path for path in MODELS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 60_000_000
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (MODELS / "target" / name).read_bytes() == (MODELS / "draft" / name).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    tokens = tokenizer("import os\n\n\ndef main():\n    for name in", return_tensors="pt").input_ids
    assert tokenizer.eos_token_id == 0 and int(tokens[0, 0]) != 0
    losses = {}
    for name in ("target", "draft"):
        model = AutoModelForCausalLM.from_pretrained(MODELS / name).eval()
        assert model.dtype == torch.bfloat16 and model.config.eos_token_id == 0
        with torch.inference_mode():
            losses[name] = float(model(input_ids=tokens, labels=tokens).loss)
    # Chance is ln 4096 = 8.3.
    assert losses["target"] < 4.0 and losses["draft"] < 5.0
