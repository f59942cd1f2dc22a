"""Chooses the verifier that decodes a session and the drafters that propose for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from gateway.routing.breaker import BreakerState
from gateway.routing.discovery import Discovery
from gateway.routing.drafters import DrafterWorker, unreached_yet
from gateway.routing.verifier_choice import PrefixAffinity, arithmetic_of, choose, newest_weights
from gateway.routing.verifiers import VerifierWorker
from slipstream.concurrency import Broadcast
from slipstream.errors import (
    FIELD_MISSING,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
)
from slipstream.proposers.registry import METHODS, gives_distribution, needs_prediction
from slipstream.v1 import gateway_pb2, types_pb2

POOL: Callable[[DrafterWorker], str] = attrgetter("pool")
METHOD: Callable[[DrafterWorker], str] = attrgetter("method")


@dataclass(frozen=True, slots=True)
class DrafterRequirements:
    """Which drafters may propose for a session, for as long as it runs."""

    names: tuple[str, ...] = ()
    """Drafters that the request named: then it gets no others."""
    need_trust: bool = False
    predicted: bool = False
    """Whether the request has a predicted output."""
    among: tuple[str, ...] = ()
    """Drafters that a rule chose; empty: all."""
    tenant: str = ""
    """Whose session it is: breakers are tenants'."""


