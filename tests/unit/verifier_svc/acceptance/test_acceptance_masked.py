"""Every rule under a grammar: p is the masked distribution at every node, and what is pruned changes no law."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.sampler.coupled_sampling import choose
from slipstream.engine.sampler.logits_processor import SampledRow, process
from slipstream.engine.sampler.token_history import TokenHistory
from slipstream.errors import FailedPrecondition
from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.tokenizer.grammar import Mask, MaskBudget
from tests.support.enumerated_rounds import PROMPT, Round, World, law
from tests.support.enumeration import Draft, Path, Target, bias, draft_of, error, target_of
from tests.support.instant_masks import AT_ONCE
from tests.unit.verifier_svc.acceptance.test_acceptance_coupled import (
    PATHS,
    PREFIX,
    SAMPLINGS,
    VOCABULARY,
    model,
    rows_of,
    tokens_of,
    tree_of,
)
from verifier_svc.acceptance.judge import VerifyInput, judge
from verifier_svc.acceptance.rejection import KeyedRandomness, rejection
from verifier_svc.acceptance.result import AcceptanceResult, BrokenNumbers
from verifier_svc.grammar.constraints import GrammarConstraint
from verifier_svc.session import Session


def choices(path: Path, vocabulary: int) -> list[int]:
    """What a made-up grammar allows after this path: any function of it that leaves something."""
    kept = np.random.default_rng([5, *path, len(path)]).random(vocabulary) < 0.5
    kept[sum(path) % vocabulary] = True
    return np.flatnonzero(kept).tolist()


def mask_of(tokens: list[int], vocabulary: int) -> Mask:
    bits = np.zeros(vocabulary, np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little")


class Table:
    """As `GrammarConstraint`, and notes where it is asked."""

    def __init__(self, output: Path = ()) -> None:
        self.output, self.asked = output, list[Path]()

    def after(self, path: Path) -> Mask | None:
        self.asked.append(path)
        return mask_of(choices(self.output + path, VOCABULARY), VOCABULARY)


def plain(sampling: SamplingParams, length: int) -> list[int]:
    """Plain decoding inside the grammar, one token at a time."""
    tokens: list[int] = []
    history = TokenHistory(PREFIX)
    for step in range(length):
        row = SampledRow(sampling, history, mask=mask_of(choices(tuple(tokens), VOCABULARY), VOCABULARY))
        processed = process(model(tuple(tokens))[None], [row])
        chosen, _ = choose(processed, [sampling.greedy], [sampling.seed], [len(PREFIX) + step])
        assert int(chosen) in choices(tuple(tokens), VOCABULARY)
        tokens.append(int(chosen))
        history.append(tokens[-1:])
    return tokens


BIASED = SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(range(VOCABULARY), 100.0))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from([*SAMPLINGS, BIASED]), PATHS, st.booleans()), min_size=1, max_size=5))
def test_any_trees_emit_what_plain_decoding_inside_the_grammar_emits(
    sessions: list[tuple[SamplingParams, set[Path], bool]],
) -> None:
    """Sessions with and without a grammar in one step. Masks are asked for where a rule goes, and nowhere else."""
    trees = [tree_of(paths, lie=DraftDistribution((0,), (1,))) for _, paths, _ in sessions]
    starts = list(itertools.accumulate((len(tree) + 1 for tree in trees), initial=0))
    tables = [Table() if constrained else None for _, _, constrained in sessions]
    cases = [
        VerifyInput(tree, start, sampling, len(PREFIX), TokenHistory(PREFIX), table)
        for tree, start, (sampling, _, _), table in zip(trees, starts, sessions, tables, strict=False)
    ]
    verdicts = judge(cases, torch.cat([rows_of(tree) for tree in trees]))
    for tree, (sampling, _, _), table, verdict in zip(trees, sessions, tables, verdicts, strict=True):
        assert isinstance(verdict, AcceptanceResult)
        tokens = tokens_of(tree, verdict)
        if table is None:
            continue
        assert tokens == plain(sampling, len(tokens))
        assert table.asked == [tuple(tokens[:length]) for length in range(len(tokens))]


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(SAMPLINGS), PATHS, st.integers(0, 10**6))
def test_a_ratio_rule_gets_the_masked_distribution_at_every_node(
    sampling: SamplingParams, paths: set[Path], seed: int
) -> None:
    tree = tree_of(paths, lie=DraftDistribution(tuple(range(VOCABULARY)), (3, 1, 4, 1, 5)))
    cuts = {"top_p": sampling.top_p, "top_k": sampling.top_k}
    session = SamplingParams(temperature=1.0, seed=seed, acceptance="rejection", **cuts)
    (verdict,) = judge([VerifyInput(tree, 0, session, len(PREFIX), TokenHistory(PREFIX), Table())], rows_of(tree))
    assert isinstance(verdict, AcceptanceResult)
    output = tokens_of(tree, verdict)
    assert all(token in choices(tuple(output[:index]), VOCABULARY) for index, token in enumerate(output))
    walk = rejection(tree, KeyedRandomness(seed, len(PREFIX)))
    request = next(walk)
    with pytest.raises(StopIteration) as stop:
        while True:
            path = tree.path(request.node)
            raw = model(path).clone()
            forbidden = [token for token in range(VOCABULARY) if token not in choices(path, VOCABULARY)]
            raw[forbidden] = -torch.inf
            request = walk.send(process(raw[None], [SampledRow(session)])[0].double().softmax(-1).numpy())
    assert stop.value.value == verdict


def test_a_grammar_that_gives_up_fails_its_own_session_only() -> None:
    error = FailedPrecondition("too complex", reason="GRAMMAR_GAVE_UP")

    class GivesUp(Table):
        def after(self, path: Path) -> Mask | None:
            if path:
                raise error
            return super().after(path)

    sampling = SamplingParams(temperature=0.0)
    text = plain(sampling, 3)
    tree = tree_of({tuple(text)})
    free = VerifyInput(tree_of(set()), len(tree) + 1, sampling, len(PREFIX))
    cases = [VerifyInput(tree, 0, sampling, len(PREFIX), None, table) for table in (GivesUp(), Table())]
    logits = torch.cat([rows_of(tree), rows_of(free.selection)])
    assert judge([*cases, free], logits) == [
        BrokenNumbers(0, error),
        AcceptanceResult((0, 1, 2), plain(sampling, 4)[3]),
        judge([free], logits)[0],
    ]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("token", range(VOCABULARY))
def test_broken_numbers_are_found_behind_the_mask_too(poison: float, token: int) -> None:
    logits = model(())[None].clone()
    logits[0, token] = poison
    for sampling in SAMPLINGS:
        case = VerifyInput(tree_of(set()), 0, sampling, len(PREFIX), TokenHistory(PREFIX), Table())
        assert judge([case], logits) == [BrokenNumbers(-1)]


# Exact enumeration: every draft and every coin.


def masked(seed: int, vocabulary: int) -> Target:
    free = target_of(seed, vocabulary)

    def target(path: Path) -> np.ndarray:
        p = np.zeros(vocabulary)
        allowed = choices(path, vocabulary)
        p[allowed] = free(path)[allowed]
        return p / p.sum()

    return target


@pytest.mark.parametrize("support", [0, 1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_outside_the_grammar_leave_the_masked_law_as_it_is(support: int, seed: int) -> None:
    target, draft = masked(seed, 3), draft_of(seed + 1, 3, support)
    assert bias(rejection, target, draft, 3) < 1e-12
    assert bias(rejection, target, inside(target, draft), 3) < 1e-12


def inside(target: Target, draft: Draft) -> Draft:
    """As a drafter that knows the grammar guesses; where q has nothing to say in it, it is sure of something."""

    def drafted(path: Path) -> DraftDistribution | None:
        q, p = draft(path), target(path)
        if q is None:
            return None
        kept = [(token, weight) for token, weight in zip(q.token_ids, q.weights, strict=True) if p[token] > 0]
        token_ids, weights = zip(*(kept or [(int(p.argmax()), 1)]), strict=True)
        return DraftDistribution(token_ids, weights)

    return drafted


class Cursors:
    """A grammar by table, for the real `GrammarConstraint`."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._output: Path = ()

    def cursor(self, budget: MaskBudget) -> Cursors:
        return Cursors(self._vocabulary)

    def commit(self, tokens: list[int]) -> None:
        self._output += tuple(tokens)

    def mask(self, path: list[int]) -> Mask:
        return mask_of(choices((*self._output, *path), self._vocabulary), self._vocabulary)


def through_rounds(seed: int, *, drawn: bool) -> float:
    """The law of the text over several rounds with the real trees, candidates looked at as they come."""
    vocabulary = 3
    target = masked(seed, vocabulary)

    def admits(session: Session) -> object:
        session.constraint = GrammarConstraint(
            Cursors(vocabulary),  # type: ignore[arg-type]
            session.tokens[len(PROMPT) :],
            drawn=drawn,
            workers=AT_ONCE,
        )
        return session.constraint.admits

    drafts = [draft_of(seed + number, vocabulary, vocabulary) for number in (1, 2)]
    rounds = Round(passes=2, budget=2), Round(passes=1, budget=3)
    world = World("rejection", target, drafts, rounds, 2, max_nodes=3, expand=1, admits=admits)  # type: ignore[arg-type]
    return error(target, law(world), 2)


@pytest.mark.parametrize("seed", [3, 4])
def test_pruned_candidates_do_not_change_the_distribution(seed: int) -> None:
    assert through_rounds(seed, drawn=True) < 1e-12


def test_dropping_a_forbidden_draw_before_it_is_judged_biases_the_distribution() -> None:
    assert through_rounds(3, drawn=False) > 1e-3
