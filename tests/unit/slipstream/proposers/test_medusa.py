"""Medusa: every published layout gives the same numbers, what does not fit is refused by name, trees are the best."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.engine.engine import HiddenStates
from slipstream.errors import FailedPrecondition, NotFound, SlipstreamError
from slipstream.proposers.base import ROOT, HiddenRows, Proposal, ProposerContext, ProposerSettings, open_proposer
from slipstream.proposers.medusa import MedusaProposer
from slipstream.proposers.medusa_heads import load_heads
from slipstream.proposers.parallel_drafting import RankAccuracy, grow
from slipstream.proposers.weights import output_weight
from slipstream.speculation.sampling_params import SamplingParams
from tests.support.checkpoints import VOCABULARY, save_checkpoint
from tests.support.heads import LAYOUTS, Tensors, in_layout, random_heads, save_heads

HEADS, WIDTH = 3, 64
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint("llama", tmp_path_factory.mktemp("target") / "llama", seed=0))


def by_formula(blocks: Tensors, outputs: list[torch.Tensor], states: torch.Tensor) -> torch.Tensor:
    """W_i (f + SiLU(A_i f + b_i)), as the paper writes it."""
    rows = []
    for head, output in enumerate(outputs):
        a, b = blocks[f"{head}.0.linear.weight"], blocks[f"{head}.0.linear.bias"]
        inside = states @ a.T + b
        rows.append((states + inside / (1 + (-inside).exp())) @ output.T)
    return torch.stack(rows)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_published_layout_gives_the_papers_numbers(layout: str, target: str, tmp_path: Path) -> None:
    blocks, states = random_heads(target, HEADS, scale=0.2), torch.randn(5, WIDTH)
    own = [torch.randn(VOCABULARY, WIDTH) for _ in range(HEADS)]
    heads = load_heads(in_layout(layout, blocks, own, tmp_path), target)
    used = own
    if layout == "tgi":
        used = [output_weight(target)] * HEADS
    elif layout.startswith("vllm ") and layout != "vllm":
        used = [own[0]] * HEADS
    expected, found = by_formula(blocks, used, states), heads.logits(states)
    if layout == "vllm truncated":
        known = torch.arange(50) * 2
        unknown = [token for token in range(VOCABULARY) if token not in known.tolist()]
        assert bool(found[..., unknown].isneginf().all())
        expected, found = by_formula(blocks, [own[0][:50]] * HEADS, states), found[..., known]
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=1e-4)


def test_an_output_head_padded_beyond_the_vocabulary_is_cut(target: str, tmp_path: Path) -> None:
    blocks = random_heads(target, 1)
    padded = torch.randn(256, WIDTH)
    heads = load_heads(in_layout("medusa-1", blocks, [padded], tmp_path), target)
    assert torch.equal(heads.outputs[0], padded[:VOCABULARY])


def test_heads_compute_in_the_type_of_the_device_where_they_stand(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's own type elsewhere than on a CPU, where bfloat16 may be emulated. A shared output stays one."""
    heads = load_heads(save_heads(random_heads(target, HEADS), tmp_path), target)
    chosen = "slipstream.proposers.medusa_heads.dtype_on"
    monkeypatch.setattr(chosen, lambda place, own: torch.float64 if place.type == "cpu" else own)
    moved = heads.on(torch.device("cpu"))
    assert {each.dtype for each in moved.outputs} == {torch.float64} and moved.outputs[0] is moved.outputs[-1]
    states = torch.randn(5, WIDTH)
    assert torch.allclose(moved.logits(states), heads.logits(states), atol=1e-4)
    away = heads.on(torch.device("meta"))
    assert away.outputs[0].dtype is heads.outputs[0].dtype and away.blocks[0][0][0].is_meta


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("run",))


def broken(blocks: Tensors, **changes: torch.Tensor | None) -> Tensors:
    changed = blocks | {key.replace("__", "."): value for key, value in changes.items() if value is not None}
    return {key: value for key, value in changed.items() if changes.get(key.replace(".", "__"), value) is not None}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"1__0__linear__weight": None}, r"lacks the tensor 1\.0\.linear\.weight \[64, 64\]"),
        ({"1__0__linear__bias": None}, r"lacks the tensor 1\.0\.linear\.bias \[64\]"),
        ({"0__0__linear__weight": torch.ones(32, 32)}, r"0\.0\.linear\.weight is \[32, 32\].* needs \[64, 64\]"),
        ({"0__1__weight": torch.ones(99, 64)}, r"0\.1\.weight is \[99, 64\].* needs \[199, 64\]"),
        ({"0__1__weight": torch.ones(199, 64)}, r"lacks the tensor 1\.1\.weight \[199, 64\]"),
        ({"surprise": torch.ones(3)}, "has the tensor surprise"),
        ({"2__0__linear__bias": torch.full((64,), math.nan)}, r"2\.0\.linear\.bias \[64\] holds numbers that are not"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_name_and_shape(
    changes: dict[str, torch.Tensor | None], sentence: str, target: str, tmp_path: Path
) -> None:
    folder = save_heads(broken(random_heads(target, HEADS), **changes), tmp_path)
    with pytest.raises(FailedPrecondition, match=sentence):
        load_heads(folder, target)


def test_untrained_heads_no_heads_pickled_code_and_no_files_are_refused(target: str, tmp_path: Path) -> None:
    zero = {key: torch.zeros_like(value) for key, value in random_heads(target, HEADS).items()}
    with pytest.raises(FailedPrecondition, match="not trained"):
        load_heads(save_heads(zero, tmp_path / "zero"), target)
    with pytest.raises(FailedPrecondition, match=r"holds no Medusa heads: it has fc\.weight"):
        load_heads(save_heads({"fc.weight": torch.ones(2)}, tmp_path / "other"), target)
    (tmp_path / "evil").mkdir()
    torch.save({"0.0.linear.weight": Evil()}, tmp_path / "evil" / "medusa_lm_head.pt")
    with pytest.raises(FailedPrecondition, match="cannot be read as tensors"):
        load_heads(str(tmp_path / "evil"), target)
    with pytest.raises(NotFound, match="none of medusa_lm_head"):
        load_heads(str(tmp_path), target)
    with pytest.raises(FailedPrecondition, match="no hidden states"):
        load_heads(save_heads(zero, tmp_path / "zero"), "emulated:")


def test_the_tree_is_the_likeliest_of_its_size() -> None:
    table = [[0.6, 0.2, 0.1], [0.5, 0.3, 0.05], [0.4, 0.1, 0.1]]
    every = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]
    worth = {path: math.prod(table[depth][rank] for depth, rank in enumerate(path)) for path in every}
    for size in (1, 4, 9, len(every)):
        grown = grow(table, size)
        assert len(grown) == size
        best = sorted(worth.values(), reverse=True)[:size]
        assert [found for _, found in grown] == pytest.approx(best)
        paths = [path for path, _ in grown]
        assert all(path[:-1] in ((), *paths[:at]) for at, path in enumerate(paths)), "a child before its parent"
    assert grow(table, 0) == [] == grow([], 4)


