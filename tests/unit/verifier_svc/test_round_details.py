"""Who sent an accepted candidate, what a further token is, and when drafters worked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.speculation.selection import ROOT, Selection
from slipstream.v1 import types_pb2, verifier_pb2
from verifier_svc.rounds.round_details import MOST_SPANS, DraftTimes, RoundDetailObserver, add_origins

NAMES = {1: "model", 2: "ngram"}
TREE = Selection(
    token_ids=(10, 11, 20),
    parents=(ROOT, 0, ROOT),
    depths=(1, 2, 1),
    sources=((1, 2), (1,), (2,)),
)
"""10 by both, 11 behind it by the model, and 20 beside it by the n-grams."""


class Fake:
    """A session with two drafters."""

    def drafters_of(self, sources: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(sorted(NAMES[source] for source in sources))


def result(path: tuple[int, ...], tokens: list[int], selection: Selection = TREE, session: Any = None) -> Any:
    return SimpleNamespace(
        scheduled=SimpleNamespace(session=session or Fake(), selection=selection),
        result=SimpleNamespace(path=path),
        token_ids=tokens,
        accepted=min(len(path), len(tokens)),
        timing=SimpleNamespace(ended=2.0),
    )


def message(*names: str) -> verifier_pb2.Round:
    return verifier_pb2.Round(drafters=[verifier_pb2.DrafterShare(drafter=name) for name in names])


@pytest.mark.parametrize(
    ("path", "tokens", "model", "ngram", "bonus"),
    [
        ((0, 1), [10, 11, 7], [0, 1], [0], True),
        ((0,), [10, 7], [0], [0], False),  # in the place of 11
        ((2,), [20, 7], [], [0], True),
        ((), [7], [], [], False),
        ((0, 1), [10], [0], [0], False),  # cut by a limit: there is no further token
    ],
)
def test_each_accepted_candidate_has_its_senders_and_the_token_behind_it_its_kind(
    path: tuple[int, ...], tokens: list[int], model: list[int], ngram: list[int], bonus: bool
) -> None:
    told = message("model", "ngram")
    add_origins(result(path, tokens), told)
    assert [list(share.accepted_places) for share in told.drafters] == [model, ngram]
    assert told.bonus is bonus


def test_without_candidates_nothing_is_a_bonus() -> None:
    told = message()
    add_origins(result((), [7], Selection()), told)
    assert not told.bonus


def test_a_drafters_time_is_from_the_new_root_to_its_last_candidates() -> None:
    times = DraftTimes()
    times.begin(1, 1.0)
    times.receive(1, 3, 1.5)
    times.receive(1, 2, 1.75)
    assert not list(times.take(9.0))  # it may go on
    times.begin(1, 1.8)
    assert not list(times.take(1.7))  # its candidates came after that step
    [done] = times.take(9.0)
    assert (done.began, done.ended, done.candidates) == (1.0, 1.75, 5)
    times.begin(1, 1.9)  # nothing came for the root before
    assert not list(times.take(9.0))


def test_times_are_bounded() -> None:
    times = DraftTimes()
    for source in range(2 * MOST_SPANS):
        times.begin(source, 0.0)
        times.receive(source, 1, 1.0)
        times.begin(source, 2.0)
    assert len(list(times.take(9.0))) == MOST_SPANS
    assert not list(times.take(9.0))


def test_only_sessions_that_ask_have_details() -> None:
    observer, candidates = RoundDetailObserver(), types_pb2.Candidates(token_ids=[10, 11])
    for asks in (True, False):
        session: Any = Fake()
        observer.session_opened(session, verifier_pb2.DecodeOpen(round_details=asks))
        observer.drafter_informed(session, 1, 5, 0.5)
        observer.candidates_received(session, 1, candidates, 1.5)
        observer.drafter_informed(session, 1, 6, 2.0)
        told = message("model", "ngram")
        observer.annotate_round(result((0, 1), [10, 11, 7], session=session), told)
        assert told.bonus is asks and bool(told.drafters[0].accepted_places) is asks
        spans = [verifier_pb2.DraftSpan(drafter="model", began_us=1_500_000, ended_us=500_000, candidates=2)]
        assert list(told.drafts) == (spans if asks else [])
        observer.session_ended(session)
        again = message("model", "ngram")
        observer.annotate_round(result((0, 1), [10, 11, 7], session=session), again)
        assert again == message("model", "ngram")
