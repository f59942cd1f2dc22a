"""Pairing: which verifier decides a session, and which drafters guess for it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence

from gateway.drafters import Drafter
from gateway.verifiers import Verifier
from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound, PermissionDenied, Unavailable
from slipstream.v1 import gateway_pb2, types_pb2


class Router:
    """Knows every worker; workers call `changed` when a choice might now be another one."""

    def __init__(self) -> None:
        self.verifiers: list[Verifier] = []
        self.drafters: list[Drafter] = []
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

    def place(self, model: str, avoid: Collection[Verifier] = ()) -> Verifier | None:
        """The least loaded verifier of a model, None while there is none."""
        able = [
            verifier
            for verifier in self.verifiers
            if verifier.ready and verifier not in avoid and verifier.model and verifier.model.name == model
        ]
        return min(able, key=lambda verifier: verifier.sessions, default=None)

    def pair(self, target: types_pb2.ModelInfo, names: Sequence[str], *, need_trust: bool) -> list[Drafter]:
        """The drafters of a request: those it names, else the least loaded of every method that fits."""
        if names:
            return [self._named(name, target, need_trust) for name in dict.fromkeys(names)]
        able = [drafter for drafter in self.drafters if drafter.trusted or not need_trust]
        if need_trust and not able:
            raise PermissionDenied(
                "This acceptance rule believes the drafter's q, and no drafter here is trusted; choose the rule "
                "coupled or have the operator list one in GATEWAY_TRUSTED_DRAFTERS.",
                reason="NO_TRUSTED_DRAFTER",
            )
        return _best_of_each_method(
            drafter for drafter in able if drafter.present and not drafter.draining and not drafter.mismatch(target)
        )

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
        drafter = next((known for known in self.drafters if known.name == name), None)
        if drafter is None:
            known = ", ".join(sorted(drafter.name for drafter in self.drafters)) or "none at all"
            raise NotFound(f"There is no drafter {name!r}; known are {known}.", reason="NO_DRAFTER")
        if need_trust and not drafter.trusted:
            raise PermissionDenied(
                f"Drafter {name} is not trusted, and this acceptance rule believes the drafter's q; choose the rule "
                "coupled or have the operator list the drafter in GATEWAY_TRUSTED_DRAFTERS.",
                reason="NO_TRUSTED_DRAFTER",
            )
        if mismatch := drafter.mismatch(target):
            raise FailedPrecondition(mismatch, reason="VOCABULARY_MISMATCH")
        return drafter


def _best_of_each_method(drafters: Iterable[Drafter]) -> list[Drafter]:
    """Replicas of one method share the load; different methods feed the same tree."""
    best: dict[str, Drafter] = {}
    for drafter in drafters:
        known = best.get(drafter.method)
        if known is None or drafter.sessions < known.sessions:
            best[drafter.method] = drafter
    return list(best.values())
