"""What an autoscaler makes of rising traffic: the share of requests beyond the objective while new verifiers start.

usage: python -m benchmarks.autoscaling

Verifiers whose time per token is that of `slipstream plan examples/plan/h100-l4.toml`: 28 ms on average (40 at the 95th
percentile) with 35 sessions. The horizontal pod autoscaler's rule every 15 s, by metrics that are 25 s old.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.records import Row, write

OUTPUT, OBJECTIVE_S = 250, 0.028
"""Tokens of an answer, and the mean time of one that is allowed."""
METRICS_AGE_S, LOOKS_S, ADDS_S, REMOVES_S, STABLE_S, TOLERANCE = 25, 15, 30, 120, 600, 0.1
"""The manifests' and Kubernetes' own."""
LEAST, MOST = 2, 8
Traffic = Callable[[int], float]
"""Requests a second, by second."""
TRAFFIC: dict[str, tuple[Traffic, int]] = {
    "8 to 24 requests/s at once": (lambda t: 8.0 if t < 600 else 24.0, 5400),
    "24 requests/s for 3 minutes, else 8": (lambda t: 24.0 if 600 <= t < 780 else 8.0, 5400),
    "8 to 24 requests/s over 30 minutes": (lambda t: min(24.0, 8.0 + max(0.0, 16.0 * (t - 600) / 1800)), 7200),
}
SETTINGS = {"threshold 32, no bound": (32, 1024), "22, bound 64": (22, 64)}
"""Sessions of a verifier: at which there is to be another one, and that it takes at most."""


@dataclass(frozen=True, slots=True)
class Seen:
    beyond: float
    """Share of all requests that were answered more slowly than the objective."""
    refused: float
    slowest_s: float
    """The longest mean time of a token."""
    pod_hours: float


def time_per_token_s(sessions: float) -> float:
    return 0.009 + 0.00055 * sessions


def simulated(traffic: Traffic, seconds: int, cold_start_s: int, threshold: int, bound: int) -> Seen:
    """Second by second; sessions are evenly divided among ready verifiers."""
    ready = pods = LEAST
    coming: list[int] = []
    wanted: list[tuple[int, int]] = []
    sessions, added_at, removed_at = 0.0, -math.inf, -math.inf
    log: list[float] = []
    arrived = beyond = refused = slowest = pod_s = 0.0
    for now in range(seconds):
        while coming and coming[0] <= now:
            coming.pop(0)
            ready += 1
        begun = min(traffic(now), max(0.0, bound * ready - sessions))
        sessions += begun
        time_s = time_per_token_s(sessions / ready)
        sessions = max(0.0, sessions - sessions / (OUTPUT * time_s))
        arrived += traffic(now)
        refused += traffic(now) - begun
        beyond += begun if time_s > OBJECTIVE_S else 0.0
        slowest = max(slowest, time_s)
        pod_s += pods
        log.append(sessions)
        if now % LOOKS_S or now <= METRICS_AGE_S:
            continue
        ratio = log[now - METRICS_AGE_S] / threshold / pods
        want = pods if abs(ratio - 1.0) <= TOLERANCE else min(MOST, max(LEAST, math.ceil(ratio * pods)))
        wanted = [(at, many) for at, many in wanted if at > now - STABLE_S] + [(now, want)]
        if want > pods and now - added_at >= ADDS_S:
            after = min(want, max(2 * pods, pods + 2))
            coming += [now + cold_start_s] * (after - pods)
            pods, added_at = after, now
        elif max(many for _, many in wanted) < pods and now - removed_at >= REMOVES_S:
            pods, removed_at = pods - 1, now
            if coming:
                coming.pop()
            else:
                ready -= 1
    return Seen(beyond / arrived, refused / arrived, slowest, pod_s / 3600.0)


def main() -> None:
    rows: list[Row] = []
    for name, (traffic, seconds) in TRAFFIC.items():
        for cold_start_s in (180, 600, 900):
            row: Row = {"traffic": name, "cold start, min": cold_start_s // 60}
            for setting, (threshold, bound) in SETTINGS.items():
                seen = simulated(traffic, seconds, cold_start_s, threshold, bound)
                row |= {
                    f"{setting}: beyond %": 100.0 * seen.beyond,
                    "refused %" + " " * (threshold == 22): 100.0 * seen.refused,
                    "slowest TPOT, ms" + " " * (threshold == 22): 1e3 * seen.slowest_s,
                    "pod hours" + " " * (threshold == 22): seen.pod_hours,
                }
            rows.append(row)
    write("autoscaling", "python -m benchmarks.autoscaling", rows)


if __name__ == "__main__":
    main()
