"""A cell's long-run state without simulating every request: what makes fleets of any size computable.

**Rates.** For some numbers n of sessions that decode, a closed simulation of the cell (`rates`) gives the tokens a
second that a verifier commits, g(n), and how long a step takes, s(n). This is where speculation, its budget, waiting,
drafters and the network enter, step by step. Between the measured n it is linear.

**Sessions.** Requests come to a verifier as a Poisson process of rate a; its sessions share its tokens evenly. That is
a processor-sharing queue whose speed depends on its state. Its number of sessions is a birth-death chain with births a
and deaths (1 - f) g(n) / E[output], f the share of time that prompts take; it is stationary for any distribution of
output lengths with that mean, since such queues are insensitive to it (Kelly, "Reversibility and Stochastic Networks",
1979; Cohen, "The multiple phase service network with generalized processor sharing", 1979). More sessions than there is
room for wait, at the speed of a full verifier.

**Latencies.** A request that comes finds the chain in its stationary state (Poisson arrivals see time averages). Its
tokens take n / g(n) each and what the prompts add that are read meanwhile; its first one waits for the rest of a step,
and for prompts that are read before and beside its own, a piece a step. Means are good; of the tails this is an
estimate, and a plan simulates the cell that it chooses step by step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np
import numpy.typing as npt

from capacity.cell import Cell, Simulation
from capacity.emulation import MOST_KV_TOKENS
from capacity.scenario import Traffic
from capacity.workers import curve_of
from verifier_svc.scheduling.prompt_room import PromptRoom

ENDLESS = MOST_KV_TOKENS >> 1
"""Output tokens of a session that does not end while it is watched."""
SESSION_ROUNDS, LEAST_ROUNDS, WARM_ROUNDS = 800, 12, 10
"""Rounds that are simulated for one number of sessions: of all together, of each, and before the count."""
SAMPLES = 4096
GRID, GRID_PROMPTS = 16, 256
"""Numbers of sessions for which the time of prompts is computed, and prompts that it is averaged over."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rates:
    """Rates of one verifier of a cell, by sessions that decode on it."""

    sessions: Sequence[int]
    tokens_per_s: Sequence[float]
    step_s: Sequence[float]
    step_tokens: Sequence[float]
    """Computed in a step: committed ones and candidates."""
    tokens_per_round: Sequence[float]
    drafters_busy: Sequence[float]

    def speed(self, sessions: Array) -> Array:
        """Tokens a second; constant beyond the last."""
        return np.interp(sessions, [0, *self.sessions], [0.0, *self.tokens_per_s])

    def step(self, sessions: Array) -> Array:
        return np.interp(sessions, self.sessions, self.step_s)


def rates(cell: Cell, most: int) -> Rates:
    """For 1, 2, 4, ... `most` sessions a verifier."""
    sizes = sorted({*(1 << power for power in range(most.bit_length())), most})
    rows = [_closed(cell, size) for size in sizes]
    return Rates(sizes, *(list(column) for column in zip(*rows, strict=True)))


