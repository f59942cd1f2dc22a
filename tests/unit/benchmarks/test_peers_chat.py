"""Everybody on chat prompts: which prompts, in which order systems answer, and what the tables say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import turns
from benchmarks.peers.chat import without_loops
from benchmarks.peers.chats import Chat, chats, read, spread
from benchmarks.peers.comparison import by_category, summary
from benchmarks.peers.disturbance import Seen
from benchmarks.peers.systems import Answer, System, Tokens
from benchmarks.peers.turns import Round, Run, rounds
from slipstream.errors import InvalidArgument

QUIET, LOUD = Seen(0.0, 1.0, 0.5), Seen(3.0, 40.0, 0.5)


class Tokenizer:
    """A token for each character of the question."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return [7] * len(messages[0]["content"])


def test_kinds_of_mt_bench_are_one_category_and_a_file_without_categories_is_one(tmp_path: Path) -> None:
    lines = [{"category": "stem", "turns": ["a", "b"]}, {"category": "qa", "turns": ["c"]}]
    (tmp_path / "bench.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "code_prompts.jsonl").write_text(json.dumps({"turns": ["d"]}))
    assert read(tmp_path) == {"multi-turn": ["a"], "qa": ["c"], "code": ["d"]}


def test_a_folder_without_prompts_and_a_line_without_turns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"no \.jsonl file"):
        read(tmp_path)
    (tmp_path / "bench.jsonl").write_text('{"category": "qa"}')
    with pytest.raises(InvalidArgument, match="line 1: an object with `turns`"):
        read(tmp_path)


def test_chosen_prompts_lie_over_the_whole_set_and_too_long_ones_are_left_out() -> None:
    assert list(spread("abcdefgh", 2))[:2] == ["c", "g"]
    texts = {"qa": ["x" * 2000, "yy", "zzz"], "rag": ["w"]}
    chosen = chats(texts, Tokenizer(), 2)
    assert [(chat.category, len(chat.token_ids)) for chat in chosen] == [("qa", 2), ("rag", 1), ("qa", 3)]


def system(name: str, asked: list[str], seconds: float) -> System:
    async def ask(prompts: Tokens, count: int) -> Answer:
        asked.append(name)
        return Answer(seconds, [[*range(count)] for _ in prompts], seconds / 2, passes=count // 2)

    return ask


async def test_prompts_whose_plain_answer_loops_are_left_out() -> None:
    async def plain(prompts: Tokens, _count: int) -> Answer:
        return Answer(1.0, [[1, 2] * 20 if prompt == [3] else [*range(40)] for prompt in prompts], 0.5, passes=40)

    prompts = [Chat("qa", [3]), Chat("qa", [4])]
    systems = {"Slipstream, plain": plain, "Slipstream": system("Slipstream", [], 1.0)}
    assert await without_loops(systems, prompts, 40) == [Chat("qa", [4])]


async def test_every_system_answers_every_prompt_and_another_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    systems = {name: system(name, asked, 1.0) for name in ("one", "two", "three")}
    monkeypatch.setattr(turns, "Watch", lambda: type("W", (), {"seen": lambda self: QUIET})())
    found = await rounds(systems, [Chat("qa", [1])] * 2, 1, 4, 1, 60.0)
    assert asked == ["one", "two", "three", "two", "three", "one"]
    assert [list(each.runs) for each in found] == [["one", "two", "three"], ["two", "three", "one"]]


async def test_a_disturbed_round_is_repeated_and_the_least_disturbed_try_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, seen = list[str](), iter([LOUD, QUIET, LOUD, LOUD])
    monkeypatch.setattr(turns, "Watch", lambda: type("W", (), {"seen": lambda self: next(seen)})())
    found = await rounds({"one": system("one", asked, 1.0)}, [Chat("qa", [1])] * 2, 1, 4, 2, 60.0)
    assert [each.disturbed for each in found] == [False, True]
    assert len(asked) == 4


async def test_when_the_time_is_over_the_first_round_is_there_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "Watch", lambda: type("W", (), {"seen": lambda self: LOUD})())
    found = await rounds({"one": system("one", [], 1.0)}, [Chat("qa", [1])] * 3, 1, 4, 3, 0.0)
    assert len(found) == 1


def one_round(category: str, seconds: dict[str, float]) -> Round:
    runs = {
        name: Run(Answer(took, [[*range(20)]], took / 2, 10 if name == "ours" else None), QUIET)
        for name, took in seconds.items()
    }
    return Round(1, [Chat(category, [1, 2])], runs)


def test_ratios_are_to_the_fastest_plain_peer_within_a_round() -> None:
    found = [
        one_round("qa", {"slow": 4.0, "fast": 2.0, "ours": 1.0}),
        one_round("rag", {"slow": 9.0, "fast": 8.0, "ours": 2.0}),
    ]
    rows = {row["system"]: row for row in summary(found, ["slow", "fast", "ours"], {"slow", "fast"}, "slow")}
    assert rows["fast"]["x_best_plain"] == 1.0 and rows["fast"]["interval"] == "best"
    assert rows["ours"]["x_best_plain"] == pytest.approx((2.0 * 4.0) ** 0.5)
    assert rows["ours"]["least_x_decoding"] == pytest.approx(2.0)
    assert rows["ours"]["tokens_a_pass"] == 2.0 and rows["fast"]["tokens_a_pass"] is None
    assert rows["ours"]["cpu_ms_a_token"] == 25.0
    assert (rows["ours"]["same"], rows["ours"]["loops"]) == (1.0, 0.0)


def test_categories_have_the_ratio_of_their_own_rounds() -> None:
    found = [one_round("qa", {"fast": 2.0, "ours": 1.0}), one_round("rag", {"fast": 8.0, "ours": 2.0})]
    rows = by_category(found, ["fast", "ours"], {"fast"})
    assert [row["category"] for row in rows] == ["qa", "rag"]
    assert [row["ours"] for row in rows] == pytest.approx([2.0, 4.0])
    assert rows[0]["fast, tokens/s"] == 10.0
