"""The comparison with other systems: converted weights, what counts as disturbed, turns, and rows that are kept."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers import __main__ as peers
from benchmarks.peers import disturbance, export_gguf
from benchmarks.peers.disturbance import Seen
from benchmarks.peers.systems import Answer, Setting, Tokens, Worker
from benchmarks.processes import MODELS
from slipstream.errors import FailedPrecondition

QUIET, LOUD = Seen(0.0, 1.0), Seen(3.0, 40.0)


def test_exported_projections_give_the_same_attention_under_the_other_order_of_rope() -> None:
    """llama.cpp turns neighbours, transformers numbers half a head apart: q . k must not notice."""
    heads, size, hidden = 2, 8, 16
    query, key = torch.randn(heads * size, hidden), torch.randn(heads * size, hidden)
    angles = torch.arange(1, size // 2 + 1) / 3.0

    def halves(vector: torch.Tensor, place: int) -> torch.Tensor:
        one, two = vector.view(heads, 2, size // 2).unbind(1)
        cos, sin = (place * angles).cos(), (place * angles).sin()
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)

    def neighbours(vector: torch.Tensor, place: int) -> torch.Tensor:
        one, two = vector.view(heads, size // 2, 2).unbind(-1)
        cos, sin = (place * angles).cos(), (place * angles).sin()
        return torch.stack((one * cos - two * sin, two * cos + one * sin), -1).flatten(1)

    state, other = torch.randn(hidden), torch.randn(hidden)
    ours = (halves(query @ state, 5) * halves(key @ other, 2)).sum(-1)
    theirs = neighbours(export_gguf.interleaved(query, heads) @ state, 5) * neighbours(
        export_gguf.interleaved(key, heads) @ other, 2
    )
    torch.testing.assert_close(theirs.sum(-1), ours)
    plain = (neighbours(query @ state, 5) * neighbours(key @ other, 2)).sum(-1)
    assert not torch.allclose(plain, ours)  # the order matters


class Writer:
    """What of a GGUF file the export wrote."""

    def __init__(self) -> None:
        self.lists: dict[str, list[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda value: self.lists.__setitem__(name, value)


def test_every_tensor_and_token_of_the_shipped_pair_has_a_name() -> None:
    from safetensors import safe_open

    for model in ("target", "draft"):
        folder = MODELS / model
        config = json.loads((folder / "config.json").read_text())
        with safe_open(folder / "model.safetensors", "pt") as weights:  # type: ignore[no-untyped-call]
            names = [*map(export_gguf.name, weights.keys())]
        assert len(set(names)) == len(names) == 9 * config["num_hidden_layers"] + 2
        writer = Writer()
        export_gguf.add_tokenizer(writer, folder, config)
        tokens = writer.lists["add_token_list"]
        assert len(tokens) == len(set(tokens)) == config["vocab_size"]
        assert tokens[0] == "<|endoftext|>" and writer.lists["add_token_types"][:2] == [3, 1]
    with pytest.raises(KeyError):
        export_gguf.name("model.layers.0.self_attn.q_proj.bias.weight")


def test_cpu_of_own_processes_is_not_others() -> None:
    code = "import time\nwhile time.process_time() < 0.6: pass\nprint(1, flush=True)\ninput()"
    before = disturbance.own_ticks()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"1\n"
        assert disturbance.own_ticks() - before >= 50  # ticks of 10 ms
        child.communicate(b"\n")


def test_cpu_time_of_others_excludes_our_own_idle_and_stolen_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, own = iter([(10, 100, 1000), (20, 130, 1200)]), iter([500, 580])
    monkeypatch.setattr(disturbance, "machine_ticks", lambda: next(machine))
    monkeypatch.setattr(disturbance, "own_ticks", lambda: next(own))
    assert disturbance.Watch().seen() == Seen(steal=5.0, others=40.0)  # 200 ticks: 10 stolen, 30 idle, 80 own
    assert [Seen(0.0, 5.0).disturbed, Seen(2.1, 0.0).disturbed, Seen(0.0, 5.1).disturbed] == [False, True, True]


async def _turns(seen: list[Seen], repeats: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], int]:
    asked: list[str] = []
    told = iter(seen)

    def system(name: str) -> Any:
        async def ask(prompts: Tokens, count: int) -> Answer:
            asked.append(name)
            return Answer(1.0, [[1] * count for _ in prompts])

        return ask

    monkeypatch.setattr(peers, "Watch", lambda: type("W", (), {"seen": lambda self: next(told)})())
    pairs = await peers.in_turn(system("reference"), system("own"), [[5]], 1, 4, repeats)
    assert len(pairs) == repeats
    return asked, sum(any(run.seen.disturbed for run in pair) for pair in pairs)


async def test_pairs_take_turns_and_disturbed_ones_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, disturbed = await _turns([QUIET] * 4, 2, monkeypatch)
    assert (asked, disturbed) == (["reference", "own", "own", "reference"], 0)
    asked, disturbed = await _turns([LOUD, QUIET, QUIET, QUIET, QUIET, QUIET], 2, monkeypatch)
    assert (len(asked), disturbed) == (6, 0)
    asked, disturbed = await _turns([LOUD] * 8, 2, monkeypatch)
    assert (len(asked), disturbed) == (8, 2)  # an end, and the row says so


async def test_a_run_is_of_all_prompts_so_many_at_a_time() -> None:
    asked: list[Tokens] = []

    async def system(prompts: Tokens, count: int) -> Answer:
        asked.append(prompts)
        return Answer(0.5 * len(asked), [prompt * count for prompt in prompts])

    found = await peers.sample(system, [[1], [2], [3], [4], [5]], 2, 3)
    assert asked == [[[1], [2]], [[3], [4]], [[5]]]
    assert found.outputs == [[prompt] * 3 for prompt in (1, 2, 3, 4, 5)]
    assert found.tokens_per_s == 15 / (0.5 + 1.0 + 1.5)


async def test_too_few_kept_prompts_are_chosen_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(stack: Any, setting: Setting) -> Any:
        async def ask(prompts: Tokens, count: int) -> Answer:
            return Answer(1.0, [[*range(count)] for _ in prompts])

        return ask

    monkeypatch.setattr(peers, "PEERS", tmp_path)
    monkeypatch.setitem(peers.SYSTEMS, peers.EXPECTED, start)
    few = await peers.chosen(2, 24)
    many = await peers.chosen(20, 24)
    assert (len(few.prompts), len(many.prompts)) == (2, 20)
    assert many.prompts[:2] == few.prompts and many.expected == [[*range(24)]] * 20
    monkeypatch.delitem(peers.SYSTEMS, peers.EXPECTED)
    assert (await peers.chosen(20, 24)).prompts == many.prompts  # kept


def test_a_row_pairs_neighbouring_runs_and_reports_disturbance() -> None:
    prompts = peers.Prompts([[1], [2]], [[3, 4], [5, 6]])
    speeds = [(10.0, 20.0, QUIET), (5.0, 10.0, LOUD)]  # the machine halved
    pairs = [[peers.Sample(a, [], seen), peers.Sample(b, [[3, 4], [5, 7]], seen)] for a, b, seen in speeds]
    row = peers.row("Slipstream", 2, 1, pairs, prompts)
    assert (row["x_reference"], row["interval"]) == (pytest.approx(2.0), "2.00-2.00")
    assert (row["tokens_per_s"], row["disturbed_pairs"], row["same"]) == (15.0, 1, 0.5)
    assert (row["steal_percent"], row["others_percent"]) == (1.5, 20.5)


def test_rows_are_kept_for_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import records

    monkeypatch.setattr(records, "RESULTS", tmp_path)
    monkeypatch.setattr(peers, "RESULTS", tmp_path)
    first = peers.Records("peers", "command", again=False)
    first.add({"system": "Slipstream", "at_once": 6})
    first.add({"system": "llama.cpp", "at_once": 6})
    later = peers.Records("peers", "command", again=False)
    assert later.has("Slipstream", 6) and not later.has("Slipstream", 1)
    assert [row["system"] for row in later.rows] == ["llama.cpp", "Slipstream"]
    assert not peers.Records("peers", "command", again=True).rows


async def test_a_worker_that_ends_is_a_typed_error_at_once() -> None:
    from contextlib import AsyncExitStack

    began = time.perf_counter()
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        with pytest.raises(FailedPrecondition, match="status 3"):
            await Worker.start(stack, 1, sys.executable, "-c", "raise SystemExit(3)")
    assert time.perf_counter() - began < 60
