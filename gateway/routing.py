"""Pairing: which verifier decides a session, and which drafters guess for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from gateway.affinity import Affinity
from gateway.breaker import State
from gateway.drafters import Drafter
from gateway.verifiers import Verifier
from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound, PermissionDenied, Unavailable
from slipstream.v1 import gateway_pb2, types_pb2

DRAWS = "model"
"""The method whose guesses can be drawn from a distribution that is sent along."""
PREDICTS = "prediction"
"""The method that guesses from the request's prediction, and has nothing to say without one."""
BUSIER, SPARE = 1.5, 2
"""A verifier may have so many times the sessions of the least busy one, and so many more, and still be preferred."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """Who may draft for a session, for as long as it runs."""

    names: tuple[str, ...] = ()
    """Those that the request named: then it gets no others."""
    need_trust: bool = False
    predicted: bool = False
    """Whether there is a prediction to guess from."""
    among: tuple[str, ...] = ()
    """Those that a rule chose; empty: all."""


class Router:
    """Knows every worker; workers call `changed` when a choice might now be another one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.verifiers: list[Verifier] = []
        self.drafters: list[Drafter] = []
        self.affinity: Affinity[Verifier] = Affinity()
        self._news = asyncio.Event()

    @property
    def workers(self) -> list[Verifier | Drafter]:
        return [*self.verifiers, *self.drafters]

    def changed(self) -> None:
        """Wake everybody who waits in `news`."""
        self._news.set()
        self._news = asyncio.Event()

    async def news(self) -> None:
        """Wait until some worker came, went or changed its load."""
        await self._news.wait()

    def models(self) -> dict[str, types_pb2.ModelInfo]:
        """By name. Raises Unavailable while no verifier is known."""
        known = {verifier.model.name: verifier.model for verifier in self.verifiers if verifier.model is not None}
        if not known:
            problems = " ".join(verifier.mismatch for verifier in self.verifiers if verifier.mismatch)
            raise Unavailable(problems or "No verifier has been reached yet; retry.", reason="NO_VERIFIER")
        return known

    def model(self, name: str) -> types_pb2.ModelInfo:
        """Raises NotFound for an unknown name, InvalidArgument for none where several models are served."""
        known = self.models()
        if not name and len(known) > 1:
            raise InvalidArgument(f"Several models are served; name one of {', '.join(sorted(known))}.")
        if not name:
            return next(iter(known.values()))
        if name not in known:
            raise NotFound(f"There is no model {name!r}; choose one of {', '.join(sorted(known))}.", reason="NO_MODEL")
        return known[name]

    def place(self, model: str, avoid: Collection[Verifier] = (), beginnings: Sequence[bytes] = ()) -> Verifier | None:
        """The least loaded verifier of a model, best one where nobody waits for memory; but the one that has computed
        the text's beginning, unless it is much busier. None while there is none."""
        able = [
            verifier
            for verifier in self.verifiers
            if verifier.ready and verifier not in avoid and verifier.model and verifier.model.name == model
        ]
        least = min(able, key=lambda verifier: (verifier.crowded, verifier.sessions), default=None)
        known = self.affinity.find(beginnings)
        if least is None or known is None or known not in able or known.crowded:
            return least
        return known if known.sessions <= BUSIER * least.sessions + SPARE else least

    def pair(
        self,
        target: types_pb2.ModelInfo,
        names: Sequence[str],
        *,
        need_trust: bool,
        predicted: bool = False,
        among: Collection[str] = (),
    ) -> list[Drafter]:
        """The drafters of a request: those it names, else the least loaded of every method that fits, of all or, where
        a rule says so, `among` these. One that predicts only where something is `predicted`; none that failed of late.

        A rule that needs trust needs to know what each token was drawn from: it has one drafter, with a model.
        """
        if need_trust and len(set(names)) > 1:
            raise InvalidArgument(
                "This acceptance rule takes one drafter; name one, or use the rule coupled.", reason="SEVERAL_DRAFTERS"
            )
        if names:
            named = [self._named(name, target, need_trust) for name in dict.fromkeys(names)]
            if not predicted and (idle := next((drafter for drafter in named if drafter.method == PREDICTS), None)):
                raise InvalidArgument(
                    f"Drafter {idle.name} guesses from a prediction, and the request has none; send `prediction`, "
                    "or name another drafter.",
                    reason="NO_PREDICTION",
                )
            return named
        able = [drafter for drafter in self.drafters if drafter.trusted or not need_trust]
        if need_trust and not able:
            raise PermissionDenied(
                "This acceptance rule believes the drafter's q, and no drafter here is trusted; choose the rule "
                "coupled or have the operator list one in GATEWAY_TRUSTED_DRAFTERS.",
                reason="NO_TRUSTED_DRAFTER",
            )
        now = self.clock()
        able = self.able(target, Drafting((), need_trust, predicted, tuple(among)))
        return best_of_each_method(drafter for drafter in able if drafter.breaker.state(now) is State.CLOSED)

    def able(self, target: types_pb2.ModelInfo, drafting: Drafting) -> list[Drafter]:
        """Who could draft for a session now, whatever their breakers say. Those that it named need not be there yet:
        the verifier goes on dialling them."""
        fit = [drafter for drafter in self.drafters if not drafter.mismatch(target)]
        if drafting.names:
            return [drafter for drafter in fit if drafter.name in drafting.names]
        return [
            drafter
            for drafter in fit
            if drafter.present
            and not drafter.draining
            and (drafter.name in drafting.among if drafting.among else not drafter.reserved)
            and (drafting.predicted or drafter.method != PREDICTS)
            and (not drafting.need_trust or (drafter.trusted and drafter.method == DRAWS))
        ]

    def drafter(self, name: str) -> Drafter | None:
        return next((drafter for drafter in self.drafters if drafter.name == name), None)

    def predicts(self, name: str) -> bool:
        """Whether the drafter of this name guesses from predictions."""
        return any(drafter.name == name and drafter.method == PREDICTS for drafter in self.drafters)

    def served(self) -> gateway_pb2.ListModelsResponse:
        """Raises Unavailable while no verifier is known."""
        return gateway_pb2.ListModelsResponse(
            models=[
                gateway_pb2.ServedModel(
                    model=model,
                    verifiers=sum(1 for known in self.verifiers if known.model and known.model.name == name),
                    drafters=[drafter.as_served(model) for drafter in self.drafters],
                )
                for name, model in sorted(self.models().items())
            ]
        )

    def _named(self, name: str, target: types_pb2.ModelInfo, need_trust: bool) -> Drafter:
        drafter = self.drafter(name)
        if drafter is None:
            known = ", ".join(sorted(drafter.name for drafter in self.drafters)) or "none at all"
            raise NotFound(f"There is no drafter {name!r}; known are {known}.", reason="NO_DRAFTER")
        if need_trust and not drafter.trusted:
            raise PermissionDenied(
                f"Drafter {name} is not trusted, and this acceptance rule believes the drafter's q; choose the rule "
                "coupled or have the operator list the drafter in GATEWAY_TRUSTED_DRAFTERS.",
                reason="NO_TRUSTED_DRAFTER",
            )
        if need_trust and drafter.method not in ("", DRAWS):  # empty: not reached yet
            raise FailedPrecondition(
                f"Drafter {name} draws nothing, as this acceptance rule needs it; choose the rule coupled, which "
                f"accepts as much of its guesses, or a drafter with the method {DRAWS}.",
                reason="NO_DISTRIBUTION",
            )
        if mismatch := drafter.mismatch(target):
            raise FailedPrecondition(mismatch, reason="VOCABULARY_MISMATCH")
        return drafter


def best_of_each_method(drafters: Iterable[Drafter]) -> list[Drafter]:
    """Replicas of one method share the load; different methods feed the same tree."""
    best: dict[str, Drafter] = {}
    for drafter in drafters:
        known = best.get(drafter.method)
        if known is None or drafter.sessions < known.sessions:
            best[drafter.method] = drafter
    return list(best.values())
