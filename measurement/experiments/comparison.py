"""Comparison of an experiment's arms over all gateways' samples: estimates of each metric, their
intervals, and which differences are shown."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from measurement.experiments.estimates import (
    CONFIDENCE,
    Interval,
    Numbers,
    Ratio,
    apart,
    between,
    mean,
    of_ratio,
    paired,
    quantile,
    ratio,
)
from slipstream.errors import FailedPrecondition
from slipstream.v1 import gateway_pb2

MEASURES = ("tokens", "ttft_s", "e2e_s", "verifier_s", "drafter_s")
COUNTS = ("rounds", "rounds_with_drafts", "drafted", "accepted")
UNLIKELY = 0.001
"""Probability with which evenly filled arms are reported as uneven."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Price of one verifier and of one drafter for an hour, in any currency."""

    verifier: float
    drafter: float

    def per_hour(self, verifiers: int, drafters: int) -> float:
        return verifiers * self.verifier + drafters * self.drafter


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured values of sessions: element i of every array is session i."""

    tokens: Numbers
    ttft_s: Numbers
    e2e_s: Numbers
    verifier_s: Numbers
    drafter_s: Numbers
    rounds: Numbers
    rounds_with_drafts: Numbers
    drafted: Numbers
    accepted: Numbers

    @property
    def tpot_s(self) -> Numbers:
        """Seconds for each token after the first, of sessions with two tokens or more."""
        long = self.tokens > 1
        return (self.e2e_s[long] - self.ttft_s[long]) / (self.tokens[long] - 1.0)


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    name: str
    unit: str
    sign: int
    """1 where more is better, -1 where less is."""
    scale: float
    ratio: Callable[[Measured], Ratio] | None = None
    values: Callable[[Measured], Numbers] | None = None
    share: float = 0.0
    """The quantile of `values`, in 0..1."""
    most: float = math.inf
    """Largest possible value; the smallest is 0."""

    def of(self, measured: Measured, confidence: float) -> Interval:
        if self.ratio is not None:
            return self._scaled(self._possible(of_ratio(self.ratio(measured), confidence)))
        assert self.values is not None
        return self._scaled(quantile(self.values(measured), self.share, confidence))

    def difference(self, first: Measured, second: Measured, confidence: float) -> Interval:
        if self.ratio is not None:
            return self._scaled(apart(self.ratio(first), self.ratio(second), confidence))
        assert self.values is not None
        intervals = (quantile(self.values(each), self.share, confidence) for each in (first, second))
        return self._scaled(between(*intervals))

    def paired(self, first: Measured, second: Measured, confidence: float) -> Interval:
        assert self.ratio is not None
        return self._scaled(paired(self.ratio(first), self.ratio(second), confidence))

    def _possible(self, interval: Interval) -> Interval:
        """Clips the interval to possible values."""
        return (
            Interval(interval.value, max(0.0, interval.low), min(self.most, interval.high))
            if interval.known
            else interval
        )

    def _scaled(self, interval: Interval) -> Interval:
        return Interval(*(number * self.scale for number in interval))


@dataclass(frozen=True, slots=True)
class ComparedLine:
    """One metric of an arm or a shadow, against the first arm's or the served drafters'."""

    metric: ComparedMetric
    first: Interval
    second: Interval
    difference: Interval

    def conclusion(self, name: str) -> str:
        """One sentence on the difference; `name` is the name of the second."""
        low, high = self.difference.low, self.difference.high
        if not self.difference.known:
            return "too few sessions"
        if low <= 0.0 <= high:
            return f"no difference shown ({number(low)} to {number(high)})"
        better = "better" if (low > 0.0) == (self.metric.sign > 0) else "worse"
        nearest, farthest = sorted((abs(low), abs(high)))
        return f"{name} is {better} by {number(nearest)} to {number(farthest)}"


DRAFTING = (
    ComparedMetric("acceptance rate", "", 1, 1.0, lambda of: ratio(of.accepted, of.drafted), most=1.0),
    ComparedMetric(
        "acceptance length", "", 1, 1.0, lambda of: ratio(of.rounds_with_drafts + of.accepted, of.rounds_with_drafts)
    ),
    ComparedMetric("tokens a round", "", 1, 1.0, lambda of: ratio(of.rounds + of.accepted, of.rounds)),
)
"""Metrics that shadows have too."""


def metrics(prices: Prices | None = None) -> list[ComparedMetric]:
    """All compared metrics; with prices, the cost of tokens too."""
    found = [
        *DRAFTING,
        *_times("TPOT", "ms", 1e3, lambda of: of.tpot_s),
        *_times("TTFT", "ms", 1e3, lambda of: of.ttft_s),
        *_times("E2E", "s", 1.0, lambda of: of.e2e_s),
    ]
    if prices is not None:
        found.append(ComparedMetric("cost of 1M tokens", "", -1, 1e6, lambda of: ratio(cost(of, prices), of.tokens)))
    return found


def _times(name: str, unit: str, scale: float, values: Callable[[Measured], Numbers]) -> list[ComparedMetric]:
    return [
        ComparedMetric(f"{name} mean", unit, -1, scale, lambda of: mean(values(of))),
        *(
            ComparedMetric(f"{name} p{100 * share:.0f}", unit, -1, scale, values=values, share=share)
            for share in (0.5, 0.95)
        ),
    ]


def cost(of: Measured, prices: Prices) -> Numbers:
    """Cost of each session, in the prices' currency."""
    return (of.verifier_s * prices.verifier + of.drafter_s * prices.drafter) / 3600.0