def _closed(cell: Cell, sessions: int) -> tuple[float, ...]:
    """The columns of `Rates`."""
    count = sessions * cell.verifiers
    rounds = max(LEAST_ROUNDS, SESSION_ROUNDS // count)
    step_s = cell.verifying.cost(2 * sessions, sessions)
    with Simulation(
        replace(cell, client_s=0.0, verifying=replace(cell.verifying, kv_tokens=MOST_KV_TOKENS))
    ) as running:
        running.open_closed_loop(repeat((1, ENDLESS), count), count)
        running.observe((WARM_ROUNDS + rounds // 8) * step_s)
        seen = running.observe(running.now + rounds * step_s)
    steps = max(1, seen.steps)
    return (
        seen.tokens_per_s / cell.verifiers,
        seen.seconds * cell.verifiers / steps,
        seen.computed / steps,
        seen.tokens / steps / sessions,
        seen.drafters_busy,
    )


@dataclass(frozen=True)
class CellState:
    """Long-run state of one verifier."""

    rate: float
    """Requests a second."""
    stable: bool
    inside: float
    """Sessions that decode, on average."""
    waiting: float
    """Sessions that wait for room, on average."""
    tpot: Array
    """SAMPLES draws of what a request finds, in seconds; a billion where the verifier is overloaded."""
    ttft: Array

    def tpot_s(self, share: float) -> float:
        return float(np.quantile(self.tpot, share))

    def ttft_s(self, share: float) -> float:
        return float(np.quantile(self.ttft, share))


class Cells:
    """The long-run state of a kind of cell by its load."""

    def __init__(self, cell: Cell, traffic: Traffic, measured: Rates | None = None) -> None:
        """`measured`: the rates of this cell, if they are known."""
        self.cell = cell
        self._traffic = traffic
        draws = np.random.default_rng(0)
        self._uniform = draws.random((2, SAMPLES))
        self._normal = draws.standard_normal((2, SAMPLES))
        self._prompts = traffic.prompt.sample(draws, SAMPLES).astype(float)
        self._outputs = traffic.output.sample(draws, SAMPLES).astype(float)
        length = traffic.prompt.average + traffic.output.average
        self.room = max(1, min(cell.verifying.sessions, int(cell.verifying.kv_tokens / length)))
        self.rates = measured or rates(cell, self.room)
        verifying = cell.verifying
        limits = verifying.step_tokens, verifying.prefill_tokens, verifying.prompt_step_s
        self._room = PromptRoom(curve_of(verifying.cost), *limits)
        self._grid = np.unique(np.geomspace(1, self.room, GRID).astype(int))
        self._pieces = np.array([self._piece(n) for n in self._grid], dtype=float)
        """Tokens of prompts that fit into a step."""
        extras = [self._extra(n, int(size)) for n, size in zip(self._grid, self._pieces, strict=True)]
        self._chunk = self.rates.step(self._grid.astype(float)) + extras
        """Seconds of a step that reads as much of prompts as fits, by sessions on the grid."""
        self._prefill = np.array([self._added(n) for n in self._grid])
        """Seconds that the prompt of one request adds to steps, on average."""
        sizes = np.minimum(self._prompts, cell.verifying.step_tokens).astype(int).tolist()
        seconds = np.array([cell.verifying.cost(size, 1) + cell.verifying.host_s for size in sizes])
        self._alone = np.ceil(self._prompts / cell.verifying.step_tokens) * seconds
        """Seconds of each prompt on a verifier that has nothing else to do."""

    def at(self, rate: float) -> CellState:
        """With `rate` requests a second to each verifier."""
        sessions = np.arange(1, self.room + 1, dtype=float)
        speeds = self.rates.speed(sessions) * np.clip(1.0 - rate * self._on_grid(self._prefill, sessions), 1e-9, 1.0)
        # The first token comes of the prompt.
        deaths = speeds / max(self._traffic.output.average - 1.0, 1e-3)
        if rate >= deaths[-1]:
            return self._overloaded(rate)
        weights = np.concatenate(([0.0], np.cumsum(np.log(rate / deaths))))
        full = rate / deaths[-1]
        weights = np.exp(weights - weights.max())
        queued = weights[-1] * full / (1.0 - full)  # a geometric tail behind the full verifier
        whole = weights.sum() + queued
        waiting = queued / (1.0 - full) / whole
        inside = float((np.arange(self.room + 1) * weights).sum() + self.room * queued) / whole
        if rate * self._reading_s(np.array([inside]))[0] >= 1.0:
            return self._overloaded(rate)
        chances = np.append(weights, 0.0)
        chances[self.room] += queued
        found = np.searchsorted(np.cumsum(chances) / whole, self._uniform[0])
        present = np.minimum(found + 1, self.room).astype(float)
        tpot = self._tpot(rate, present)
        ttft = self._ttft(rate, found.astype(float), present) + np.where(found >= self.room, waiting / rate, 0.0)
        return CellState(rate, True, inside, float(waiting), tpot, ttft)

    def _tpot(self, rate: float, present: Array) -> Array:
        """Seconds per token of sessions of many lengths beside so many others. In the life of one, prompts come by
        chance, and each slows it down; and it has luck with its candidates: tokens a round are spread about as a
        geometric distribution."""
        tokens = np.maximum(self._outputs - 1.0, 1.0)
        pure = present / self.rates.speed(present)
        mean_s = self._on_grid(self._prefill, present)
        life_s = tokens * pure / np.maximum(1.0 - rate * mean_s, 0.01)
        prompts = np.random.default_rng(0).poisson(rate * life_s)
        spread = mean_s * (1.0 + self._traffic.prompt.cv) * np.sqrt(prompts) * self._normal[0]
        delayed = np.maximum(prompts * mean_s + spread, 0.0)
        rounds = np.interp(present, self.rates.sessions, self.rates.tokens_per_round)
        luck = np.maximum(1.0 + np.sqrt((rounds - 1.0).clip(0.0) / tokens) * self._normal[1], 1.0 / rounds)
        seconds: Array = pure * luck + delayed / tokens
        return seconds

    def _overloaded(self, rate: float) -> CellState:
        never = np.full(SAMPLES, 1e9)
        return CellState(rate, False, float(self.room), math.inf, never, never)

    def _ttft(self, rate: float, found: Array, present: Array) -> Array:
        """Seconds to the first token of requests that find so many sessions: the rest of a step, then their own prompt
        in pieces, slowed down by the prompts of others."""
        busy = np.minimum(rate * self._reading_s(present), 0.99)
        pieces = np.ceil(self._prompts / self._on_grid(self._pieces, present))
        shared = pieces * self._on_grid(self._chunk, present) / (1.0 - busy)
        rest = self._uniform[1] * self.rates.step(present)
        seconds: Array = 2.0 * self.cell.client_s + np.where(found > 0.0, rest + shared, self._alone)
        return seconds

    def _reading_s(self, sessions: Array) -> Array:
        """Seconds of steps that the prompt of one request takes, where each reads as much as fits."""
        chunks = self._traffic.prompt.average / self._on_grid(self._pieces, sessions)
        seconds: Array = chunks * self._on_grid(self._chunk, sessions)
        return seconds

    def _on_grid(self, seconds: Array, sessions: Array) -> Array:
        return np.interp(sessions, self._grid, seconds)

    def _piece(self, sessions: int) -> int:
        verifying = self.cell.verifying
        # Candidates leave prompts their part of a step (`verifier_svc.scheduling.planner`), though a step without
        # prompts may be full of them.
        reserved = min(self._room.beside(sessions, sessions, verifying.prompt_step_s), verifying.step_tokens // 2)
        return max(reserved, self._room.beside(self._decoding(sessions), sessions, verifying.prompt_step_s))

    def _decoding(self, sessions: int) -> int:
        """Tokens of a step without prompts."""
        return int(np.interp(sessions, self.rates.sessions, self.rates.step_tokens))

    def _added(self, sessions: int) -> float:
        chunk = self._piece(sessions)
        whole, rest = np.divmod(self._prompts[:GRID_PROMPTS], chunk)
        ends = [self._extra(sessions, int(tokens)) for tokens in rest]
        return float(np.mean(whole)) * self._extra(sessions, chunk) + float(np.mean(ends))

    def _extra(self, sessions: int, tokens: int) -> float:
        """Seconds that so many tokens of a prompt add to a step of so many sessions."""
        if not tokens:
            return 0.0
        verifying, decoding = self.cell.verifying, self._decoding(sessions)
        drafted = 0.0 if verifying.draft is None else verifying.draft(tokens, 1)
        return verifying.cost(decoding + tokens, sessions + 1) - verifying.cost(decoding, sessions) + drafted
