"""Candidates that a grammar forbids never come into a tree, and never end a session."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import GRAMMAR_TOO_COSTLY, FailedPrecondition
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.frame import Frame, Grafted
from slipstream.tokenizer.grammar import Cursor, Grammar, MaskBudget, allows
from slipstream.tokenizer.structured_output import StructuredOutput
from tests.support.grammars import AMBIGUOUS, END, LANGUAGES, allowed, compiled, place, tokenizer
from verifier_svc.grammar.constraints import LONG_OUTPUT, MOST_FAILURES, GrammarConstraint, MaskThreads, MaskWorkers

Path = tuple[int, ...]
PROMPT = [9, 8, 7]
LIMIT_S = 60.0
THREADS = MaskThreads()


class Constrained:
    """A session's candidate tree and its constraint, whose masks are computed on their own threads."""

    def __init__(
        self,
        structure: StructuredOutput,
        output: Sequence[int] = (),
        *,
        drawn: bool = False,
        tenant: str = "",
        threads: MaskThreads = THREADS,
    ) -> None:
        self._calls = SimpleQueue[Callable[[], None]]()
        self.tree = CandidateTree([*PROMPT, *output])
        self.forbidden = 0
        self.constraint = GrammarConstraint(
            compiled(structure),
            output,
            drawn=drawn,
            workers=MaskWorkers(threads, self._calls.put, tenant),
            budget=MaskBudget(0.005, 0.5),
        )
        self.constraint.settled = self._settled
        self.tree.admits = self.constraint.admits

    def _settled(self) -> None:
        self.forbidden += self.tree.recheck()

    def settle(self) -> None:
        """Lets the event loop go on until all masks are there."""
        while self.constraint.busy:
            self._calls.get(timeout=LIMIT_S)()

    def graft(self, frame: Frame) -> Grafted:
        grafted = self.tree.graft(frame)
        self.settle()
        return grafted

    def commit(self, tokens: list[int]) -> None:
        self.constraint.commit(tokens)
        self.tree.commit(tokens)
        self.settle()


def paths(tree: CandidateTree) -> set[Path]:
    chosen = tree.select_likeliest(10_000)
    return {chosen.path(node) for node in range(len(chosen))}


def frame(base: int, nodes: list[Path], generation: int = 0) -> Frame:
    """Nodes named by their paths; each hangs on the first that has its beginning."""
    parents = tuple(nodes.index(path[:-1]) + 1 if len(path) > 1 else 0 for path in nodes)
    return Frame(base, generation, 1, tuple(path[-1] for path in nodes), (-0.5,) * len(nodes), parents)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_tree_holds_exactly_the_candidates_that_the_grammar_allows(data: st.DataObject) -> None:
    """Under a ratio rule what is forbidden stands in the tree, for it was drawn, but nothing stands on it."""
    structure = LANGUAGES[data.draw(st.sampled_from(sorted(LANGUAGES)))].structure
    drawn = data.draw(st.booleans())
    tokens, fresh = list(PROMPT), place(structure)
    session = Constrained(structure, drawn=drawn)
    tree = session.tree

    def choices(path: Path) -> list[int]:
        """What may follow the output and this path; nothing where the path itself cannot be said."""
        output = [*tokens[len(PROMPT) :], *path]
        fits = all(allows(fresh.mask(output[:length]), output[length]) for length in range(len(output)))
        return allowed(fresh.mask(output)) if fits and END not in output else []

    for generation in range(3):
        nodes: list[Path] = []
        for _ in range(data.draw(st.integers(1, 12))):
            above = data.draw(st.sampled_from([(), *nodes]))
            right = choices(above) if data.draw(st.booleans()) else []
            path = (*above, data.draw(st.sampled_from(right) if right else st.integers(0, 4095)))
            nodes += [path] if path not in nodes else []
        session.graft(frame(len(tokens), nodes, generation))
        judged = [path[:-1] if drawn else path for path in nodes]
        fits = [not path or path[-1] in choices(path[:-1]) for path in judged]
        assert paths(tree) == {path for path, fit in zip(nodes, fits, strict=True) if fit}
        for path in ((), *paths(tree)):
            if not drawn or not path or END in path[:-1] or path[-1] in choices(path[:-1]):
                here, there = session.constraint.after(path), fresh.mask([*tokens[len(PROMPT) :], *path])
                assert (here is None) == (there is None) and (here is None or bytes(here) == bytes(there))
        token = data.draw(st.sampled_from(choices(())))
        if token == END:
            break
        tokens.append(token)
        session.commit([token])
        tree.forget(0)  # empty, so that what stood there before is no part of what follows