def compare(
    arms: Sequence[gateway_pb2.ExperimentArm], prices: Prices | None = None, confidence: float = CONFIDENCE
) -> dict[str, list[ComparedLine]]:
    """Each arm's metrics compared with the first arm's, by the arm's name; includes the first arm itself."""
    all_measured = [measured(arm.samples) for arm in arms]
    first = all_measured[0]
    return {
        arm.name: [
            ComparedLine(
                metric,
                metric.of(first, confidence),
                metric.of(own, confidence),
                metric.difference(first, own, confidence),
            )
            for metric in metrics(prices)
        ]
        for arm, own in zip(arms, all_measured, strict=True)
    }


def shadows(arm: gateway_pb2.ExperimentArm, confidence: float = CONFIDENCE) -> dict[str, list[ComparedLine]]:
    """Each shadow's metrics compared with the served drafters' in the same sessions, by the shadow's name."""
    lines = {}
    for name in watched(arm):
        samples = [sample for sample in arm.samples if name in sample.shadows]
        served, own = measured(samples), measured(samples, name)
        lines[name] = [
            ComparedLine(
                metric,
                metric.of(served, confidence),
                metric.of(own, confidence),
                metric.paired(served, own, confidence),
            )
            for metric in DRAFTING
        ]
    return lines


def watched(arm: gateway_pb2.ExperimentArm) -> list[str]:
    """Sorted names of the arm's shadows."""
    return sorted({name for sample in arm.samples for name in sample.shadows})


def measured(samples: Sequence[gateway_pb2.SessionSample], shadow: str = "") -> Measured:
    """Arrays of the samples; with `shadow`, its counts instead of the served drafters'."""
    drafts = [sample.shadows[shadow] if shadow else sample.served for sample in samples]
    own = {name: np.array([float(getattr(sample, name)) for sample in samples]) for name in MEASURES}
    counts = {name: np.array([float(getattr(draft, name)) for draft in drafts]) for name in COUNTS}
    return Measured(**own, **counts)


def reached(samples: Sequence[gateway_pb2.SessionSample], shadow: str = "") -> list[float]:
    """Share of rounds that accepted at least 1, 2, 3, ... candidates."""
    drafts = [sample.shadows[shadow] if shadow else sample.served for sample in samples]
    rounds = sum(draft.rounds for draft in drafts)
    depth = max((len(draft.reached) for draft in drafts), default=0)
    totals = [sum(draft.reached[at] for draft in drafts if at < len(draft.reached)) for at in range(depth)]
    return [total / rounds for total in totals]


def uneven(response: gateway_pb2.GetExperimentResponse) -> list[str]:
    """Sentences on arms in which more or fewer sessions began than chance allows: then arms were not assigned at
    random, and the comparison is invalid."""
    weights = weights_of(response)
    begun, whole = sum(arm.begun for arm in response.arms), sum(weights.values())
    bound = NormalDist().inv_cdf(1.0 - UNLIKELY / 2.0 / max(1, len(response.arms)))
    found = []
    for arm in response.arms:
        share = weights[arm.name] / whole
        if abs(arm.begun - begun * share) > bound * math.sqrt(begun * share * (1.0 - share)) + 1e-9:
            found.append(f"arm {arm.name} has {arm.begun} of {begun} sessions, its share is {begun * share:.0f}")
    return found


def weights_of(response: gateway_pb2.GetExperimentResponse) -> dict[str, int]:
    """Weights of the arms, by name."""
    return {name: int(weight) for name, weight in re.findall(r"([A-Za-z0-9_-]+): ([0-9]+)", response.arms_setting)}


def merge(parts: Sequence[gateway_pb2.GetExperimentResponse]) -> gateway_pb2.GetExperimentResponse:
    """Merges exactly what one gateway would have sampled: a gateway that dropped sessions kept those of lowest
    priority, so below the smallest of these gateways' highest priorities nothing is missing. Raises FailedPrecondition
    for different experiments."""
    first = parts[0]
    for other in parts[1:]:
        if (other.name, other.arms_setting) != (first.name, first.arms_setting):
            raise FailedPrecondition(
                f"the gateways run different experiments, {first.name} ({first.arms_setting}) and {other.name} "
                f"({other.arms_setting}); compare those of one.",
                reason="EXPERIMENTS_DIFFER",
            )
    arms = [_merge_arm([part.arms[index] for part in parts]) for index in range(len(first.arms))]
    return gateway_pb2.GetExperimentResponse(name=first.name, arms_setting=first.arms_setting, arms=arms)


def _merge_arm(parts: Sequence[gateway_pb2.ExperimentArm]) -> gateway_pb2.ExperimentArm:
    cut = [max(sample.priority for sample in part.samples) for part in parts if 0 < len(part.samples) < part.finished]
    known = {sample.priority: sample for part in parts for sample in part.samples}
    kept = [known[priority] for priority in sorted(known) if not cut or priority <= min(cut)]
    return gateway_pb2.ExperimentArm(
        name=parts[0].name,
        begun=sum(part.begun for part in parts),
        finished=sum(part.finished for part in parts),
        samples=kept,
    )


def number(value: float) -> str:
    """Formats with three significant digits and no exponent; NaN is `-`."""
    if math.isnan(value):
        return "-"
    digits = 0 if value == 0.0 else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 6)}f}"
