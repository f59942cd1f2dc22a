"""The start-up measurement, on an engine and a machine with a clock of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slipstream.engine.emulated.engine import EmulatedEngine
from slipstream.engine.emulated.model import EmulatedModel, LinearCost
from slipstream.engine.engine import Engine, ModelOutput
from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.engine.segment import Segment
from verifier_svc.estimators.cost_curve import CostCurve
from verifier_svc.estimators.cost_measurement import MeasuredSteps, measure, measure_steps


def truth(tokens: int, sessions: int) -> float:
    return 0.030 + 0.0004 * tokens + 0.0001 * sessions


class Machine:
    """An engine on a clock of its own; `lag` adds what the machine does to the nth forward."""

    def __init__(self, cost: Callable[[int, int], float], blocks: int = 512, max_length: int = 4096) -> None:
        self.now = 0.0
        self.forwards: list[int] = []
        self.lag: Callable[[int], float] = lambda number: 0.0
        self.engine: Engine = EmulatedEngine(
            EmulatedModel(vocabulary_size=16, max_length=max_length),
            cost,
            BlockPool(blocks, 16),
            self.clock,
            self.sleep,
        )
        self._forward = self.engine.forward
        self.engine.forward = self.forward  # type: ignore[method-assign]

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def forward(self, segments: list[Segment]) -> ModelOutput:
        self.now += self.lag(len(self.forwards))
        self.forwards.append(sum(segment.tokens for segment in segments))
        return self._forward(segments)


def test_measuring_finds_the_engine_s_cost() -> None:
    machine, curve = Machine(truth), CostCurve()
    machine.lag = lambda number: 1.5 if number % 5 == 4 else 0.0
    measure(curve, machine.engine, 512, 1000.0, machine.clock)
    assert machine.engine.kv.blocks_free == machine.engine.kv.blocks_total
    for tokens, sessions in [(1, 1), (8, 1), (64, 1), (512, 1), (8, 4), (16, 16), (128, 16), (64, 64), (512, 64)]:
        assert curve.seconds(tokens, sessions) == pytest.approx(truth(tokens, sessions), rel=0.02)
    assert curve.seconds(40, 32) == pytest.approx(truth(40, 32), rel=0.06)


def test_measuring_keeps_to_its_time_and_to_the_step_s_size() -> None:
    machine, curve = Machine(LinearCost(0.1, 0.01)), CostCurve()
    measure(curve, machine.engine, 512, 3.0, machine.clock)
    assert machine.now <= 3.2
    assert curve.seconds(1, 1) == pytest.approx(0.11)
    assert machine.engine.kv.blocks_free == machine.engine.kv.blocks_total
    machine, curve = Machine(LinearCost(0.1, 0.01)), CostCurve()
    measure(curve, machine.engine, 48, 1000.0, machine.clock)
    assert max(machine.forwards) <= 48


def test_an_executor_of_chains_is_measured_with_steps_that_it_can_verify() -> None:
    machine, steps = Machine(truth), list[list[Segment]]()

    def run(segments: list[Segment]) -> None:
        steps.append(segments)
        machine.engine.forward(segments)

    measured = MeasuredSteps(CostCurve(), machine.engine.kv, run, 256, most_sessions=16, longest_chain=4)
    measure_steps(measured, 1000.0, machine.clock)
    assert max(sum(segment.tokens for segment in step) for step in steps) <= 256
    assert {len(step) for step in steps} == {1, 3, 4, 12, 16}
    for segment in (segment for step in steps for segment in step):
        assert segment.parents == list(range(-1, len(segment.nodes) - 1)) and len(segment.nodes) <= 4
    assert machine.engine.kv.blocks_free == machine.engine.kv.blocks_total


def test_measuring_without_time_or_memory_is_no_error() -> None:
    for machine, limit_s in [(Machine(truth), 0.0), (Machine(truth, blocks=1), 1e3), (Machine(truth, blocks=4), 1e3)]:
        curve = CostCurve()
        measure(curve, machine.engine, 512, limit_s, machine.clock)
        assert 0 < curve.seconds(1, 1) < curve.seconds(512, 1)
        assert machine.engine.kv.blocks_free == machine.engine.kv.blocks_total


def test_an_engine_that_fails_gets_its_blocks_back_too() -> None:
    machine = Machine(truth)

    def fail(number: int) -> float:
        if number == 7:
            raise RuntimeError("out of memory")
        return 0.0

    machine.lag = fail
    with pytest.raises(RuntimeError):
        measure(CostCurve(), machine.engine, 512, 1e3, machine.clock)
    assert machine.engine.kv.blocks_free == machine.engine.kv.blocks_total
