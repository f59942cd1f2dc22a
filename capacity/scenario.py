"""The input of a plan: a TOML or JSON file."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from capacity.cell import Request
from capacity.cost import Cost, read_cost
from capacity.names import refuse_unknown
from capacity.settings import Acceptance, DraftSettings, Verifying
from measurement.experiments.comparison import Prices
from slipstream.engine.emulated.model import ALTERNATIVES
from slipstream.errors import InvalidArgument, NotFound

Kind = TypeVar("Kind")
REST_SAMPLES = 4096
SEEDS = 64


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of prompts or outputs: log-normal, or drawn from `values`."""

    mean: float = 0.0
    cv: float = 0.0
    """Standard deviation over mean; 0: all are alike."""
    values: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.values and min(self.values) < 1:
            raise InvalidArgument("lengths have values of 1 token or more.")
        if not self.values and (self.mean < 1.0 or self.cv < 0.0):
            raise InvalidArgument("lengths have a mean of 1 token or more and a cv of 0 or more, or a list of values.")

    @property
    def average(self) -> float:
        return float(np.mean(self.values)) if self.values else self.mean

    def sample(self, draws: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        if self.values:
            return draws.choice(np.array(self.values), count)
        variance = math.log(1.0 + self.cv**2)
        sizes = draws.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), count)
        return np.maximum(1, sizes.round().astype(np.int64))

    def rest(self, draws: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """Tokens to go of sessions that are found at some moment, long ones the more often."""
        sizes = self.sample(draws, REST_SAMPLES)
        found = draws.choice(sizes, count, p=sizes / sizes.sum())
        return np.ceil(found * (1.0 - draws.random(count))).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Traffic:
    prompt: Lengths
    output: Lengths
    rate: float = 0.0
    """Requests a second."""
    concurrency: float = 0.0
    """Instead of `rate`: sessions at once, on average over time. How many requests a second they make depends on how
    fast they are served."""

    def __post_init__(self) -> None:
        if min(self.rate, self.concurrency) < 0.0 or (self.rate and self.concurrency):
            raise InvalidArgument(
                "[traffic] has a rate, requests a second, or a concurrency, sessions at once: not both."
            )

    @property
    def volume(self) -> str:
        return f"{self.concurrency:g} sessions at once" if self.concurrency else f"{self.rate:g} requests/s"

    def poisson(self, rate: float, seed: int = 0) -> Iterator[Request]:
        """Without end."""
        gaps, draws = random.Random(seed), np.random.default_rng(seed)
        while True:
            for prompt, output in zip(self.prompt.sample(draws, 256), self.output.sample(draws, 256), strict=True):
                yield gaps.expovariate(rate), int(prompt), int(output)

    def typical_seed(self, rate: float, seconds: float) -> int:
        """The seed, of SEEDS, whose requests within so many seconds bring the most ordinary numbers of tokens. Few
        requests may bring a tenth more or less than on average, and near the SLO that is all the difference."""

        def unlike(seed: int) -> float:
            now, prompts, outputs = 0.0, 0, 0
            for gap, prompt, output in self.poisson(rate, seed):
                now += gap
                if now > seconds:
                    break
                prompts, outputs = prompts + prompt, outputs + output
            count = rate * seconds
            return max(abs(prompts / self.prompt.average / count - 1), abs(outputs / self.output.average / count - 1))

        return min(range(SEEDS), key=unlike)


@dataclass(frozen=True, slots=True)
class Slo:
    ttft_p95_s: float = math.inf
    tpot_p95_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Region:
    """Its traffic follows the sun: highest at `peak_hour` (UTC), `low` of that twelve hours later."""

    name: str
    peak_rate: float
    peak_hour: float
    low: float = 0.25

    def rate(self, hour: float) -> float:
        swing = 0.5 * (1.0 + math.cos((hour - self.peak_hour) / 24.0 * math.tau))
        return self.peak_rate * (self.low + (1.0 - self.low) * swing)


@dataclass(frozen=True, slots=True)
class Network:
    """One way, in seconds."""

    drafter_s: float | None = None
    """From a drafter to its verifier; None: `delay_s` of the drafter."""
    client_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Colocated:
    cost: Cost | None = None
    kv_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    traffic: Traffic
    slo: Slo
    prices: Prices
    verifying: Verifying
    drafting: DraftSettings
    colocated: Cost | None = None
    """A pass of the draft model on the verifier's device; None: co-located speculation is not considered."""
    colocated_kv_tokens: int | None = None
    """KV tokens that the draft model leaves there; None: all."""
    client_s: float = 0.0
    regions: Sequence[Region] = field(default_factory=tuple)


def read(path: Path) -> Scenario:
    """Raises NotFound for a file that is not there, InvalidArgument for what cannot be read."""
    return parse(_load(path), path.parent)


def parse(given: Mapping[str, Any], folder: Path = Path()) -> Scenario:
    """Files that costs name are looked for in `folder`."""
    known = {"name", "traffic", "slo", "prices", "verifier", "drafter", "acceptance", "colocated", "network", "regions"}
    refuse_unknown("a plan", given, known)
    for key in known - {"name", "regions"}:
        if not isinstance(given.get(key, {}), Mapping):
            raise InvalidArgument(f"{key} is {given[key]!r}; write a table, [{key}].")
    parts = {key: dict(value) for key, value in given.items() if isinstance(value, Mapping)}
    for part in ("verifier", "drafter", "colocated"):
        if part in parts:
            parts[part]["cost"] = _cost(parts[part].get("cost"), part, folder)
    traffic = parts.get("traffic", {})
    network = _build(Network, parts.get("network", {}), "network")
    colocated = _build(Colocated, parts.get("colocated", {}), "colocated")
    lengths = {key: _build(Lengths, traffic.pop(key, {}), f"traffic.{key}") for key in ("prompt", "output")}
    acceptance = _acceptance(parts.get("acceptance", {}))
    delay = {} if network.drafter_s is None else {"delay_s": network.drafter_s}
    return Scenario(
        name=str(given.get("name", "")),
        traffic=_build(Traffic, traffic | lengths, "traffic"),
        slo=_build(Slo, parts.get("slo", {}), "slo"),
        prices=_build(Prices, parts.get("prices", {}), "prices"),
        verifying=_build(Verifying, parts.get("verifier", {}) | {"acceptance": acceptance}, "verifier"),
        drafting=_build(DraftSettings, parts.get("drafter", {}) | delay, "drafter"),
        colocated=colocated.cost,
        colocated_kv_tokens=colocated.kv_tokens,
        client_s=network.client_s,
        regions=tuple(_build(Region, region, "regions") for region in given.get("regions", ())),
    )


def _acceptance(given: dict[str, Any]) -> Acceptance:
    if "rate" in given:
        given["by_depth"] = [given.pop("rate")]
    acceptance = _build(Acceptance, given, "acceptance")
    shares = [*acceptance.by_depth, acceptance.fanout]
    if not acceptance.by_depth or not all(0.0 <= share <= 1.0 for share in shares):
        raise InvalidArgument("[acceptance] has a rate, or by_depth, and fanout, all from 0 to 1.")
    if not 1 <= acceptance.width <= 1 + len(ALTERNATIVES):
        raise InvalidArgument(f"[acceptance] width is from 1 to {1 + len(ALTERNATIVES)}.")
    return acceptance


def _cost(given: object, part: str, folder: Path) -> Cost:
    if isinstance(given, str):
        given = _load(folder / given)
    if not isinstance(given, Mapping):
        raise InvalidArgument(f"[{part}] needs a cost: a table of base_s and more, or the name of a measured file.")
    return read_cost(given, f"[{part}] cost")


def _build(kind: type[Kind], given: Mapping[str, Any], where: str) -> Kind:
    if not isinstance(given, Mapping):
        raise InvalidArgument(f"[{where}] is {given!r}; write a table.")
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    known = {each.name for each in fields}
    required = {f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING}
    refuse_unknown(f"[{where}]", given, known)
    if missing := required - set(given):
        raise InvalidArgument(f"[{where}] needs {', '.join(sorted(missing))}.")
    for each in fields:
        value = given.get(each.name, 0)
        if str(each.type).partition(" ")[0] in ("int", "float") and (isinstance(value, bool) or not _number(value)):
            raise InvalidArgument(f"[{where}] {each.name} is {value!r}; write a number.")
    return kind(**given)


def _number(value: object) -> bool:
    return isinstance(value, int | float)


def _load(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text("utf-8")
        loaded = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError as error:
        raise NotFound(f"there is no file {path}.") from error
    except ValueError as error:
        raise InvalidArgument(f"{path} cannot be read: {error}.") from error
    if not isinstance(loaded, dict):
        raise InvalidArgument(f"{path} holds no table.")
    return loaded
