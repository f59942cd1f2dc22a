"""Whom the gateway lets draft under a rule that must believe the drafter's q: one, trusted, that draws."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from gateway.routing.drafters import DrafterWorker
from gateway.routing.router import DrafterRequirements, Router
from slipstream.errors import FailedPrecondition, InvalidArgument, PermissionDenied, SlipstreamError
from slipstream.v1 import types_pb2, worker_pb2

TARGET = types_pb2.ModelInfo(name="target", vocabulary_fingerprint="f")


def router(**methods: str) -> Router:
    """Drafters by name: a method, and a star for one that nobody vouches for; more sessions for those named later."""
    known = Router()
    for number, (name, method) in enumerate(methods.items()):
        drafter = DrafterWorker(name, f"{name}:1", not method.endswith("*"), MagicMock(), known.changes.notify_all)
        presence = drafter._watch
        presence.method, presence.present = method.rstrip("*"), True
        presence.load = worker_pb2.WatchResponse(sessions=number)
        presence.model = types_pb2.ModelInfo(name=name)
        known.drafters.append(drafter)
    return known


def paired(known: Router, *names: str) -> list[str]:
    return [drafter.name for drafter in known.choose_drafters(TARGET, DrafterRequirements(names, need_trust=True))]


def test_the_least_loaded_trusted_model_alone_is_chosen() -> None:
    known = router(ngram="ngram", stranger="model*", first="model", second="model", suffix="suffix")
    assert paired(known) == ["first"]
    assert len(known.choose_drafters(TARGET, DrafterRequirements())) == 3


def test_one_drafter_may_be_named_under_a_ratio_rule() -> None:
    known = router(first="model", second="model")
    assert paired(known, "second") == paired(known, "second", "second") == ["second"]


def test_without_a_model_drafter_no_drafter_is_chosen() -> None:
    assert paired(router(ngram="ngram")) == []


@pytest.mark.parametrize(
    ("names", "error", "reason"),
    [
        (("first", "second"), InvalidArgument, "SEVERAL_DRAFTERS"),
        (("ngram",), FailedPrecondition, "NO_DISTRIBUTION"),
        (("stranger",), PermissionDenied, "NO_TRUSTED_DRAFTER"),
    ],
)
def test_drafters_that_a_ratio_rule_cannot_use_are_refused_before_any_work(
    names: tuple[str, ...], error: type[SlipstreamError], reason: str
) -> None:
    known = router(first="model", second="model", ngram="ngram", stranger="model*")
    with pytest.raises(error) as caught:
        paired(known, *names)
    assert caught.value.reason == reason