class Router:
    """Holds every worker; workers notify `changes` when a choice might now be another one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.verifiers: list[VerifierWorker] = []
        self.drafters: list[DrafterWorker] = []
        self.discoveries: list[Discovery[VerifierWorker] | Discovery[DrafterWorker]] = []
        """DNS names whose addresses are added to these lists and removed from them."""
        self.pools: dict[str, bool] = {}
        """Configured drafter names, some perhaps not reached yet, and whether they are trusted."""
        self.aliases: Mapping[str, str] = {}
        """Models by further names of theirs; an empty name for the only one."""
        self.affinity: PrefixAffinity[VerifierWorker] = PrefixAffinity()
        self.changes = Broadcast()
        """Notified whenever a worker came, went or changed its load."""

    @property
    def workers(self) -> list[VerifierWorker | DrafterWorker]:
        return [*self.verifiers, *self.drafters]

    @property
    def ready(self) -> bool:
        """Whether a verifier can serve."""
        return any(verifier.ready for verifier in self.verifiers)

    def unreached(self, name: str) -> bool:
        """Whether no known verifier serves the model of this name, or alias, but one that has not answered since this
        gateway started may."""
        known = {verifier.model.name for verifier in self.verifiers if verifier.model is not None}
        if name in known or self.aliases.get(name, name) in known or (known and not name):
            return False
        return not self.verifiers or not all(verifier.answered for verifier in self.verifiers)

    @property
    def longest(self) -> int:
        """Most tokens of a text of any model; 0 while no verifier is known."""
        return max((each.model.max_length for each in self.verifiers if each.model is not None), default=0)

    def models(self) -> dict[str, types_pb2.ModelInfo]:
        """The models served, by name: of several weights the newest. Raises Unavailable while no verifier is known."""
        names = [verifier.model.name for verifier in self.verifiers if verifier.model is not None]
        known = {name: model for name in dict.fromkeys(names) if (model := self._newest_model(name)) is not None}
        if not known:
            problems = " ".join(verifier.mismatch for verifier in self.verifiers if verifier.mismatch)
            raise Unavailable(problems or "No verifier has been reached yet; retry.", reason="NO_VERIFIER")
        return known

    def model(self, name: str) -> types_pb2.ModelInfo:
        """The model of this name, or alias. Raises NotFound for an unknown name, InvalidArgument for none where several
        models are served."""
        known = self.models()
        name = name if name in known else self.aliases.get(name, name)
        if not name and len(known) > 1:
            raise InvalidArgument(
                f"Several models are served; name one of {', '.join(sorted(known))}.",
                reason=FIELD_MISSING,
                field="model",
            )
        if not name:
            return next(iter(known.values()))
        if name not in known:
            raise NotFound(
                f"There is no model {name!r}; choose one of {', '.join(sorted(known))}.",
                reason="NO_MODEL",
                field="model",
            )
        return known[name]

    def choose_verifier(
        self,
        model: str,
        avoid: Collection[VerifierWorker] = (),
        prefixes: Sequence[bytes] = (),
        arithmetic: str = "",
    ) -> VerifierWorker | None:
        """The verifier for a session, of those that are ready (`verifier_choice.choose`). With `arithmetic` only those
        of that name. None while there is none."""
        able = [
            each
            for each in self._of_model(model)
            if each.ready and each not in avoid and arithmetic in ("", each.arithmetic)
        ]
        return choose(able, newest_weights(self._present(model)), self.affinity.find(prefixes))

    def _of_model(self, name: str) -> list[VerifierWorker]:
        return [verifier for verifier in self.verifiers if verifier.model is not None and verifier.model.name == name]

    def _present(self, name: str) -> list[VerifierWorker]:
        """The model's verifiers that answer; all that are known where none does."""
        known = self._of_model(name)
        return [verifier for verifier in known if verifier.present] or known

    def _newest_model(self, name: str) -> types_pb2.ModelInfo | None:
        present = self._present(name)
        newest = newest_weights(present)
        models = [each.model for each in present if each.model is not None and each.weights == newest]
        if not models:
            return None
        chosen = min(models, key=arithmetic_of)
        least = min(model.max_length for model in models)  # any of them may have to take a session over
        if chosen.max_length == least:
            return chosen
        shortened = types_pb2.ModelInfo()
        shortened.CopyFrom(chosen)
        shortened.max_length = least
        return shortened

    def arithmetics(self, name: str) -> list[gateway_pb2.ServedArithmetic]:
        """Those of a model's verifiers, the newest weights first."""
        present = self._present(name)
        newest = newest_weights(present)
        pools: dict[str, list[VerifierWorker]] = {}
        for verifier in present:
            pools.setdefault(verifier.arithmetic, []).append(verifier)
        found = [
            gateway_pb2.ServedArithmetic(
                arithmetic=each,
                verifiers=sum(each.present for each in pool),
                batch_invariant=bool(pool[0].model and pool[0].model.batch_invariant),
                newest=pool[0].weights == newest,
            )
            for each, pool in pools.items()
        ]
        return sorted(found, key=lambda each: (not each.newest, each.arithmetic))

    def choose_drafters(self, target: types_pb2.ModelInfo, drafting: DrafterRequirements) -> list[DrafterWorker]:
        """The drafters of a request: those it names, else the least loaded of every method that fits, of all or of
        those that a rule chose. A drafter of predicted output only where the
        request has one; none whose breaker is open.

        A rule with `need_trust` needs the distribution that each token was drawn from: it has one drafter.
        """
        if drafting.need_trust and len(set(drafting.names)) > 1:
            raise InvalidArgument(
                "This acceptance rule takes one drafter; name one, or use the rule coupled.",
                reason="SEVERAL_DRAFTERS",
                field="speculation.drafters",
            )
        if drafting.names:
            names = dict.fromkeys(drafting.names)
            named = [found for name in names if (found := self._find_named(name, target, drafting))]
            _check_predicted(named, drafting)
            return named
        if drafting.need_trust:
            self._check_trusted()
        now = self.clock()
        able = self.candidates_for(target, drafting)
        return least_loaded_of_each(
            METHOD, (each for each in able if each.breaker.state(now, drafting.tenant) is BreakerState.CLOSED)
        )

    def candidates_for(self, target: types_pb2.ModelInfo, drafting: DrafterRequirements) -> list[DrafterWorker]:
        """The drafters that could propose for a session now, whatever their breakers' states. Those that it named need
        not answer yet: the verifier goes on dialling them."""
        fit = [drafter for drafter in self.drafters if not drafter.mismatch(target)]
        if drafting.names:
            named = [
                d
                for d in fit
                if d.pool in drafting.names and (gives_trusted_distribution(d) or not drafting.need_trust)
            ]
            least = {best.pool: best.burden[:2] for best in least_loaded_of_each(POOL, named)}
            return [drafter for drafter in named if drafter.burden[:2] == least[drafter.pool]]
        return [
            drafter
            for drafter in fit
            if drafter.present
            and not drafter.draining
            and (drafter.pool in drafting.among if drafting.among else not drafter.reserved)
            and (drafting.predicted or not needs_prediction(drafter.method))
            and (not drafting.need_trust or (drafter.trusted and gives_distribution(drafter.method)))
        ]

    def choose_shadows(self, target: types_pb2.ModelInfo, names: Collection[str]) -> list[DrafterWorker]:
        """For each of these names the replica to use as a shadow, if one can work now."""
        now = self.clock()
        able = (
            drafter
            for drafter in self.drafters
            if drafter.pool in names
            and drafter.present
            and not drafter.draining
            and not drafter.mismatch(target)
            and drafter.breaker.state(now) is BreakerState.CLOSED
        )
        return least_loaded_of_each(POOL, able)

    def target_of(self, verifier: VerifierWorker) -> str:
        """The verifier as the configuration names it: its address, or the DNS name that it was found behind."""
        return next((each.target for each in self.discoveries if each.found(verifier)), verifier.address)

    def drafter(self, name: str) -> DrafterWorker | None:
        """The drafter with the name that verifiers use."""
        return next((drafter for drafter in self.drafters if drafter.name == name), None)

    def predicts(self, name: str) -> bool:
        """Whether the drafter of this name proposes from predicted outputs."""
        return any(needs_prediction(drafter.method) for drafter in self._replicas(name))

    def list_models(self) -> gateway_pb2.ListModelsResponse:
        """Raises Unavailable while no verifier is known."""
        models = [self.describe_model(name, model) for name, model in sorted(self.models().items())]
        return gateway_pb2.ListModelsResponse(models=models)

    def describe_model(self, name: str, model: types_pb2.ModelInfo) -> gateway_pb2.ServedModel:
        """Describes a model and its workers; only those that answer are counted as serving it."""
        verifiers = self._of_model(name)
        present = [verifier for verifier in verifiers if verifier.present]
        causes = [verifier.pause_cause for verifier in present if verifier.pause_cause]
        return gateway_pb2.ServedModel(
            model=model,
            verifiers=len(present),
            verifiers_away=len(verifiers) - len(present),
            drafters=[self._describe_drafter(each, model) for each in self._names()],
            paused_verifiers=len(causes),
            pause_causes=sorted(set(causes)),
            arithmetics=self.arithmetics(name),
        )

    def describe_fleet(self) -> list[gateway_pb2.FleetWorker]:
        """Every worker, verifiers first. A drafter is compared with the first model."""
        target = next(iter(self.models().values()), None)
        drafters = [drafter.as_fleet_worker(target) for drafter in self.drafters]
        return [*(verifier.as_fleet_worker() for verifier in self.verifiers), *drafters]

    def _names(self) -> list[str]:
        return list(dict.fromkeys([*self.pools, *(drafter.pool for drafter in self.drafters)]))

    def _replicas(self, name: str) -> list[DrafterWorker]:
        return [drafter for drafter in self.drafters if drafter.pool == name]

    def _best_replica(self, name: str, target: types_pb2.ModelInfo, tenant: str | None = None) -> DrafterWorker | None:
        """The replica to choose; one with another vocabulary only if none fits."""
        now = self.clock()
        return min(
            self._replicas(name),
            key=lambda each: (
                bool(each.mismatch(target)),
                each.breaker.state(now, tenant) is not BreakerState.CLOSED,
                each.burden,
            ),
            default=None,
        )

    def _describe_drafter(self, name: str, target: types_pb2.ModelInfo) -> gateway_pb2.ServedDrafter:
        drafter = self._best_replica(name, target)
        if drafter is None:
            return gateway_pb2.ServedDrafter(name=name, mismatch=unreached_yet(name))
        served = drafter.as_served(target)
        away = [replica.away for replica in self._replicas(name)]
        served.replicas, served.replicas_away = away.count(False), away.count(True)
        served.away = all(away)
        return served

    def _check_trusted(self) -> None:
        if not any([*self.pools.values(), *(drafter.trusted for drafter in self.drafters)]):
            raise PermissionDenied(
                "This acceptance rule believes the drafter's q, and no drafter here is trusted; choose the rule "
                "coupled or have the operator list one in GATEWAY_TRUSTED_DRAFTERS.",
                reason="NO_TRUSTED_DRAFTER",
            )

    def _find_named(
        self, name: str, target: types_pb2.ModelInfo, drafting: DrafterRequirements
    ) -> DrafterWorker | None:
        """The drafter that a request names; None while no replica of it is known. Raises as `choose_drafters` does."""
        if name not in self._names():
            known = ", ".join(sorted(self._names())) or "none at all"
            raise NotFound(
                f"There is no drafter {name!r}; known are {known}.", reason="NO_DRAFTER", field="speculation.drafters"
            )
        drafter, need_trust = self._best_replica(name, target, drafting.tenant), drafting.need_trust
        if need_trust and not (self.pools.get(name, False) if drafter is None else drafter.trusted):
            raise PermissionDenied(
                f"Drafter {name} is not trusted, and this acceptance rule believes the drafter's q; choose the rule "
                "coupled or have the operator list the drafter in GATEWAY_TRUSTED_DRAFTERS.",
                reason="NO_TRUSTED_DRAFTER",
            )
        if drafter is None:
            return None
        if need_trust and not gives_trusted_distribution(drafter):
            draws = " or ".join(name for name in METHODS if gives_distribution(name))
            raise FailedPrecondition(
                f"Drafter {name} samples from no distribution, which this acceptance rule needs; choose the rule "
                f"coupled, which accepts as much of its candidates, or a drafter with the method {draws}.",
                reason="NO_DISTRIBUTION",
            )
        if mismatch := drafter.mismatch(target):
            raise FailedPrecondition(mismatch, reason="VOCABULARY_MISMATCH")
        return drafter


def _check_predicted(named: Iterable[DrafterWorker], drafting: DrafterRequirements) -> None:
    idle = next((drafter for drafter in named if needs_prediction(drafter.method)), None)
    if idle is not None and not drafting.predicted:
        raise InvalidArgument(
            f"Drafter {idle.pool} guesses from a prediction, and the request has none; send `prediction`, or name "
            "another drafter.",
            reason="NO_PREDICTION",
            field="prediction",
        )


def gives_trusted_distribution(drafter: DrafterWorker) -> bool:
    """Whether a ratio rule may use the drafter: trusted, and with a distribution q for each draft token."""
    return drafter.trusted and (not drafter.method or gives_distribution(drafter.method))  # empty: not reached yet


def least_loaded_of_each(key: Callable[[DrafterWorker], str], drafters: Iterable[DrafterWorker]) -> list[DrafterWorker]:
    """The least loaded drafter of each `key`: replicas share the load; different methods feed the same tree."""
    best: dict[str, DrafterWorker] = {}
    for drafter in drafters:
        known = best.get(key(drafter))
        if known is None or drafter.burden < known.burden:
            best[key(drafter)] = drafter
    return list(best.values())
