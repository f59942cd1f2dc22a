"""Number of prompt tokens that a step has room for, by predicted seconds and by those of steps with prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from verifier_svc.estimators.cost_curve import BUCKETS, CostCurve
from verifier_svc.scheduling.prefill import PROMPT_STEPS, SHORT_STEPS, PrefillShares, PromptCost, tokens_within
from verifier_svc.scheduling.step_shares import StepCosts
from verifier_svc.session import Session

PLAIN_EVERY = 16
"""While prompts come, one of so many steps that decode holds none: it shows what decoding takes by itself."""
OWN_WEIGHT, OWN_LEAST, OWN_MOST = 0.3, 0.25, 4.0
"""Weight of such a step, and the least and most that it counts as, by what the curve gives."""


class PromptRoom:
    def __init__(self, curve: CostCurve, step_tokens: int, prefill_tokens: int, prompt_step_s: float = 0.0) -> None:
        """`step_tokens`: most of one step; `prefill_tokens`: most of prompts beside sessions that decode;
        `prompt_step_s`: what a step with prompts may take beside them in any case, without separate tenants."""
        self._curve, self._prompt_step_s = curve, prompt_step_s
        self._step_tokens, self._prefill_tokens = step_tokens, prefill_tokens
        self._cost, self._shares = PromptCost(), PrefillShares()
        self._own_factor, self._mixed = 1.0, 0
        """Ratio of the time of steps without prompts to the curve's, and the number of steps with prompts since the
        last one."""

    @property
    def plain_next(self) -> bool:
        """Whether the next step that decodes is to hold no prompts."""
        return self._mixed >= PLAIN_EVERY - 1

    def divide(
        self, prompts: list[Session], tokens: int, sessions: int, limit_s: float, due: int = 0
    ) -> dict[Session, int]:
        """Tokens of each prompt that a step computes beside so many tokens of sessions that decode; `limit_s`: most
        seconds of the step, which may hold `due` tokens however long they take."""
        if sessions:
            least_s = self.least_s(prompts)
            room = max(self.beside(tokens, sessions, least_s, limit_s), min(due, self._prefill_tokens))
            room = min(room, self._step_tokens - tokens)
            room_s = self._own_factor * self._added_s(self._curve.seconds(tokens, sessions), least_s)
        else:
            costs = self.costs(prompts)
            room = max(1, tokens_within(lambda size: costs.whole(0, 0, size), costs.alone, limit_s))
            room_s = self._cost.factor * self._curve.seconds(room, 1)
        return self._shares.divide(prompts, room, self._cost.per_pair_s * room / room_s)

    def least_s(self, prompts: Sequence[Session]) -> float:
        """Seconds that a step with these prompts may take in any case."""
        return 0.0 if _tenants_told_apart(prompts) else self._prompt_step_s

    def beside(self, tokens: int, sessions: int, least_s: float = 0.0, limit_s: float = math.inf) -> int:
        """Most prompt tokens of a step with so many tokens of sessions that decode; one at least. The step takes
        `least_s` if that is more than two steps without prompts, and never more than `limit_s`."""
        own_s = self._curve.seconds(tokens, sessions)
        most = min(self._prefill_tokens, self._step_tokens - tokens)
        added_s = min(self._added_s(own_s, least_s), limit_s - own_s) * self._own_factor / self._cost.factor
        return max(1, tokens_within(lambda size: self._curve.seconds(tokens + size, sessions) - own_s, most, added_s))

    def _added_s(self, own_s: float, least_s: float) -> float:
        """Most seconds that prompts add, by the curve, to a step of so many."""
        return max(PROMPT_STEPS * own_s, least_s / self._own_factor - own_s)

    def costs(self, prompts: Sequence[Session]) -> StepCosts:
        """Costs of steps with these prompts, or with some of them."""
        added = self._cost.factor / self._own_factor
        return StepCosts(
            self._curve.seconds, self._curve.over, added, self.beside, self._alone(prompts), self._step_tokens
        )

    def _alone(self, prompts: Sequence[Session]) -> int:
        """Most prompt tokens of a step in which no session decodes: fewer where there are other tenants."""
        most = self._step_tokens
        if not _tenants_told_apart(prompts):
            return most
        least_s = SHORT_STEPS * self._curve.seconds(most, 1) / most
        return next((size for size in BUCKETS if self._curve.seconds(size, 1) <= size * least_s and size < most), most)

    def observe_plain(self, tokens: int, sessions: int, seconds: float) -> None:
        """A step without prompts."""
        share = seconds / self._curve.seconds(tokens, sessions)
        self._own_factor += OWN_WEIGHT * (min(max(share, OWN_LEAST), OWN_MOST) - self._own_factor)
        self._mixed = 0

    def observe(self, own: int, decoding: int, tokens: int, pairs: int, seconds: float) -> None:
        """A step of so many tokens with prompts: `own` of them are of the `decoding` sessions that decode, and `pairs`
        is the sum over the prompts' tokens of their contexts."""
        self._mixed += bool(decoding)
        own_s = self._curve.seconds(own, decoding) if decoding else 0.0
        curve_s = self._curve.seconds(tokens, max(1, decoding)) - own_s
        self._cost.observe(own_s * self._own_factor, curve_s, pairs, seconds)


def _tenants_told_apart(prompts: Sequence[Session]) -> bool:
    """Whether the gateway that sent them has API keys: another tenant's session may come at any time."""
    return any(session.request.tenant for session in prompts)
