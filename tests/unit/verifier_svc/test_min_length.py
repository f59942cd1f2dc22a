"""A least length: stop tokens are masked by the depth of each node, and only before it."""

from __future__ import annotations

import numpy as np

from verifier_svc.constraints import MinLengthConstraint

STOPS = (3, 9)


def forbidden(constraint: MinLengthConstraint, path: tuple[int, ...]) -> set[int]:
    mask = constraint.after(path)
    if mask is None:
        return set()
    return set(np.flatnonzero(np.unpackbits(mask, count=20, bitorder="little") == 0).tolist())


def test_stop_tokens_are_masked_until_the_length_is_reached_along_each_path() -> None:
    tokens = [1, 2, 3]
    constraint = MinLengthConstraint(tokens, 5, STOPS, 20, drawn=False)
    assert forbidden(constraint, ()) == forbidden(constraint, (7,)) == {3, 9}
    assert forbidden(constraint, (7, 7)) == set()
    tokens.append(4)
    assert forbidden(constraint, ()) == {3, 9} and forbidden(constraint, (7,)) == set()
    long, short = (constraint.beside(text, 1, lambda: None) for text in ([1] * 5, [1]))
    assert forbidden(long, ()) == set() and forbidden(short, (1, 1)) == {3, 9}


def test_a_candidate_that_cannot_be_chosen_has_no_place_in_the_tree() -> None:
    coupled = MinLengthConstraint([1, 2, 3], 5, STOPS, 20, drawn=False)
    assert not coupled.admits((), 3) and not coupled.admits((7,), 9) and coupled.admits((7, 7), 9)
    assert coupled.admits((), 7)
    drawn = MinLengthConstraint([1, 2, 3], 5, STOPS, 20, drawn=True)
    assert drawn.admits((), 3) and not drawn.admits((3,), 7) and drawn.admits((7, 8), 3)
