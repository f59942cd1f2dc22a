"""Measurements of the running experiment on this gateway: a bounded sample of each arm's sessions.

An arm keeps its `KEPT` finished sessions of lowest priority, which is a hash of the session's id. That is a simple
random sample, without a bias to late or early sessions, and samples of several gateways can be merged: the lowest of
the union are among the lowest of the parts.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from gateway.routing.drafters import pool_of
from gateway.routing.experiment import Arm, Experiment
from gateway.sessions.observer import SessionObserver
from slipstream.v1 import gateway_pb2, verifier_pb2

KEPT = 2048
"""Sessions kept of one arm. With as many arms and shadows as there may be, all fit into one message."""
DEPTHS = 16
"""Accepted candidates are counted by depth down to here."""
MEASURED = (verifier_pb2.FINISH_REASON_STOP, verifier_pb2.FINISH_REASON_LENGTH)


@dataclass(slots=True)
class ArmSamples:
    begun: int = 0
    finished: int = 0
    samples: list[tuple[int, int, gateway_pb2.SessionSample]] = field(default_factory=list)
    """A heap of (negated priority, unique number, sample): the highest priority comes first."""

    def add_sample(self, sample: gateway_pb2.SessionSample) -> None:
        self.finished += 1
        entry = -sample.priority, self.finished, sample
        if len(self.samples) < KEPT:
            heapq.heappush(self.samples, entry)
        else:
            heapq.heappushpop(self.samples, entry)


class ExperimentSamples:
    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self._kept = {arm.name: ArmSamples() for arm in experiment.arms}

    def sample(self, arm: str, session_id: str) -> SessionSample:
        """The observer of a session that begins in this arm."""
        self._kept[arm].begun += 1
        return SessionSample(self._kept[arm], self.experiment.priority(session_id))

    def results(self) -> gateway_pb2.GetExperimentResponse:
        return gateway_pb2.GetExperimentResponse(
            name=self.experiment.name,
            arms_setting=str(self.experiment),
            arms=[_arm_results(arm, self._kept[arm.name]) for arm in self.experiment.arms],
        )


class SessionSample(SessionObserver):
    """Measures one session from its beginning to its end."""

    def __init__(self, kept: ArmSamples, priority: int) -> None:
        self._kept = kept
        self._sample = gateway_pb2.SessionSample(priority=priority)
        self._cost_us = 0

    def round_shown(self, done: verifier_pb2.Round) -> None:
        self._cost_us += done.cost_us
        _count(self._sample.served, done.drafted, done.accepted)
        for score in done.shadows:
            _count(self._sample.shadows[pool_of(score.drafter)], score.drafted, score.accepted)

    def session_finished(self, finished: gateway_pb2.Finished, occupancy: float) -> None:
        """A session that was cancelled or failed is not measured: its full length is unknown."""
        if finished.reason not in MEASURED:
            return
        statistics, sample = finished.statistics, self._sample
        sample.tokens = finished.output_tokens
        sample.ttft_s, sample.e2e_s = statistics.ttft_s, statistics.e2e_s
        sample.verifier_s = self._cost_us / 1e6
        sample.drafter_s = statistics.e2e_s * occupancy
        self._kept.add_sample(sample)


def _count(sample: gateway_pb2.DraftSample, drafted: int, accepted: int) -> None:
    sample.rounds += 1
    sample.rounds_with_drafts += drafted > 0
    sample.drafted += drafted
    sample.accepted += accepted
    depth = min(accepted, DEPTHS)
    sample.reached.extend([0] * (depth - len(sample.reached)))
    for index in range(depth):
        sample.reached[index] += 1


def _arm_results(arm: Arm, kept: ArmSamples) -> gateway_pb2.ExperimentArm:
    samples = [sample for _, _, sample in sorted(kept.samples, reverse=True)]
    return gateway_pb2.ExperimentArm(name=arm.name, begun=kept.begun, finished=kept.finished, samples=samples)
