"""Decides how much of which prompts a step computes: as much as takes a decode step's time, divided among tenants.

**How much.** A step in which sessions decode takes at most 1 + `PROMPT_STEPS` times what it takes without prompts, so
no gap between two tokens is longer than two steps. Behind a gateway without API keys it may take
`VerifierConfig.prompt_step_s`: text still comes faster than it is read, and the more sessions decode together, the less
each token costs. Seconds come from the cost curve, which was measured on short contexts; `PromptCost` learns from steps
with prompts by which factor it errs, and what a token of context adds to each token of a prompt. Where no session
decodes, a step takes as many tokens as it can. Behind a gateway with API keys it is shorter, for another tenant's first
token would wait for it: as short as costs no more than `SHORT_STEPS` times as much per token.

**Whose.** Tenants share that time by deficit round robin (`slipstream.fair_shares`), lower priorities getting what
higher ones leave. A tenant's share goes half to its first prompt and half to the one that has the least left.

Where a prompt is cut changes no bit of its text (docs/exactness.md).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from slipstream.fair_shares import ROUNDING, DeficitRoundRobin, TenantDemand
from verifier_svc.session import Session

PROMPT_STEPS = 1.0
"""Prompts add so many times a step's own seconds to it at most."""
SHORT_STEPS = 1.25
"""Most that a prompt's token may cost in a short step, as a multiple of its cost in the longest one."""
FORGET = 0.95
"""Factor by which each step reduces the weight of the steps before it."""
PRIOR = 0.05
"""Weight of the belief that the curve is right, in steps of which prompts take all the time."""
OUTLIER = 2.0
"""A step counts as no more than so many times of what was expected: it may have been interrupted."""
LEAST_FACTOR = 0.25
MOST_WEIGHT = 4.0
"""Largest weight of a token for its context. A piece also reads its context once, however small it is: to make pieces
ever smaller for that would only have it read more often."""
ALIKE = 1e-6
"""Share of their variation by which two columns of the fit must differ."""


class Prompt(Protocol):
    @property
    def rank(self) -> tuple[int, float]:
        """Priority, then order of arrival; the lowest is served first."""

    @property
    def pending(self) -> int:
        """Tokens without KV."""


AnyPrompt = TypeVar("AnyPrompt", bound=Prompt)


