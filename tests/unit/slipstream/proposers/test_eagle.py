"""EAGLE: every layout gives the numbers of independent code, what does not fit is refused by name, and a tree does not
depend on how its text was read or what was drafted beside it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from benchmarks.virtual_gpu import DEVICE, VirtualGPU
from slipstream.engine.engine import HiddenStates
from slipstream.errors import FailedPrecondition, NotFound, SlipstreamError
from slipstream.proposers.base import ROOT, DeeperLevels, HiddenRows, Proposal, ProposedNode, ProposerContext
from slipstream.proposers.eagle import EagleProposer, _Growing, fuse
from slipstream.proposers.eagle_checkpoint import load_head, save_head
from slipstream.proposers.eagle_head import EagleHead
from slipstream.proposers.head_file import read_target
from slipstream.proposers.pair_cache import PairCache
from slipstream.proposers.weights import output_weight
from slipstream.speculation.sampling_params import SamplingParams
from tests.support.checkpoints import VOCABULARY, save_checkpoint
from tests.support.eagle_golden import CASES, COLUMNS, LENGTH, ROWS, WIDTH, inputs
from tests.support.eagle_heads import LAYERS, config_of, random_head

GREEDY = SamplingParams(temperature=0.0)
GOLDEN = json.loads((Path(__file__).parents[3] / "support" / "eagle_golden.json").read_text())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint("llama", tmp_path_factory.mktemp("target") / "llama", seed=0))


def load(folder: Path, target: str) -> EagleHead:
    return load_head(str(folder), read_target(target), torch.float32)


def states_of(features: Tensor) -> HiddenStates:
    parts = features.split(WIDTH, dim=-1)
    return HiddenStates(parts[-1], dict(zip(LAYERS, parts, strict=True)))


def context(tokens: list[int], states: HiddenStates | None, first: int = 0, **options: Any) -> ProposerContext:
    """`states`: of the tokens from `first` on."""
    hidden = () if states is None else (HiddenRows(first, states),)
    settings: dict[str, Any] = {"sampling": GREEDY, "expand": [ROOT], "noise_nodes": [0], "hidden": hidden}
    settings = {"handle": "session"} | settings | options
    return ProposerContext(tokens=tokens, length=len(tokens), prompt_length=2, max_length=40, **settings)


@pytest.mark.parametrize("speculators", [True, False], ids=["speculators", "original"])
@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_eagle_3_gives_the_numbers_of_speculators(case: str, speculators: bool, target: str, tmp_path: Path) -> None:
    """`eagle_golden.json` holds what the other implementation made of the same weights: first of the target's hidden
    states, then of its own."""
    made = random_head(target, config_of(target, layers=LAYERS, **CASES[case]))
    save_head(made, tmp_path, target, speculators=speculators)
    head, (tokens, features) = load(tmp_path, target), inputs()
    first, second = (torch.tensor(each) for each in GOLDEN[case])
    columns = list(COLUMNS)
    positions = torch.arange(LENGTH - 1)[None]
    whole = head.logits(head(tokens[None, 1:], head.fuse(features[:-1])[None], positions))[0]
    assert torch.allclose(whole[list(ROWS)][:, columns], first, atol=2e-4)
    known = torch.arange(64) * 2 if "vocabulary" in CASES[case] else torch.arange(VOCABULARY)
    every = head.target_logits(head(tokens[None, 1:], head.fuse(features[:-1])[None], positions))[0]
    assert torch.equal(every[:, known], whole) and int(every[0].isfinite().sum()) == len(known)
    for row, expected in zip(ROWS, second, strict=True):
        proposer, text = EagleProposer(head), tokens[: row + 2].tolist()
        proposer.propose([context(text, states_of(features[: row + 1]), expand=[])])
        cache = proposer._reader.cache("session")
        below = proposer._states([(cache, ()), (cache, (int(tokens[row + 2]),))])
        assert torch.allclose(head.logits(below[0])[columns], whole[row, columns], atol=1e-4)
        assert torch.allclose(head.logits(below[1])[columns], expected, atol=2e-4)


@torch.inference_mode()
def test_a_head_elsewhere_proposes_the_same(target: str, tmp_path: Path) -> None:
    made = random_head(target, config_of(target, layers=LAYERS))
    save_head(made, tmp_path, target, speculators=True)
    (tokens, features), head = inputs(), load(tmp_path, target)
    drawn = SamplingParams(seed=3, acceptance="rejection")

    def proposals(proposer: EagleProposer, states: HiddenStates) -> list[list[tuple[int, int]]]:
        texts = [context(tokens.tolist(), states, handle=0), context(tokens.tolist(), states, handle=1, sampling=drawn)]
        first = proposer.propose(texts)
        longer = [context([*tokens.tolist(), 5], states.cut(2, 3), LENGTH - 1, handle=each) for each in range(2)]
        answers = first + proposer.propose(longer)
        return [[(node.parent, node.token) for node in each.nodes] for each in answers if isinstance(each, Proposal)]

    expected = proposals(EagleProposer(head), states_of(features[:-1]))
    assert len(expected) == 4 and all(expected)
    with VirtualGPU() as gpu, sdpa_kernel(SDPBackend.MATH):
        gpu.move(head)
        assert proposals(EagleProposer(head), states_of(features[:-1].to(DEVICE))) == expected


@pytest.mark.parametrize("form", ["plain", "bias", "pickled", "embeddings of its own", "speculators' names"])
@torch.inference_mode()
def test_eagle_1_gives_the_numbers_of_the_librarys_layer(form: str, target: str, tmp_path: Path) -> None:
    config = config_of(target, fc_bias=form == "bias")
    made = random_head(target, config)
    save_head(made, tmp_path, target)
    file = tmp_path / "model.safetensors"
    assert "embed_tokens.weight" not in load_file(file), "they are the target's"
    if form.startswith("embeddings"):
        with torch.no_grad():
            made.embed_tokens.weight += 0.25
        save_head(made, tmp_path, target)
        assert "embed_tokens.weight" in load_file(file)
    if form == "pickled":
        torch.save(load_file(file), tmp_path / "pytorch_model.bin")
        file.unlink()
    if form.startswith("speculators"):
        renamed = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
        held = load_file(file)
        for old, new in renamed.items():
            held = {new + key.removeprefix(old) if key.startswith(old) else key: held[key] for key in held}
        save_file(held, file)
        layer = json.loads((tmp_path / "config.json").read_text())
        content = {"speculators_model_type": "eagle", "transformer_layer_config": layer}
        (tmp_path / "config.json").write_text(json.dumps(content))
    head, (tokens, features) = load(tmp_path, target), inputs()
    tokens, features = tokens[None, 1:], features[None, :-1, :WIDTH]
    positions = torch.arange(LENGTH - 1)[None]
    layer_config = config.layer
    layer_config._attn_implementation = "eager"
    layer = LlamaDecoderLayer(layer_config, 0)
    layer.input_layernorm = torch.nn.Identity()
    own = {key.removeprefix("layers.0."): value for key, value in made.state_dict().items() if "layers.0" in key}
    layer.load_state_dict(own)
    x = torch.cat((made.embed_tokens.weight[tokens], features), -1) @ made.fc.weight.T
    x = x + made.fc.bias if form == "bias" else x
    mask = torch.full((LENGTH - 1, LENGTH - 1), -math.inf).triu(1)[None, None]
    rotation = LlamaRotaryEmbedding(layer_config)(x, positions)
    out = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
    expected = (out[0] if isinstance(out, tuple) else out) @ output_weight(target).T
    found = head.target_logits(head(tokens, head.fuse(features), positions))
    assert torch.allclose(found, expected, atol=1e-3)


def change(folder: Path, **changes: Tensor | None) -> None:
    held = load_file(folder / "model.safetensors")
    held |= {key.replace("__", "."): value for key, value in changes.items() if value is not None}
    gone = {key.replace("__", ".") for key, value in changes.items() if value is None}
    save_file({key: value for key, value in held.items() if key not in gone}, folder / "model.safetensors")


@pytest.mark.parametrize("speculators", [False, True])
@pytest.mark.parametrize("vocabulary", [None, 64])
def test_a_head_without_an_output_takes_the_rows_of_its_targets(
    vocabulary: int | None, speculators: bool, target: str, tmp_path: Path
) -> None:
    head = random_head(target, config_of(target, layers=LAYERS, vocabulary=vocabulary))
    known = read_target(target)
    with torch.no_grad():
        head.lm_head.weight.copy_(known.output[head.target_ids])
    save_head(head, tmp_path, target, speculators=speculators)
    held = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor for name, tensor in held.items() if "lm_head" not in name}, tmp_path / "model.safetensors")
    read = load_head(str(tmp_path), known, torch.float32)
    assert all(torch.equal(value, head.state_dict()[name]) for name, value in read.state_dict().items())


def test_a_head_may_name_the_layers_of_its_target(target: str, tmp_path: Path) -> None:
    """Other numbers of layers are still refused: such a head has more than one of its own."""
    known = read_target(target)
    save_head(random_head(target, config_of(target, layers=LAYERS)), tmp_path, target, speculators=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": known.layer_count}))
    assert load_head(str(tmp_path), known, torch.float32).config.layer.num_hidden_layers == 1
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": known.layer_count + 1}))
    with pytest.raises(FailedPrecondition, match="draft layers"):
        load_head(str(tmp_path), known, torch.float32)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"fc__weight": None}, r"lacks the tensor fc\.weight \[64, 192\]"),
        ({"fc__weight": torch.ones(64, 96)}, r"fc\.weight is \[64, 96\], this target needs \[64, 192\]"),
        ({"fc__weight": torch.zeros(64, 192)}, "not trained"),
        ({"midlayer__mlp__up_proj__weight": None}, r"lacks the tensor midlayer\.mlp\.up_proj\.weight \[96, 64\]"),
        ({"midlayer__self_attn__q_proj__bias": torch.ones(64)}, r"has the tensor midlayer\.self_attn\.q_proj\.bias"),
        ({"norm__weight": torch.full((64,), math.nan)}, r"norm\.weight \[64\] holds numbers that are not finite"),
        ({"t2d": torch.ones(VOCABULARY, dtype=torch.bool)}, r"t2d \[199\] and d2t \[64\] mean different tokens"),
        ({"d2t": torch.arange(64) * -1}, r"offsets d2t \[64\] must lead to ascending token ids below 199"),
        ({"t2d": torch.ones(50, dtype=torch.bool)}, r"t2d is \[50\], this target needs \[199\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_name_and_shape(
    changes: dict[str, Tensor | None], sentence: str, target: str, tmp_path: Path
) -> None:
    head = random_head(target, config_of(target, layers=LAYERS, vocabulary=64))
    save_head(head, tmp_path, target, speculators=False)
    change(tmp_path, **changes)
    with pytest.raises(FailedPrecondition, match=sentence):
        load(tmp_path, target)


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("run",))


def test_configurations_that_cannot_be_followed_and_pickled_code_are_refused(target: str, tmp_path: Path) -> None:
    save_head(random_head(target, config_of(target, layers=LAYERS)), tmp_path, target)
    file = tmp_path / "config.json"
    right = json.loads(file.read_text())
    wrong: dict[str, dict[str, Any]] = {
        r"'dflash' drafter": {"speculators_model_type": "dflash"},
        r"reads the target's layers \[2, 9, 3\].* has layers 0 to 2": {"eagle_aux_hidden_state_layer_ids": [2, 9, 3]},
        r"has 4 draft layers": {"transformer_layer_config": {"num_hidden_layers": 4}},
        r"a 'gemma' one": {"transformer_layer_config": {"model_type": "gemma"}},
    }  # fmt: skip
    for sentence, changes in wrong.items():
        file.write_text(json.dumps(right | changes))
        with pytest.raises(FailedPrecondition, match=sentence):
            load(tmp_path, target)
    file.unlink()
    with pytest.raises(FailedPrecondition, match=r"no config\.json"):
        load(tmp_path, target)
    file.write_text(json.dumps(right))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(NotFound, match=r"none of model\.safetensors"):
        load(tmp_path, target)
    torch.save({"fc.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(FailedPrecondition, match="cannot be read as tensors"):
        load(tmp_path, target)


def test_layers_counted_by_their_outputs_are_found_by_the_numbers_that_specforge_writes(tmp_path: Path) -> None:
    deep = str(save_checkpoint("llama", tmp_path / "deep", seed=0, num_hidden_layers=12))
    save_head(random_head(deep, config_of(deep, layers=(1, 5, 8))), tmp_path / "head", deep, speculators=False)
    assert load(tmp_path / "head", deep).config.layers == (2, 6, 9)
    save_head(random_head(deep, config_of(deep, layers=(1, 5, 8))), tmp_path / "head", deep)
    assert load(tmp_path / "head", deep).config.layers == (1, 5, 8)


def tree_of(answer: Proposal | SlipstreamError) -> list[tuple[int, int, Any]]:
    assert isinstance(answer, Proposal)
    return [(node.parent, node.token, pytest.approx(node.log_prob, rel=1e-3, abs=1e-3)) for node in answer.nodes]


def text_of(seed: int, length: int = LENGTH) -> tuple[list[int], HiddenStates]:
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (length,), generator=noise).tolist(), states_of(
        torch.randn(length - 1, 3 * WIDTH, generator=noise)
    )


@pytest.mark.parametrize("layers", [(), LAYERS], ids=["eagle-1", "eagle-3"])
def test_a_tree_depends_on_its_text_alone(layers: tuple[int, ...], target: str) -> None:
    head = random_head(target, config_of(target, layers=layers), scale=0.3 if layers else 0.2).eval()
    tokens, states = text_of(1)
    alone = EagleProposer(head)
    expected = tree_of(alone.propose([context(tokens, states)])[0])
    assert len(expected) >= 16 and max(depth_of(expected)) > 2
    assert all(parent < at for at, (parent, _, _) in enumerate(expected))
    # The same again without a new pass over the text, and beside another session, and read in chunks.
    assert tree_of(alone.propose([context(tokens, None)])[0]) == expected
    other, of_other = text_of(2, 9)
    both = EagleProposer(head).propose([context(other, of_other, handle="other"), context(tokens, states)])
    assert tree_of(both[1]) == expected != tree_of(both[0])
    chunked = EagleProposer(head)
    answers = [chunked.propose([context(tokens, part, max_read_tokens=4, expand=expand)])[0] for part, expand in (
        (states, []), (None, []), (None, [ROOT]),
    )]  # fmt: skip
    assert [each.read_tokens for each in answers if isinstance(each, Proposal)] == [5, 9, 12]
    assert tree_of(answers[-1]) == expected
    # Token by token, each with a tree of its own before it, whose rows must be gone.
    step = EagleProposer(head)
    for length in range(4, LENGTH + 1):
        first = 0 if length == 4 else length - 2
        answer = step.propose([context(tokens[:length], states.cut(first, length - 1), first)])[0]
    assert tree_of(answer) == expected


def depth_of(tree: list[tuple[int, int, Any]]) -> list[int]:
    depths: list[int] = []
    for parent, _, _ in tree:
        depths.append(1 if parent == ROOT else 1 + depths[parent])
    return depths


def test_the_beginning_of_a_text_is_taken_from_another_of_its_salt(target: str) -> None:
    head = random_head(target, config_of(target, layers=LAYERS), scale=0.2).eval()
    tokens, states = text_of(1)
    for closed in (True, False):
        proposer = EagleProposer(head)
        expected = tree_of(proposer.propose([context(tokens, states, handle="first", cache_salt="a")])[0])
        if closed:
            proposer.close_sequence("first")
        later = states.cut(8, LENGTH - 1)
        shared = proposer.propose([context(tokens, later, 8, handle="second", cache_salt="a")])[0]
        assert tree_of(shared) == expected
        foreign = proposer.propose([context(tokens, later, 8, handle="third", cache_salt="b")])[0]
        assert tree_of(foreign) != expected
        assert proposer._reader.cache("third").start == 8


def test_without_room_nothing_is_proposed_until_another_text_ends(target: str) -> None:
    head = random_head(target, config_of(target, layers=LAYERS), scale=0.2).eval()
    tokens, states = text_of(1)
    proposer = EagleProposer(head, most_pairs=LENGTH)
    expected = tree_of(proposer.propose([context(tokens, states, handle="first")])[0])
    refused = proposer.propose([context(tokens, states, handle="second")])[0]
    assert isinstance(refused, Proposal) and refused.no_room and not refused.nodes
    proposer.close_sequence("first")
    assert tree_of(proposer.propose([context(tokens, None, handle="second")])[0]) == expected


@pytest.mark.parametrize("layers", [(), LAYERS], ids=["eagle-1", "eagle-3"])
@torch.inference_mode()
def test_a_candidate_sees_the_text_and_the_candidates_above_it_alone(layers: tuple[int, ...], target: str) -> None:
    head = random_head(target, config_of(target, layers=layers)).eval()
    tokens, states = text_of(1)
    seen: list[tuple[Tensor, Tensor]] = []

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """All rows so far and, among those of one call, the earlier ones."""
        seen.append((keys, values))
        every = [torch.cat(each, dim=2) for each in zip(*seen, strict=True)]
        mask = torch.ones(queries.shape[2], every[0].shape[2], dtype=torch.bool).tril(every[0].shape[2] - keys.shape[2])
        return torch.nn.functional.scaled_dot_product_attention(queries, *every, attn_mask=mask, enable_gqa=True)

    positions = torch.arange(LENGTH + 3)[None]
    below = head(torch.tensor([tokens[1:]]), fuse(head, states)[None], positions[:, : LENGTH - 1], attend)[:, -1:]
    path = (5, 9, 2)
    for depth, token in enumerate(path):
        at = LENGTH - 1 + depth
        below = head(torch.tensor([[token]]), below, positions[:, at : at + 1], attend)
    proposer = EagleProposer(head)
    proposer.propose([context(tokens, states, expand=[])])
    cache = proposer._reader.cache("session")
    proposer._states([(cache, (7, 9)), (cache, (5, 1, 1))])  # branches beside it, which have rows already
    assert torch.allclose(proposer._states([(cache, path)])[0], below[0, 0], atol=1e-4)


def test_the_likeliest_paths_are_expanded_and_proposed() -> None:
    tree = _Growing(0, context([1, 2, 3], None), PairCache(""))
    tree.add([ProposedNode(ROOT, token, -sure) for token, sure in ((10, 3.0), (11, 0.1), (12, 5.0), (13, 1.0))], 2)
    assert tree.frontier == [1, 3]
    tree.add([ProposedNode(1, 20, -3.5), ProposedNode(1, 21, -0.2), ProposedNode(3, 22, -0.1)], 2)
    assert tree.frontier == [5, 6], "by their paths, not by their own probability"
    assert [(node.parent, node.token) for node in tree.best(4)] == [(ROOT, 11), (ROOT, 13), (0, 21), (1, 22)]
    assert tree.view().path(5) == [11, 21] and tree.view().expand == [5, 6]


def test_passes_end_where_candidates_are_not_worth_their_rows(target: str) -> None:
    """The candidates that remain are those of the whole tree."""
    head = random_head(target, config_of(target, layers=LAYERS), scale=0.3).eval()
    tokens, states = text_of(1)
    whole = EagleProposer(head)
    expected = tree_of(whole.propose([context(tokens, states)])[0])
    for deeper, depth in ((DeeperLevels(8, 4, [-1.0], -1.0), 1), (DeeperLevels(1, 4, [-1.0], -50.0), 2)):
        proposer = EagleProposer(head)
        tree = tree_of(proposer.propose([context(tokens, states, deeper=deeper)])[0])
        assert max(depth_of(tree)) == depth and proposer.passes < whole.passes
        assert [each for each, below in zip(tree, depth_of(tree), strict=True) if below == 1] == [
            each for each, below in zip(expected, depth_of(expected), strict=True) if below == 1
        ]