def test_frames_on_an_older_prefix_are_looked_at_where_they_stand_now() -> None:
    text = tokenizer().encode("foobar12!").ids
    session = Constrained(LANGUAGES["words"].structure)
    session.settle()
    session.commit(text[:1])
    chain = Frame(len(PROMPT), 0, 1, tuple(text), (-0.1,) * len(text))
    grafted = session.graft(chain)
    assert (grafted.committed, grafted.added, session.forbidden) == (1, len(text) - 1, 0)
    wrong = Frame(len(PROMPT), 0, len(text) + 1, tuple(text), (-0.1,) * len(text))  # behind "!" nothing follows
    dropped = session.graft(wrong).dropped
    assert session.forbidden + sum(dropped.values()) == len(text)
    assert session.tree.node_count == len(text) - 1


def test_candidates_that_the_grammar_has_not_yet_checked_are_in_no_step() -> None:
    text = tokenizer().encode("foobar12!").ids
    session = Constrained(LANGUAGES["words"].structure)
    assert not session.constraint.ready
    session.tree.graft(Frame(len(PROMPT), 0, 1, tuple(text), (-0.1,) * len(text)))
    assert session.tree.node_count == len(text) and not paths(session.tree)
    assert not len(session.tree.select_likeliest_chain(10))
    session.settle()
    assert session.constraint.ready and len(paths(session.tree)) == len(text)
    assert len(session.tree.select_likeliest_chain(100)) == len(text)


def test_a_commit_takes_along_what_was_computed_below_it() -> None:
    text = tokenizer().encode("foobar12!").ids
    session = Constrained(LANGUAGES["words"].structure)
    session.graft(Frame(len(PROMPT), 0, 1, tuple(text), (-0.1,) * len(text)))
    masks = {path: session.constraint.after(path) for path in paths(session.tree)}
    computed = THREADS.computed
    session.constraint.commit(text[:2])
    session.tree.commit(text[:2])
    assert session.constraint.ready and not session.constraint.busy
    for path in paths(session.tree):
        assert session.constraint.after(path) is masks[(*text[:2], *path)]
    assert THREADS.computed == computed


class Panic(BaseException):
    """As pyo3's PanicException, no Exception."""