def prefill_chunks(
    prompts: Sequence[AnyPrompt], room: float, cost: Callable[[AnyPrompt], float] = lambda prompt: 1.0
) -> dict[AnyPrompt, int]:
    """Tokens of each prompt that a step with `room` for prefill computes: half for those that came first, half for
    those that have the least left. So a long prompt goes on while others come, and does not hold them up. `cost` is
    what a token of the prompt takes of the room."""
    sizes = dict.fromkeys(prompts, 0)
    first = sorted(prompts, key=lambda prompt: prompt.rank)
    shortest = sorted(first, key=lambda prompt: (prompt.rank[0], prompt.pending))
    half = min(room // 2, max(0.0, room - cost(first[0]))) if first else 0.0
    for order, until in ((first, half), (shortest, 0.0)):
        for prompt in order:
            size = max(0, min(prompt.pending - sizes[prompt], int((room - until) / cost(prompt) + ROUNDING)))
            sizes[prompt] += size
            room -= size * cost(prompt)
    return {prompt: size for prompt, size in sizes.items() if size}


def tokens_within(seconds: Callable[[int], float], most: int, limit_s: float) -> int:
    """The most tokens, up to `most`, whose `seconds` are within the limit. `seconds` must not decrease."""
    return bisect_right(range(1, most + 1), limit_s, key=seconds) if most > 0 else 0


class PromptCost:
    """Cost that prompts add to a step, from the cost curve and from steps with prompts.

    Seconds beyond those of a step without prompts are modelled as factor * c + per_pair * pairs: c is what the curve
    gives, pairs the sum over the prompts' tokens of their contexts. Both numbers are a least-squares fit of errors
    relative to the step's seconds, in which old steps fade.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self.per_pair_s = 0.0
        self._cc, self._cp, self._pp, self._cy, self._py = PRIOR, 0.0, 0.0, PRIOR, 0.0

    def observe(self, own_s: float, curve_s: float, pairs: float, seconds: float) -> None:
        """A step of so many seconds: `own_s` are those without prompts and `curve_s` what the curve adds for them."""
        expected = own_s + self.factor * curve_s + self.per_pair_s * pairs
        added = min(seconds, OUTLIER * expected) - own_s
        c, p, y = curve_s / expected, pairs / expected, max(0.0, added / expected)
        self._cc, self._cp, self._pp = self._cc * FORGET + c * c, self._cp * FORGET + c * p, self._pp * FORGET + p * p
        self._cy, self._py = self._cy * FORGET + c * y, self._py * FORGET + p * y
        self._cc, self._cy = self._cc + (1.0 - FORGET) * PRIOR, self._cy + (1.0 - FORGET) * PRIOR
        self._fit()

    def _fit(self) -> None:
        """The best numbers within their bounds."""
        cc, cp, pp, cy, py = self._cc, self._cp, self._pp, self._cy, self._py
        apart = cc * pp - cp * cp
        differ = apart > ALIKE * cc * pp  # else pairs show nothing that the curve does not
        per_pair_s = max(0.0, (cc * py - cp * cy) / apart) if differ else 0.0
        factor = (cy - per_pair_s * cp) / cc
        if factor < LEAST_FACTOR:
            factor = LEAST_FACTOR
            per_pair_s = max(0.0, (py - factor * cp) / pp) if pp else 0.0
        self.factor, self.per_pair_s = factor, per_pair_s


class PrefillShares:
    """Divides the prompts' part of one step after another."""

    def __init__(self) -> None:
        self._turns: dict[int, DeficitRoundRobin[str]] = {}
        """By priority."""

    def divide(self, prompts: Sequence[Session], room: int, per_context: float = 0.0) -> dict[Session, int]:
        """Tokens of each prompt within `room` tokens; one behind n tokens of context counts as 1 + n * `per_context`,
        but as MOST_WEIGHT and half of the room at most, so that every prompt goes on."""
        chunks: dict[Session, int] = {}
        by_tenant: dict[int, dict[str, list[Session]]] = {}
        for prompt in prompts:
            by_tenant.setdefault(prompt.request.priority, {}).setdefault(prompt.request.tenant, []).append(prompt)

        def cost(prompt: Session) -> float:
            return max(1.0, min(1.0 + prompt.computed * per_context, MOST_WEIGHT, room / 2))

        left = float(room)
        self._turns = {priority: self._turns.get(priority) or DeficitRoundRobin() for priority in by_tenant}
        for priority in sorted(by_tenant):
            tenants = by_tenant[priority]
            if left < 1.0:
                break

            def spend(tenant: str, units: float, tenants: dict[str, list[Session]] = tenants) -> float:
                nonlocal left
                rests = [_Rest(each, each.pending - chunks.get(each, 0)) for each in tenants[tenant]]
                some = prefill_chunks([rest for rest in rests if rest.pending], units, lambda rest: cost(rest.prompt))
                for rest, size in some.items():
                    chunks[rest.prompt] = chunks.get(rest.prompt, 0) + size
                used = sum(size * cost(rest.prompt) for rest, size in some.items())
                left -= used
                return used

            demands = {
                tenant: TenantDemand(sum(each.pending * cost(each) for each in own), max(map(cost, own)))
                for tenant, own in tenants.items()
            }
            self._turns[priority].divide(left, demands, spend)
        return chunks


class _Rest:
    """Tokens of a prompt that have no place in the step yet."""

    def __init__(self, prompt: Session, pending: int) -> None:
        self.prompt, self.pending = prompt, pending
        self.rank = prompt.rank
