"""For which sessions drafters draft, on made-up texts: what is gained, and what trying costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from verifier_svc.wait_policy.session_drafting import (
    CREDIT,
    LEAST,
    MOST_CREDIT,
    PAUSED,
    SETTLE,
    TRIED,
    SessionDrafting,
    TenantDrafting,
    slows,
)


def nothing(round: int) -> int:
    """Tokens of a round of a text that drafters guess nothing of."""
    return 1


def copied(round: int) -> int:
    return 3


def quoting(round: int) -> int:
    """An answer that begins to quote its prompt."""
    return 1 if round < 100 else 3


def observe(session: SessionDrafting, tokens: int, candidates: int, each: float, slowdown: float) -> None:
    if session.drafting:
        session.count(tokens, candidates, each)
    session.decide(slowdown)


@dataclass
class Decoding:
    """Sessions of one tenant on a verifier that drafting slows."""

    slowdown: float
    tenant: TenantDrafting = field(default_factory=TenantDrafting)
    tokens: int = 0
    time: float = 0.0

    def run(self, text: Callable[[int], int], rounds: int) -> list[bool]:
        """Whether each round of a new session was one with drafting; its candidates cost nothing."""
        return self.run_together(text, rounds, 1)[0]

    def run_together(self, text: Callable[[int], int], rounds: int, at_once: int) -> list[list[bool]]:
        """The same for several sessions that begin at once."""
        sessions = [self.tenant.new_session(self.slowdown) for _ in range(at_once)]
        drafted: list[list[bool]] = [[] for _ in sessions]
        for round in range(rounds):
            for session, its in zip(sessions, drafted, strict=True):
                tokens = text(round) if session.drafting else 1
                its.append(session.drafting)
                self.tokens += tokens
                self.time += self.slowdown if session.drafting else 1.0
                observe(session, tokens, tokens - 1, 0.0, self.slowdown)
        for session in sessions:
            session.end_try()
        return drafted


def test_where_drafting_slows_nothing_every_session_may_draft() -> None:
    tenant = TenantDrafting()
    tenant.credit = -1.0
    assert tenant.may_try(LEAST) and not slows(LEAST)
    assert not tenant.may_try(1.1) and slows(1.1)


def test_a_text_that_gains_nothing_pauses_and_the_next_one_drafts() -> None:
    """What one text gains says little of another."""
    decoding = Decoding(1.07)
    for _ in range(3):
        drafted = decoding.run(nothing, 80)
        assert drafted == [True] * (SETTLE + TRIED) + [False] * PAUSED + drafted[SETTLE + TRIED + PAUSED :]
        assert all(decoding.run(copied, 80))


def test_a_text_that_begins_to_quote_its_prompt_is_tried_again() -> None:
    drafted = Decoding(1.1).run(quoting, 400)
    assert not all(drafted[:100]) and all(drafted[300:])


@pytest.mark.parametrize("slowdown", [1.05, 1.3, 2.0])
@pytest.mark.parametrize("rounds", [64, 1000])
def test_tries_without_gain_cost_less_than_two_percent(slowdown: float, rounds: int) -> None:
    decoding = Decoding(slowdown)
    total = 0
    while decoding.tenant.credit > 0.0 and total < 20_000:  # what a tenant may lose at first
        decoding.run(nothing, rounds)
        total += rounds
    decoding.tokens, decoding.time = 0, 0.0
    for _ in range(20_000 // rounds):
        decoding.run(nothing, rounds)
    assert decoding.tokens / decoding.time > 0.98


@pytest.mark.parametrize("rounds", [SETTLE, 100])
@pytest.mark.parametrize("slowdown", [1.06, 1.3, 2.0])
def test_sessions_that_begin_at_once_lose_no_more_than_one_after_another(slowdown: float, rounds: int) -> None:
    """Texts that end before their tries do, and long ones."""
    decoding, lowest = Decoding(slowdown), CREDIT
    for _ in range(50):
        decoding.run_together(nothing, rounds, 16)
        lowest = min(lowest, decoding.tenant.credit)
    assert lowest >= -(SETTLE + TRIED) * (slowdown - 1.0)
    assert decoding.tokens / decoding.time > 0.98


def test_sessions_that_begin_at_once_all_draft_where_drafting_has_earned_their_tries() -> None:
    decoding = Decoding(1.3)
    for _ in range(4):
        decoding.run(copied, 200)
    assert all(map(all, decoding.run_together(copied, 40, 16)))


def test_a_tenant_loses_a_bounded_number_of_rounds_before_it_is_known() -> None:
    decoding = Decoding(2.0)
    while decoding.tenant.credit > 0.0:
        decoding.run(nothing, 20)
    assert decoding.time - decoding.tokens < 4 * CREDIT


@pytest.mark.parametrize("slowdown", [1.15, 1.25])
def test_one_text_in_ten_that_is_copied_pays_for_tries_in_vain(slowdown: float) -> None:
    """Every copied text is drafted for from its first round on, once drafting has earned something."""
    decoding = Decoding(slowdown)
    for round in range(200):
        drafted = decoding.run(nothing if round % 10 else copied, 100)
        assert round < 20 or any(drafted)
    assert decoding.tokens / decoding.time > 1.1


def test_the_credit_that_drafting_earned_is_lost_once_when_texts_cease_to_gain() -> None:
    decoding = Decoding(1.5)
    for _ in range(4):
        decoding.run(copied, 200)
    assert decoding.tenant.credit == MOST_CREDIT
    tokens, time = decoding.tokens, decoding.time
    while any(decoding.run(nothing, 50)):
        pass
    lost = (decoding.time - time) - (decoding.tokens - tokens)
    assert MOST_CREDIT <= lost < 1.2 * MOST_CREDIT
    assert not any(decoding.run(nothing, 50))  # until its rounds have earned a try


def test_candidates_that_cost_what_they_gain_do_not_pay() -> None:
    session = SessionDrafting()
    for _ in range(SETTLE + TRIED):
        observe(session, 2, 8, 0.125, 1.05)
    assert not session.drafting
    session = SessionDrafting()
    for _ in range(SETTLE + TRIED):
        observe(session, 2, 8, 0.05, 1.05)
    assert session.drafting


def test_rounds_before_the_first_candidates_do_not_count() -> None:
    session = SessionDrafting()
    for _ in range(SETTLE):
        observe(session, 1, 0, 0.0, 1.1)
    for _ in range(TRIED):
        observe(session, 2, 4, 0.1, 1.1)
    assert session.drafting and session.tenant.credit > CREDIT - 1.0  # what the first rounds took too long


def test_a_session_that_resumes_counts_anew() -> None:
    session = SessionDrafting()
    while session.drafting:
        observe(session, 1, 0, 0.0, 1.5)
    session.resume()
    assert session == SessionDrafting()


def test_rounds_before_a_slowdown_is_known_count() -> None:
    """A session that gained nothing all the while pauses as soon as drafting is found to slow it."""
    session = SessionDrafting()
    for _ in range(100):
        session.count(1, 0, 0.0)
    assert session.decide(1.1) and not session.drafting
