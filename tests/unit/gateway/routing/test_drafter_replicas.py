"""Drafters that requests know by one name: who is chosen, and what their clients and verifiers are told."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from gateway.requests.resolved_request import ResolvedRequest
from gateway.routing.breaker import BreakerState
from gateway.routing.drafters import DrafterWorker, replica
from gateway.routing.router import DrafterRequirements, Router
from gateway.routing.verifier_session import Received
from gateway.routing.verifiers import VerifierWorker
from gateway.sessions.drafter_assignment import LOOK_S, DrafterAssignment
from gateway.sessions.request_stats import RequestStats
from slipstream.errors import NotFound, PermissionDenied
from slipstream.v1 import types_pb2, verifier_pb2, worker_pb2

TARGET = types_pb2.ModelInfo(name="target", vocabulary_fingerprint="f", vocabulary_size=9, max_length=99)
LENGTH = 5


class Fleet:
    """Replicas of a pool `model`, and of one `ngram`, on a clock that stands still."""

    def __init__(self) -> None:
        self.now = 0.0
        self.router = Router(lambda: self.now)
        self.router.pools = {"model": True, "ngram": False, "later": True}

    def add(self, number: int, *, pool: str = "model", sessions: int = 0, present: bool = True) -> DrafterWorker:
        address = f"10.0.0.{number}:1"
        drafter = DrafterWorker(replica(pool, address), address, True, MagicMock(), self.router.changes.notify_all)
        presence = drafter._watch
        presence.method, presence.present = pool, present
        presence.load = worker_pb2.WatchResponse(sessions=sessions)
        self.router.drafters.append(drafter)
        return drafter

    def pair(self, *names: str, need_trust: bool = False) -> list[DrafterWorker]:
        return self.router.choose_drafters(TARGET, DrafterRequirements(names, need_trust))

    def assign(self, *names: str) -> DrafterAssignment:
        drafters = tuple(drafter.as_address() for drafter in self.pair(*names))
        plan = MagicMock(
            ResolvedRequest, drafters=drafters, max_draft_tokens=8, model=TARGET, drafting=DrafterRequirements(names)
        )
        return DrafterAssignment(plan, self.router)

    def reassigned(self, assigned: DrafterAssignment) -> list[str]:
        """The addresses that the session's verifier is told from now on."""
        self.now += LOOK_S
        assigned.reassign(LENGTH, hurry=False)
        return [address.address for address in assigned.addresses]


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.mark.parametrize("names", [(), ("model",)])
def test_the_least_loaded_present_replica_drafts(fleet: Fleet, names: tuple[str, ...]) -> None:
    fleet.add(1, sessions=1)
    fleet.add(2, sessions=9)
    fleet.add(3, present=False)
    fleet.add(4)._watch.load.draining = True
    assert [drafter.address for drafter in fleet.pair(*names)] == ["10.0.0.1:1"]


def test_a_named_pool_whose_replicas_are_all_away_is_dialled_and_an_empty_one_waited_for(fleet: Fleet) -> None:
    away = fleet.add(1, present=False)
    assert fleet.pair("model") == [away]
    assert fleet.pair("later") == []
    with pytest.raises(NotFound, match="known are later, model, ngram"):
        fleet.pair(away.name)


def test_a_model_is_listed_with_drafters_that_are_away_and_verifiers_that_pause(fleet: Fleet) -> None:
    failing, away = fleet.add(1), fleet.add(2, present=False)
    for drafter in (failing, away, fleet.add(3, pool="ngram", present=False)):
        drafter._watch.model = TARGET
    failing.breaker.failed(object(), types_pb2.Failure(reason="PROTOCOL"), fleet.now)
    known = {"model": TARGET, "weights": "w", "started_ms": 1, "arithmetic": "w/float32"}
    states = (("slow", True), ("", True), ("", False))
    fleet.router.verifiers += [
        MagicMock(VerifierWorker, pause_cause=cause, present=present, **known) for cause, present in states
    ]
    [served] = fleet.router.list_models().models
    assert (served.verifiers, served.verifiers_away, served.paused_verifiers) == (2, 1, 1)
    assert served.pause_causes == ["slow"]
    assert {each.name: each.away for each in served.drafters} == {"model": False, "ngram": True, "later": False}


