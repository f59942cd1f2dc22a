"""Costs of passes on GPUs, from their data sheets, and the rule about slow drafters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from capacity import report
from capacity.cost import read_cost, shape
from capacity.gpus import GPUS, GpuCost, level_times
from capacity.scenario import read
from slipstream.engine.emulated.model import LinearCost
from slipstream.errors import InvalidArgument, NotFound
from tests.support.checkpoints import save_checkpoint

EXAMPLES = Path(__file__).parents[3] / "examples" / "plan"
LLAMA_1B = (1.236e9, 16, 0.263e9)
"""Parameters, layers, output layer of Llama 3.2 1B."""


def test_the_time_of_a_level_is_that_of_its_bytes_and_of_a_graph() -> None:
    """Known: 2.47 GB at 0.85 of 300 GB/s are 9.7 ms, and a quarter of them but for the output layer 2.9."""
    times = level_times(*LLAMA_1B)
    assert set(times) == set(GPUS)
    assert [times["L4"][bits] for bits in (16, 8, 4)] == pytest.approx([0.01004, 0.0052, 0.0033], rel=0.02)
    assert times["H100"][16] == pytest.approx(0.0012, rel=0.03)


def test_weights_that_do_not_fit_have_no_time() -> None:
    times = level_times(30e9, 60)
    assert times["L4"][16] is times["L4"][8] is None and times["L4"][4] is not None
    assert GpuCost("H100", 70.6e9, 80, 16, number=4).fits and not GpuCost("H100", 70.6e9, 80, 16).fits


def test_without_graphs_the_host_is_the_floor() -> None:
    quick, slow = (GpuCost(name, 1.236e9, 16, graphs=False).line().base_s for name in ("H100", "L4"))
    assert quick == pytest.approx(0.0064, rel=0.02) and slow == pytest.approx(0.0107, rel=0.02)


def test_several_gpus_divide_the_weights_and_synchronise() -> None:
    line = GpuCost("H100", 70.6e9, 80, 8, number=4).line()
    assert line.base_s == pytest.approx(0.0085, rel=0.02)
    assert line(line.free_tokens, 1) == line.base_s < line(4 * line.free_tokens, 1)


def test_a_session_reads_its_context() -> None:
    cost = {"gpu": "H100", "parameters": 8e9, "layers": 32, "kv_bytes": 131_072, "context": 4000}
    line = read_cost(cost)
    assert isinstance(line, LinearCost)
    assert line.per_session_s == pytest.approx(4000 * 131_072 / (0.85 * 3.35e12))


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        ({"gpu": "L5", "parameters": 1e9, "layers": 16}, "knows no GPU L5; it has T4, "),
        ({"gpu": "A100-80GB", "parameters": 1e9, "layers": 16}, r"knows no GPU A100-80GB \(do you mean A100\?\)"),
        ({"gpu": "h100", "parameters": 1e9, "layers": 16}, r"knows no GPU h100 \(do you mean H100\?\)"),
        ({"gpu": "L40", "parameters": 1e9, "layers": 16}, r"knows no GPU L40 \(do you mean L40S\?\)"),
        ({"gpu": "L4", "layers": 16}, "parameters"),
        ({"gpu": "L4", "parameters": 1e9, "layers": 16, "bits": 5}, "bits is 5"),
        ({"gpu": "L4", "parameters": 1e9, "layers": 16, "bit": 8}, r"knows no bit \(do you mean bits\?\)"),
        ({"gpu": "L4", "parameters": 1e9, "layers": 0}, "above 0"),
    ],
)
def test_an_invalid_cost_of_a_gpu_is_refused_by_name(cost: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        read_cost(cost)


def test_a_plan_warns_of_a_drafter_above_the_rule() -> None:
    given = read(EXAMPLES / "h100-l4.toml")
    assert "does not pay" not in report.level_sentence(given)
    slow = replace(given, drafting=replace(given.drafting, cost=GpuCost("L4", 1.236e9, 16).line()))
    assert "of the target's pass of 15 ms. Above 0.6 a drafter of its own does not pay" in report.level_sentence(slow)


def test_a_model_s_shape_is_read_without_its_weights(tmp_path: Path) -> None:
    folder = save_checkpoint("llama", tmp_path)
    (folder / "model.safetensors").unlink()
    parameters, layers, head = shape(str(folder))
    assert layers == 3 and 0 < head < parameters
    (folder / "config.json").unlink()
    with pytest.raises(NotFound, match=r"has no config\.json; give the folder of a checkpoint"):
        shape(str(folder))
