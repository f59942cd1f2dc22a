"""The session prepared for a GPU runs on a CPU in small, its kernels in Triton's interpreter; parts cannot stop it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_session import __main__ as session
from benchmarks.gpu_session import draft_loop, launch_times, products, sampling
from benchmarks.gpu_session.kernels import GROUP, pack, product, unpack
from benchmarks.gpu_session.timing import Bench
from benchmarks.virtual_gpu import DEVICE, VirtualGPU

SMALL = Bench(torch.device("cpu"), small=True)


def test_kernels_and_operators_sample_the_same_tokens() -> None:
    found = sampling.measure(SMALL)
    assert found["9 rows: rows that differ"] == found["9 rows, top-p 0.9: rows that differ"] == 0


def test_all_variants_of_the_draft_loop_choose_the_same_tokens() -> None:
    found = draft_loop.measure(SMALL)
    assert [found[f"{sessions} x 256: the same tokens"] for sessions in (1, 8)] == [True, True]


def test_a_level_reads_what_the_levels_before_it_wrote() -> None:
    """The same token at the same position, behind another one."""
    model = draft_loop.StaticDecoder(draft_loop.SMALL, 1, 20, torch.device("cpu"))
    rows = []
    for before in (3, 4):
        model.logits(torch.tensor([before]), torch.tensor([10]))
        rows.append(model.logits(torch.tensor([7]), torch.tensor([11])))
    assert not torch.allclose(*rows)


def test_a_chain_waits_for_the_device_nowhere() -> None:
    """Else it could not be captured as a graph."""
    with torch.inference_mode(), VirtualGPU() as device:
        model = draft_loop.StaticDecoder(draft_loop.SMALL, 2, 20, torch.device("cpu"))
        chain = draft_loop.Chain(model, 2, 10, torch.device("cpu"))
        for name in ("embedding", "blocks", "kv", "places", "cosine", "sine"):
            setattr(model, name, moved(getattr(model, name)))
        for name in ("root", "positions", "keys", "ids", "tokens"):
            setattr(chain, name, moved(getattr(chain, name)))
        device.take()
        chain.all()
        work = device.take()
        assert not work.waits and work.launches.total() > 100


def moved(what: Any) -> Any:
    if isinstance(what, torch.Tensor):
        return what.to(DEVICE)
    return [tuple(moved(each) for each in block) for block in what]


def test_products_of_four_bits_are_those_of_the_weights_that_they_stand_for() -> None:
    torch.manual_seed(1)
    weights, x = torch.randn(64, 2 * GROUP), torch.randn(5, 2 * GROUP)
    packed, scales = pack(weights)
    assert packed.nbytes * 8 == weights.nbytes
    assert (unpack(packed, scales) - weights).abs().max() <= scales.max() * 0.51
    assert torch.allclose(product(x, packed, scales), x @ unpack(packed, scales).T, atol=1e-3)
    assert float(products.measure(SMALL)["4 bits, 8 rows, largest error"]) < 1e-2


def test_every_way_to_launch_is_timed() -> None:
    assert len(launch_times.measure(SMALL)) == 4


def test_a_part_that_hangs_or_fails_costs_the_others_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hangs.py").write_text("import time\nprint('before', flush=True)\ntime.sleep(60)\n")
    (tmp_path / "fails.py").write_text("raise SystemExit('it fails')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{session.ROOT}")
    parts = (
        session.Part("hangs", 3.0, ("hangs",), needs_gpu=False),
        session.Part("fails", 60.0, ("fails",), needs_gpu=False),
        session.Part("lacks", 60.0, ("fails",), needs_gpu=False, needs="no_such_package"),
        session.Part("gpu", 60.0, ("fails",)),
        session.Part("launch_times", 120.0, (session.MEASURED, "launch_times"), needs_gpu=False),
    )
    monkeypatch.setattr(session, "PARTS", parts)
    assert session.main([str(tmp_path / "out"), "--device", "cpu", "--small"]) == 1
    page = (tmp_path / "out" / session.PAGE).read_text()
    assert "## hangs: too long" in page and "before" in page and "it fails" in page
    assert "no_such_package is not installed" in page and "it needs a GPU" in page
    assert json.loads((tmp_path / "out/launch_times.json").read_text())["us a replay of 300 nodes"] > 0
    assert "| us a replay of 300 nodes |" in page


def test_every_command_of_the_session_is_there() -> None:
    for part in session.PARTS:
        module = part.command[0]
        assert module == "pytest" or (session.ROOT / f"{module.replace('.', '/')}.py").exists() or module in sys.modules
        assert all((session.ROOT / word).exists() for word in part.command if word.startswith("tests/"))
    assert sum(part.limit_s for part in session.PARTS) <= 700
