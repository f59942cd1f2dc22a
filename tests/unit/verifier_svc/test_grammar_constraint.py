"""Candidates that a grammar forbids never come into a tree, and never end a session."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import FailedPrecondition
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.frame import Frame
from slipstream.tokenizer.grammar import Cursor
from slipstream.tokenizer.structured_output import StructuredOutput
from tests.grammars import END, LANGUAGES, allowed, compiled, place, tokenizer
from verifier_svc.grammar_constraint import MOST_FAILURES, GrammarConstraint

Path = tuple[int, ...]
PROMPT = [9, 8, 7]


def constrained(
    structure: StructuredOutput, tokens: list[int], *, drawn: bool = False
) -> tuple[GrammarConstraint, CandidateTree]:
    constraint = GrammarConstraint(compiled(structure), tokens, len(PROMPT), drawn=drawn)
    tree = CandidateTree(tokens)
    tree.admits = constraint.admits
    return constraint, tree


def paths(tree: CandidateTree) -> set[Path]:
    chosen = tree.select(10_000)
    return {chosen.path(node) for node in range(len(chosen))}


def frame(base: int, nodes: list[Path], generation: int = 0) -> Frame:
    """Nodes named by their paths; each hangs on the first that has its beginning."""
    parents = tuple(nodes.index(path[:-1]) + 1 if len(path) > 1 else 0 for path in nodes)
    return Frame(base, generation, 1, tuple(path[-1] for path in nodes), (-0.5,) * len(nodes), parents)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_tree_holds_all_that_can_be_said_and_nothing_else(data: st.DataObject) -> None:
    """Under a ratio rule what is forbidden stands in the tree, for it was drawn, but nothing stands on it."""
    structure = LANGUAGES[data.draw(st.sampled_from(sorted(LANGUAGES)))].structure
    drawn = data.draw(st.booleans())
    tokens, fresh = list(PROMPT), place(structure)
    _, tree = constrained(structure, tokens, drawn=drawn)

    def choices(path: Path) -> list[int]:
        """What may follow the output and this path; nothing where the path itself cannot be said."""
        output = [*tokens[len(PROMPT) :], *path]
        fits = all(fresh.allows(output[:length], output[length]) for length in range(len(output)))
        return allowed(fresh.mask(output)) if fits and END not in output else []

    for generation in range(3):
        nodes: list[Path] = []
        for _ in range(data.draw(st.integers(1, 12))):
            above = data.draw(st.sampled_from([(), *nodes]))
            right = choices(above) if data.draw(st.booleans()) else []
            path = (*above, data.draw(st.sampled_from(right) if right else st.integers(0, 4095)))
            nodes += [path] if path not in nodes else []
        tree.graft(frame(len(tokens), nodes, generation))
        judged = [path[:-1] if drawn else path for path in nodes]
        fits = [not path or path[-1] in choices(path[:-1]) for path in judged]
        assert paths(tree) == {path for path, fit in zip(nodes, fits, strict=True) if fit}
        token = data.draw(st.sampled_from(choices(())))
        if token == END:
            break
        tokens.append(token)
        tree.commit([token])
        tree.rollback(len(tokens))  # empty, so that what stood there before is no part of what follows


def test_frames_on_an_older_prefix_are_looked_at_where_they_stand_now() -> None:
    text = tokenizer().encode("foobar12!").ids
    tokens = list(PROMPT)
    _, tree = constrained(LANGUAGES["words"].structure, tokens)
    tokens.append(text[0])
    tree.commit(text[:1])
    chain = Frame(len(PROMPT), 0, 1, tuple(text), (-0.1,) * len(text))
    grafted = tree.graft(chain)
    assert (grafted.merged, grafted.added) == (1, len(text) - 1)
    wrong = Frame(len(PROMPT), 0, len(text) + 1, tuple(text), (-0.1,) * len(text))  # behind "!" nothing follows
    assert tree.graft(wrong).dropped == {"forbidden": 1, "orphan": len(text) - 1}


def test_a_rollback_takes_the_grammar_along() -> None:
    structure, text = LANGUAGES["forced"].structure, tokenizer().encode("return self").ids
    tokens = [*PROMPT, *text]
    constraint, tree = constrained(structure, tokens)
    before = constraint.after(())
    assert constraint.admits((), END) is False
    del tokens[len(PROMPT) + 1 :]
    tree.rollback(len(tokens))
    assert constraint.admits((), text[1])
    assert allowed(constraint.after(())) == allowed(place(structure).mask(text[:1])) != allowed(before)


class Panic(BaseException):
    """As pyo3's PanicException, no Exception."""


@pytest.mark.parametrize("error", [FailedPrecondition("too complex", reason="GRAMMAR_GAVE_UP"), Panic()])
def test_a_candidate_on_which_the_library_gives_up_costs_only_itself(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    structure, text = LANGUAGES["any"].structure, tokenizer().encode("abc").ids
    constraint, tree = constrained(structure, list(PROMPT))
    genuine, asked = Cursor.mask, list[Path]()

    def fragile(cursor: Cursor, output: list[int]) -> object:
        asked.append(tuple(output))
        if output:
            raise error
        return genuine(cursor, output)

    monkeypatch.setattr(Cursor, "mask", fragile)
    a = text[0]
    assert tree.graft(Frame(3, 0, 1, (a, a), (-0.1, -0.1))).dropped == {"forbidden": 1}
    assert paths(tree) == {(a,)}
    with pytest.raises(type(error)):
        constraint.after((a,))
    for generation in range(1, 2 * MOST_FAILURES):
        tree.graft(Frame(3, generation, 1, (a, a), (-0.1, -0.1)))
    assert asked.count((a,)) == MOST_FAILURES + 1  # then it is not asked any more; once was the judge
