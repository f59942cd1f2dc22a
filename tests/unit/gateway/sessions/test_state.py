"""A session's states: no event that comes late takes it back to work, and a departure is never forgotten."""

from __future__ import annotations

from itertools import product

from gateway.sessions.state import SessionLife, SessionState

F, W, D, C, E, L = SessionState


def after(*states: SessionState) -> SessionLife:
    life = SessionLife()
    for state in states:
        life.enter(state)
    return life


def test_a_session_waits_and_decodes_by_turns_until_it_ends() -> None:
    assert [after(*states).state for states in ((), (W,), (W, D), (W, D, W), (W, D, E))] == [F, W, D, W, E]


def test_a_session_that_is_cancelled_ending_or_left_does_not_go_back_to_work() -> None:
    for late, state in product((W, D), (C, E, L)):
        assert after(W, state, late).state is state
    assert after(W, E, C).state is E and after(W, L, C).state is L and after(W, L, E).state is L


def test_when_a_run_ends_the_next_owner_is_followed_unless_every_client_left() -> None:
    for state, following in ((W, F), (D, F), (C, F), (E, F), (L, L)):
        life = after(W, state)
        life.end_run()
        assert life.state is following


def test_a_session_that_waits_is_the_only_one_that_needs_a_verifier_to_be_found() -> None:
    assert [state for state in SessionState if after(W, state).decoding] == [D, C]
