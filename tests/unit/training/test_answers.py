"""The target's answers: written together they are what it writes alone, and they are kept with its hidden states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.errors import FailedPrecondition
from tests.support.eagle_heads import save_easy_target
from training.answer_store import AnswerStore
from training.answers import AnswerSettings, TargetAnswer, write_answers
from training.target import Target

LAYERS = (0, 2)
PROMPTS = [[5, 9, 2], [7], [3, 1, 4, 1, 5, 9, 2, 6], [11, 12], [8, 8, 8, 8, 8]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(str(save_easy_target(tmp_path_factory.mktemp("target") / "llama")), dtype="float32")


def answers(target: Target, temperature: float = 0.0, seed: int = 1, at_once: int = 0) -> list[TargetAnswer]:
    settings = AnswerSettings(9, temperature, seed, LAYERS, at_once)
    return sorted(write_answers(target, PROMPTS, settings), key=lambda each: each.index)


@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_greedy_answers_are_the_library_s_however_many_are_written_at_once(target: Target, at_once: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(target.name, dtype=torch.float32)
    for prompt, answer in zip(PROMPTS, answers(target, at_once=at_once), strict=True):
        tokens = torch.tensor([prompt])
        found = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=9, do_sample=False)
        assert answer.tokens == found[0, len(prompt) :].tolist()


def test_the_states_are_those_of_one_pass_over_the_text(target: Target) -> None:
    """And so are the logits that are made of them."""
    model = AutoModelForCausalLM.from_pretrained(target.name, dtype=torch.float32)
    for prompt, answer in zip(PROMPTS, answers(target), strict=True):
        text = prompt + answer.tokens[:-1]
        whole = model(torch.tensor([text]), output_hidden_states=True)
        last, *layers = answer.states.split(target.output.shape[1], dim=-1)
        torch.testing.assert_close(last.float(), whole.hidden_states[-1][0], rtol=0.02, atol=0.02)
        for number, rows in zip(LAYERS, layers, strict=True):
            torch.testing.assert_close(rows.float(), whole.hidden_states[number][0], rtol=0.02, atol=0.02)
        read = target.read([text, [3]], LAYERS)
        assert read.last.shape[:2] == (2, len(text)) and not read.last[1, 1:].any()
        torch.testing.assert_close(read.layers[2][0], whole.hidden_states[2][0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(target.logits(read.last[0]), whole.logits[0], rtol=1e-3, atol=1e-3)
        ids = torch.tensor([3, 50, 198])
        torch.testing.assert_close(target.logits(read.last[0], ids), whole.logits[0][:, ids], rtol=1e-3, atol=1e-3)


def test_sampled_answers_depend_on_the_seed_and_end_with_the_end_token(target: Target) -> None:
    first = [each.tokens for each in answers(target, 1.0, seed=3)]
    assert first == [each.tokens for each in answers(target, 1.0, seed=3)]
    assert first != [each.tokens for each in answers(target, 1.0, seed=4)]
    ends, target.end = target.end, [first[0][2]]
    try:
        assert answers(target, 1.0, seed=3)[0].tokens == first[0][: first[0].index(first[0][2]) + 1]
    finally:
        target.end = ends


def test_answers_that_are_given_up_leave_the_cache_empty(target: Target) -> None:
    free = target.engine.kv.blocks_free
    writing = write_answers(target, PROMPTS, AnswerSettings(9, 0.0, 1, at_once=2))
    ends, target.end = target.end, [answers(target)[0].tokens[0]]  # the first ends at once, the second goes on
    try:
        next(writing)
    finally:
        target.end = ends
    assert target.engine.kv.blocks_free < free
    writing.close()
    assert target.engine.kv.blocks_free == free


def test_a_target_whose_logits_are_made_otherwise_is_refused(target: Target) -> None:
    target.check_logits()
    target.config.logit_scale = 3.0
    try:
        with pytest.raises(FailedPrecondition, match="no product of its last hidden states"):
            target.check_logits()
    finally:
        del target.config.logit_scale


def filled(folder: Path, key: str = "a") -> AnswerStore:
    store = AnswerStore(folder, key, 6)
    for index, length in ((2, 4), (0, 3)):
        states = torch.full((length - 1, 6), float(index + 1), dtype=torch.bfloat16)
        store.add("train", index, list(range(length)), 1, "w", states)
    return store


def test_a_file_of_answers_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    filled(tmp_path)
    lines, states = tmp_path / "answers.jsonl", tmp_path / "states.bin"
    whole = lines.read_bytes()
    for cut in (3, len(whole.splitlines()[-1])):  # in the middle of the last line, and in front of its end
        lines.write_bytes(whole[:-cut])
        states.write_bytes(states.read_bytes() + b"half")
        store = AnswerStore(tmp_path, "a", 6)
        assert [each.index for each in store.answers] == [2]
        store.add("train", 0, [0, 1, 2], 1, "w", torch.ones(2, 6, dtype=torch.bfloat16))
        assert lines.read_bytes() == whole
        assert [each.index for each in AnswerStore(tmp_path, "a", 6).part("train")] == [0, 2]
    states.write_bytes(states.read_bytes()[:-2])  # a state is missing
    assert [each.index for each in AnswerStore(tmp_path, "a", 6).answers] == [2]


def test_states_are_read_where_their_answer_s_tokens_are(tmp_path: Path) -> None:
    store = filled(tmp_path)
    early, late = store.part("train")
    left, right = AnswerStore(tmp_path, "a", 6).states(early.row, early.end, (2, 4))
    assert left.shape == (2, 2) and right.shape == (2, 4) and (left == 1).all() and (right == 1).all()
    assert (store.states(late.row, late.end, (6,))[0] == 3).all()


def test_answers_of_other_settings_are_thrown_away_and_finished_parts_stay_finished(tmp_path: Path) -> None:
    filled(tmp_path).finish("train")
    assert AnswerStore(tmp_path, "a", 6).finished == {"train"}
    other = AnswerStore(tmp_path, "b", 6)
    assert not other.answers and not other.finished
    assert not AnswerStore(tmp_path, "b", 6).answers