def test_a_name_keeps_its_trust_while_it_has_no_replica(fleet: Fleet) -> None:
    assert fleet.pair(need_trust=True) == fleet.pair("later", need_trust=True) == []
    with pytest.raises(PermissionDenied, match="ngram is not trusted"):
        fleet.pair("ngram", need_trust=True)


def test_a_replica_with_an_open_breaker_is_not_chosen_for_its_name(fleet: Fleet) -> None:
    broken, good = fleet.add(1), fleet.add(2, sessions=9)
    broken.breaker.failed(object(), types_pb2.Failure(reason="PROTOCOL"), 0.0)
    assert broken.breaker.state(0.0) is BreakerState.OPEN
    assert fleet.pair("model") == [good]


def test_one_with_another_vocabulary_is_passed_over(fleet: Fleet) -> None:
    odd, good = fleet.add(1), fleet.add(2, sessions=9)
    odd._watch.model = types_pb2.ModelInfo(name="odd", vocabulary_fingerprint="other")
    assert fleet.pair("model") == [good]
    served = {
        one.name: one.mismatch for one in (fleet.router._describe_drafter(name, TARGET) for name in fleet.router.pools)
    }
    assert list(served) == ["model", "ngram", "later"] and "not been reached" in served["later"]


@pytest.mark.parametrize("names", [(), ("model",)])
def test_a_session_takes_one_of_each_and_another_when_its_own_drains(fleet: Fleet, names: tuple[str, ...]) -> None:
    first = fleet.add(1)
    fleet.add(2, sessions=1)
    assigned = fleet.assign(*names)
    assert fleet.reassigned(assigned) == ["10.0.0.1:1"]
    first._watch.load.draining = True
    assert fleet.reassigned(assigned) == ["10.0.0.2:1"]
    assert first.users == 0


@pytest.mark.parametrize("names", [(), ("model",)])
def test_a_drafter_that_drains_is_not_left_for_a_dead_one(fleet: Fleet, names: tuple[str, ...]) -> None:
    first = fleet.add(1)
    assigned = fleet.assign(*names)
    fleet.add(2, present=False)
    first._watch.load.draining = True
    assert fleet.reassigned(assigned) == ["10.0.0.1:1"]


@pytest.mark.parametrize("names", [(), ("model",)])
async def test_a_drafter_that_was_removed_is_detached_even_without_a_replacement(
    fleet: Fleet, names: tuple[str, ...]
) -> None:
    only = fleet.add(1)
    only._channel.close = MagicMock(side_effect=noop)  # type: ignore[method-assign]
    assigned = fleet.assign(*names)
    only._watch.present = False
    assert fleet.reassigned(assigned) == ["10.0.0.1:1"]  # it may come back
    await only.close()
    fleet.router.drafters.remove(only)
    assert fleet.reassigned(assigned) == []
    fleet.add(2)
    assert fleet.reassigned(assigned) == ["10.0.0.2:1"]


async def noop() -> None:
    return None


def test_a_failure_of_one_replica_does_not_open_the_breaker_of_another(fleet: Fleet) -> None:
    bad, good = fleet.add(1), fleet.add(2, sessions=1)
    assigned = fleet.assign()
    (told,) = assigned.addresses
    event = verifier_pb2.DrafterEvent(drafter=told.name, failure=types_pb2.Failure(reason="PROTOCOL"))
    assigned.apply_received(Received([], [event], None))
    assert (bad.breaker.state(fleet.now), good.breaker.state(fleet.now)) == (BreakerState.OPEN, BreakerState.CLOSED)
    assert fleet.reassigned(assigned) == ["10.0.0.2:1"]


def test_clients_see_the_replicas_of_a_drafter_as_one_drafter(fleet: Fleet) -> None:
    stats = RequestStats(lambda: 0.0, 0.0)
    for number in (1, 2):
        share = verifier_pb2.DrafterShare(drafter=fleet.add(number).name, drafted=3, accepted=2)
        stats.add_round(verifier_pb2.Round(drafters=[share]))
    assert [(one.name, one.drafted, one.accepted) for one in stats.statistics().drafters] == [("model", 6, 4)]
