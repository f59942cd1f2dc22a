"""Which candidates a session is to have: by its request, else by a rule or its arm of the experiment."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from gateway.config import GatewayConfig
from gateway.routing.experiment import Arm
from gateway.routing.router import DrafterRequirements, Router
from gateway.routing.rules import NO_RULE, Rule, RuleInput, choose
from slipstream.errors import SlipstreamError
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionSize:
    """Tokens of a session."""

    prompt: int
    output: int
    """At most."""
    prediction: int


@dataclass(frozen=True, slots=True)
class SessionOrigin:
    """Whose session it is, and whether it began before."""

    key: str
    """Name of the caller's API key; empty on a gateway without keys."""
    session_id: str = ""
    """Empty for a session that takes no part in experiments."""
    again: bool = False
    """Missing drafters are no error then."""


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    max_draft_tokens: int
    """0: none."""
    drafting: DrafterRequirements
    drafters: tuple[verifier_pb2.DrafterAddress, ...]
    arm: str
    """Empty where the session takes no part in an experiment."""
    shadows: tuple[str, ...]


class SpeculationPlanner:
    def __init__(self, config: GatewayConfig, router: Router) -> None:
        self._most = config.max_draft_tokens
        self._router = router
        self._rules = config.parsed_rules()
        self._experiment = config.parsed_experiment()

    def plan(
        self,
        request: gateway_pb2.GenerateRequest,
        model: types_pb2.ModelInfo,
        sampling: SamplingParams,
        size: SessionSize,
        origin: SessionOrigin,
    ) -> SpeculationPlan:
        """Raises what the router raises for the drafters that a request names."""
        asked = request.speculation
        facts = RuleInput(request.workload, request.cache_salt, size.output, size.prompt, origin.key)
        rule = choose(self._rules, facts)
        arm = self._arm(origin.session_id, asked, rule, sampling)
        draft_tokens = self._draft_tokens(asked, rule, arm)
        methods = arm.rule.drafters if arm else rule.drafters
        predicted = size.prediction > 0
        drafting = DrafterRequirements(tuple(asked.drafters), sampling.drawn, predicted, methods, origin.key)
        return SpeculationPlan(
            draft_tokens,
            drafting,
            drafters=self._drafters(drafting, model, again=origin.again) if draft_tokens else (),
            arm=arm.name if arm else "",
            shadows=arm.shadows if arm and draft_tokens else (),
        )

    def _drafters(
        self, asked: DrafterRequirements, model: types_pb2.ModelInfo, *, again: bool
    ) -> tuple[verifier_pb2.DrafterAddress, ...]:
        """Empty for a session that is resolved `again` where the drafters it asked for are missing: its text does not
        depend on them, and it is given them as soon as they are there."""
        try:
            drafters = self._router.choose_drafters(model, asked)
        except SlipstreamError as error:
            if not again:
                raise
            log.info("a session goes on without the drafters that it asked for: %s", error.message)
            return ()
        return tuple(drafter.as_address() for drafter in drafters)

    def _arm(
        self, name: str, speculation: gateway_pb2.SpeculationOptions, rule: Rule, sampling: SamplingParams
    ) -> Arm | None:
        """The session's arm of the experiment. None where the request or a rule chose drafters, or none at all, and
        under a ratio rule, which has one trusted drafter. Limits on draft tokens hold in every arm."""
        most = speculation.max_draft_tokens if speculation.HasField("max_draft_tokens") else 1
        chosen = speculation.disabled or not most or speculation.drafters or rule.off or rule.drafters
        if self._experiment is None or not name or chosen or not sampling.coupled:
            return None
        return self._experiment.arm_of(name)

    def _draft_tokens(self, speculation: gateway_pb2.SpeculationOptions, rule: Rule, arm: Arm | None) -> int:
        """A request's own choice comes before the rule's; a rule's `off` is for requests that choose nothing."""
        done = NO_RULE if arm is None else arm.rule
        if speculation.disabled or done.off:
            return 0
        limit = min(self._most, done.max_draft_tokens or self._most)
        if speculation.HasField("max_draft_tokens"):
            return min(speculation.max_draft_tokens, limit)
        if rule.off and not speculation.drafters:
            return 0
        return min(rule.max_draft_tokens or limit, limit)