def test_rank_accuracy_learns_where_the_heads_before_were_right() -> None:
    accuracy = RankAccuracy([[0.5, 0.1], [0.5, 0.1]])
    for _ in range(2000):
        accuracy.add([[7, 8], [5, 6]], [8, 5])
        accuracy.add([[7, 8], [5, 6]], [9, 6])  # a first token that no rank has says nothing of the second head
    (first, second) = accuracy.table()
    assert first == pytest.approx([first[1], first[1]]) and second[0] > 0.9 > 0.1 > second[1]


def context(target_state: torch.Tensor | None, length: int = 6, **options: Any) -> ProposerContext:
    hidden = () if target_state is None else (HiddenRows(length - 2, HiddenStates(target_state[None], {})),)
    settings: dict[str, Any] = {"sampling": GREEDY, "expand": [ROOT], "noise_nodes": [0], "hidden": hidden}
    return ProposerContext("session", list(range(length)), length, 2, 40, **(settings | options))


def opened(target: str, folder: Path) -> MedusaProposer:
    save_heads(random_heads(target, HEADS, scale=0.2), folder)
    found = open_proposer("medusa", ProposerSettings(model=str(folder), target=target))
    assert isinstance(found.proposer, MedusaProposer) and found.depth == HEADS and found.hidden is not None
    return found.proposer


def nodes_of(answer: Proposal | SlipstreamError) -> list[tuple[int, int]]:
    assert isinstance(answer, Proposal)
    return [(node.parent, node.token) for node in answer.nodes]


def test_the_likeliest_chain_is_the_heads_argmax_and_comes_from_the_newest_state(target: str, tmp_path: Path) -> None:
    proposer, state = opened(target, tmp_path), torch.randn(WIDTH)
    heads = load_heads(str(tmp_path), target)
    best = heads.logits(state[None])[:, 0].argmax(-1).tolist()
    answer = nodes_of(proposer.propose([context(state)])[0])
    chain, at = [], ROOT
    for depth in range(HEADS):
        at, token = next(
            (i, token) for i, (parent, token) in enumerate(answer) if parent == at and token == best[depth]
        )
        chain.append(token)
    assert chain == best and len(answer) == 32
    # A state that belongs to another token than the one before the last says nothing of what follows.
    assert nodes_of(proposer.propose([context(None, length=8)])[0]) == []
    assert nodes_of(proposer.propose([context(None)])[0]) == answer
    proposer.close_sequence("session")
    assert nodes_of(proposer.propose([context(None)])[0]) == []


def test_under_rejection_each_level_is_drawn_from_its_head(target: str, tmp_path: Path) -> None:
    proposer, state = opened(target, tmp_path), torch.randn(WIDTH)
    sampling = SamplingParams(temperature=0.9, seed=3, acceptance="rejection")
    drawn = proposer.propose([context(state, sampling=sampling, noise_stream=5)])[0]
    assert isinstance(drawn, Proposal) and len(drawn.nodes) == 4
    share = (load_heads(str(tmp_path), target).logits(state[None])[:, 0] / 0.9).softmax(-1)
    for depth, place in enumerate([ROOT, 0, 1]):
        tree = {"node_tokens": [9, 9, 9], "parents": [ROOT, 0, 1], "expand": [place], "noise_nodes": [depth]}
        answer = proposer.propose([context(None, sampling=sampling, noise_stream=5, **tree)])[0]
        assert isinstance(answer, Proposal)
        q = answer.nodes[0].distribution
        assert q is not None and q.token_ids[0] == int(share[depth].argmax())
        weight = q.weights[0] / sum(q.weights)
        best = float(share[depth].max() / share[depth].topk(32).values.sum())
        assert weight == pytest.approx(best, rel=0.05)
    beyond = {"node_tokens": [9, 9, 9], "parents": [ROOT, 0, 1], "expand": [2]}
    assert nodes_of(proposer.propose([context(None, sampling=sampling, **beyond)])[0]) == []
