"""For which models a request may wait, because a verifier of theirs may not have answered yet."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gateway.routing.router import Router
from slipstream.v1 import types_pb2


@dataclass(eq=False)
class Place:
    """A verifier: without a name it has not answered, or does not fit the gateway's tokenizer."""

    name: str = ""
    fits: bool = True

    @property
    def answered(self) -> bool:
        return bool(self.name)

    @property
    def model(self) -> types_pb2.ModelInfo | None:
        return types_pb2.ModelInfo(name=self.name) if self.name and self.fits else None


@pytest.mark.parametrize(
    ("verifiers", "asked", "unreached"),
    [
        ([], "a", True),  # names are not resolved yet
        ([Place()], "", True),
        ([Place("a"), Place()], "", False),
        ([Place("a"), Place()], "a", False),
        ([Place("a"), Place()], "short", False),
        ([Place("a"), Place()], "b", True),
        ([Place("a"), Place("c")], "b", False),
        ([Place("a", fits=False)], "a", False),
        ([Place("a", fits=False), Place()], "a", True),
    ],
)
def test_only_what_a_verifier_that_has_not_answered_may_serve_is_waited_for(
    verifiers: list[Place], asked: str, unreached: bool
) -> None:
    router = Router()
    router.verifiers = verifiers  # type: ignore[assignment]
    router.aliases = {"short": "a"}
    assert router.unreached(asked) is unreached