@pytest.mark.parametrize("error", [FailedPrecondition("too complex", reason="GRAMMAR_GAVE_UP"), Panic()])
def test_a_candidate_on_which_the_library_gives_up_costs_only_itself(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    session = Constrained(LANGUAGES["any"].structure)
    a, *others = allowed(place(LANGUAGES["any"].structure).mask([]))[:20]
    genuine, asked = Cursor.mask, list[Path]()

    def fragile(cursor: Cursor, path: list[int]) -> object:
        asked.append(tuple(path))
        if path:
            raise error
        return genuine(cursor, path)

    session.settle()
    monkeypatch.setattr(Cursor, "mask", fragile)
    session.graft(Frame(3, 0, 1, (a, a), (-0.1, -0.1)))
    assert paths(session.tree) == {(a,)} and session.forbidden == 1
    with pytest.raises(type(error)):
        session.constraint.after((a,))
    for number, token in enumerate(others):
        session.graft(Frame(3, 0, 3 + number, (token,), (-0.1,), (0,)))
    assert len(asked) == MOST_FAILURES, "then it is not asked any more"
    assert session.constraint.failure is None and session.constraint.after(()) is not None


def test_a_grammar_whose_masks_take_long_ends_its_session_in_bounded_time() -> None:
    (a,), computed = tokenizer().encode("a").ids, THREADS.computed
    session, tokens = Constrained(AMBIGUOUS), 0
    session.settle()
    while session.constraint.failure is None:
        session.constraint.after(())
        session.commit([a])
        tokens += 1
        assert tokens < 1000
    assert session.constraint.failure.reason == GRAMMAR_TOO_COSTLY
    assert session.constraint.worth_waiting_s() == 0.0 and tokens > 40
    assert THREADS.computed - computed <= tokens + 1
    with pytest.raises(FailedPrecondition):
        session.constraint.after(())


def test_candidates_of_an_ambiguous_grammar_count_towards_its_cost_limit() -> None:
    (a,), (b,) = tokenizer().encode("a").ids, tokenizer().encode("b").ids
    session = Constrained(AMBIGUOUS, [a, b] * 30)
    session.settle()
    frames = 0
    while session.constraint.failure is None and frames < 200:
        chain = tuple((a, b)[frames >> bit & 1] for bit in range(20))
        session.tree.forget(0)
        session.graft(Frame(len(PROMPT) + 60, frames, 1, chain, (-0.1,) * 20))
        frames += 1
    assert session.constraint.failure is not None and session.constraint.failure.reason == GRAMMAR_TOO_COSTLY


def test_a_long_output_of_an_ambiguous_grammar_is_not_read_to_its_end() -> None:
    """As when the session is opened elsewhere: it would take minutes."""
    (a,) = tokenizer().encode("a").ids
    session = Constrained(AMBIGUOUS, [a] * 100_000)
    session.settle()
    assert session.constraint.failure is not None and session.constraint.failure.reason == GRAMMAR_TOO_COSTLY


class Held:
    """A grammar, and its own cursor, whose masks are not there before `free` is set."""

    def __init__(self, free: threading.Event) -> None:
        self._free = free

    def cursor(self, budget: MaskBudget) -> Held:
        return self

    def commit(self, token_ids: Sequence[int]) -> None:
        pass

    def mask(self, path: Sequence[int]) -> None:
        self._free.wait(LIMIT_S)


@pytest.mark.parametrize(
    ("tenant", "output"),
    [
        pytest.param("other", [], id="another tenant's"),
        pytest.param("", [0] * (LONG_OUTPUT + 1), id="a slow session's"),
    ],
)
def test_masks_wait_for_none_that_take_long(tenant: str, output: list[int]) -> None:
    threads, free, calls = MaskThreads(), threading.Event(), SimpleQueue[Callable[[], None]]()
    workers = MaskWorkers(threads, calls.put, tenant)
    held = [GrammarConstraint(cast(Grammar, Held(free)), output, drawn=False, workers=workers) for _ in range(4)]
    quick = Constrained(LANGUAGES["words"].structure, threads=threads)
    quick.settle()
    assert quick.constraint.ready and not any(each.ready for each in held)
    free.set()


def test_while_one_tenant_s_masks_take_long_others_get_theirs() -> None:
    """The others' are all there before the slow ones are, however many those are."""
    (a,) = tokenizer().encode("a").ids
    text = tokenizer().encode("foobar12!").ids
    slow = [Constrained(AMBIGUOUS, [a] * 150) for _ in range(16)]
    for _ in range(20):
        quick = Constrained(LANGUAGES["words"].structure, tenant="other")
        quick.graft(Frame(len(PROMPT), 0, 1, tuple(text), (-0.1,) * len(text)))
        assert len(paths(quick.tree)) == len(text)
    assert any(session.constraint.busy and not session.constraint.ready for session in slow)
    for session in slow:
        session.constraint.close()
