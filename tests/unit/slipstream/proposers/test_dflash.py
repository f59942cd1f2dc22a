"""DFlash: both layouts give the numbers of a plain implementation, what does not fit is refused by name, and a block
depends on its text alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.engine.engine import HiddenStates
from slipstream.errors import FailedPrecondition, NotFound, SlipstreamError
from slipstream.proposers.base import ROOT, HiddenRows, Proposal, ProposerContext, ProposerSettings, open_proposer
from slipstream.proposers.dflash import DflashProposer, one_step_accuracy
from slipstream.proposers.dflash_head import DflashHead, load_dflash
from slipstream.proposers.head_file import read_target
from slipstream.speculation.sampling_params import SamplingParams
from tests.support.checkpoints import VOCABULARY, save_checkpoint
from tests.support.dflash_golden import ANCHORS, CASES, COLUMNS, ROWS, drafter, inputs
from tests.support.dflash_heads import BLOCK, LAYERS, MASK, Tensors, config_of, plain_block, random_tensors, save_dflash

LENGTH, WIDTH = 12, 64
GREEDY = SamplingParams(temperature=0.0)
KNOWN = torch.arange(64) * 2
GOLDEN = json.loads((Path(__file__).parents[3] / "support" / "dflash_golden.json").read_text())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint("llama", tmp_path_factory.mktemp("target") / "llama", seed=0))


@pytest.fixture
def head(target: str, tmp_path: Path) -> DflashHead:
    return load(save_dflash(tmp_path / "head", random_tensors(), config_of()), target)


def load(folder: str, target: str) -> DflashHead:
    return load_dflash(folder, read_target(target), torch.float32)


def text_of(seed: int, length: int = LENGTH) -> tuple[list[int], Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (length,), generator=noise).tolist(), torch.randn(
        length - 1, 2 * WIDTH, generator=noise
    )


def states_of(features: Tensor, layers: tuple[int, ...] = LAYERS) -> HiddenStates:
    parts = features.split(WIDTH, dim=-1)
    return HiddenStates(parts[-1], dict(zip(layers, parts, strict=True)))


def context(tokens: list[int], features: Tensor | None, first: int = 0, **options: Any) -> ProposerContext:
    """`features`: of the tokens from `first` on."""
    hidden = () if features is None else (HiddenRows(first, states_of(features)),)
    settings: dict[str, Any] = {"sampling": GREEDY, "expand": [ROOT], "noise_nodes": [0], "hidden": hidden}
    settings = {"handle": "session"} | settings | options
    return ProposerContext(tokens=tokens, length=len(tokens), prompt_length=2, max_length=60, **settings)


def logits_of(head: DflashHead, tokens: list[int], features: Tensor) -> Tensor:
    proposer = DflashProposer(head)
    proposer.propose([context(tokens, features)])
    return proposer._drafted["session"].logits


@pytest.mark.parametrize("form", ["original", "speculators", "part of the vocabulary", "last hidden state"])
def test_both_layouts_give_the_numbers_of_a_plain_implementation(form: str, target: str, tmp_path: Path) -> None:
    tensors, (tokens, features) = random_tensors(), text_of(3)
    config = config_of(speculators=form in ("speculators", "part of the vocabulary"))
    stored = dict(tensors)
    if form == "part of the vocabulary":
        tensors = tensors | {"lm_head.weight": torch.randn(64, WIDTH)}
        known = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, KNOWN, True)
        stored = tensors | {"d2t": KNOWN - torch.arange(64), "t2d": known}
    if form == "last hidden state":
        config["dflash_config"]["target_layer_ids"] = [0, 2]
    head = load(save_dflash(tmp_path, stored, config), target)
    expected = plain_block(target, tensors, features, tokens[-1])
    assert expected.std() > 0.5
    if form == "last hidden state":
        proposer = DflashProposer(head)
        rows = HiddenRows(0, HiddenStates(features[:, WIDTH:], {1: features[:, :WIDTH]}))
        proposer.propose([context(tokens, None, hidden=(rows,))])
        found = proposer._drafted["session"].logits
    else:
        found = logits_of(head, tokens, features)
    assert found.shape == (BLOCK - 1, VOCABULARY)
    if form == "part of the vocabulary":
        assert int(found[0].isfinite().sum()) == 64
        found = found[:, KNOWN]
    assert torch.allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_drafters_give_the_numbers_of_speculators(case: str, target: str, tmp_path: Path) -> None:
    """`dflash_golden.json` holds what the other implementation made of the same weights, and its own config.json. Both
    blocks begin within one text there: neither saw its root's hidden states, nor what follows."""
    tensors, config = drafter(**CASES[case])
    known = torch.arange(VOCABULARY) if "d2t" not in tensors else tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    rows, columns = [row - 1 for row in ROWS], known[list(COLUMNS)]
    for number, written in enumerate((config, GOLDEN[case]["config"])):
        head = load(save_dflash(tmp_path / str(number), tensors, written), target)
        tokens, features = inputs(len(head.config.layers))
        for anchor, expected in zip(ANCHORS, GOLDEN[case]["logits"], strict=True):
            states = states_of(features[:anchor], head.config.layers)
            proposer = DflashProposer(head)
            proposer.propose([context(tokens[: anchor + 1].tolist(), None, hidden=(HiddenRows(0, states),))])
            found = proposer._drafted["session"].logits[rows][:, columns]
            assert torch.allclose(found, torch.tensor(expected), rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"fc.weight": None}, r"lacks the tensor fc\.weight \[64, 128\]"),
        ({"fc.weight": torch.ones(64, 192)}, r"fc\.weight is \[64, 192\], this target needs \[64, 128\]"),
        ({"fc.weight": torch.zeros(64, 128)}, "not trained"),
        ({"layers.1.self_attn.k_norm.weight": None}, r"lacks the tensor layers\.1\.self_attn\.k_norm\.weight \[16\]"),
        ({"layers.2.mlp.up_proj.weight": torch.ones(96, 64)}, r"has the tensor layers\.2\.mlp\.up_proj\.weight"),
        ({"candidate_selector.hidden_projection.weight": torch.ones(2, 2)}, "has the tensor candidate_selector"),
        ({"norm.weight": torch.full((64,), math.nan)}, r"norm\.weight \[64\] holds numbers that are not finite"),
        ({"d2t": torch.arange(64) * -1}, r"offsets d2t \[64\] must lead to ascending token ids below 199"),
        ({"d2t": torch.arange(64)}, r"lacks the tensor lm_head\.weight \[64, 64\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_name_and_shape(
    changes: dict[str, Tensor | None], sentence: str, target: str, tmp_path: Path
) -> None:
    held = random_tensors() | {key: value for key, value in changes.items() if value is not None}
    kept: Tensors = {key: value for key, value in held.items() if changes.get(key, value) is not None}
    with pytest.raises(FailedPrecondition, match=sentence):
        load(save_dflash(tmp_path, kept, config_of()), target)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"dflash_config": None}, "no block drafter: it has no dflash_config"),
        ({"speculators_model_type": "dspark"}, "is a 'dspark' drafter"),
        ({"hidden_size": 32}, "is 32 wide, the target .* 64; it was trained for another model"),
        ({"block_size": 1}, "block_size is 1"),
        ({"dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 500}}, "mask_token_id is 500; .* 0 to 198"),
        ({"dflash_config": {"target_layer_ids": [0, 9], "mask_token_id": 1}}, r"layers \[0, 9\] give; .* has 0 to 2"),
        ({"dflash_config": {"mask_token_id": 1}}, r"layers \[\] give"),
        ({"speculators": True, "aux_hidden_state_layer_ids": [1, 3]}, "has 3, .* front of the final norm; 0 to 2"),
        ({"sample_from_anchor": True}, "sample_from_anchor is True; only drafters with False are read"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "use_sliding_window": True}, "sliding window"),
    ],
)
def test_a_configuration_that_cannot_be_followed_is_refused(
    config: dict[str, Any], sentence: str, target: str, tmp_path: Path
) -> None:
    with pytest.raises(FailedPrecondition, match=sentence):
        load(save_dflash(tmp_path, random_tensors(), config_of(**config)), target)


def test_a_folder_without_its_files_is_refused(target: str, tmp_path: Path) -> None:
    save_dflash(tmp_path, random_tensors(), config_of())
    (tmp_path / "config.json").unlink()
    with pytest.raises(FailedPrecondition, match=r"no config\.json"):
        load(str(tmp_path), target)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config_of()))
    with pytest.raises(NotFound, match=r"none of model\.safetensors"):
        load(str(tmp_path), target)


def tree_of(answer: Proposal | SlipstreamError) -> list[tuple[int, int, Any]]:
    assert isinstance(answer, Proposal)
    return [(node.parent, node.token, pytest.approx(node.log_prob, rel=1e-3, abs=1e-3)) for node in answer.nodes]


def test_a_block_depends_on_its_text_alone(head: DflashHead) -> None:
    tokens, features = text_of(1)
    alone = DflashProposer(head)
    expected = tree_of(alone.propose([context(tokens, features)])[0])
    assert len(expected) >= 16 and all(parent < at for at, (parent, _, _) in enumerate(expected))
    # The same again without a new pass, and beside another session, and read in chunks.
    assert tree_of(alone.propose([context(tokens, None)])[0]) == expected and alone.passes == 1
    other, of_other = text_of(2, 9)
    both = DflashProposer(head).propose([context(other, of_other, handle="other"), context(tokens, features)])
    assert tree_of(both[1]) == expected != tree_of(both[0])
    chunked = DflashProposer(head)
    answers = [
        chunked.propose([context(tokens, part, max_read_tokens=4, expand=expand)])[0]
        for part, expand in ((features, []), (None, []), (None, [ROOT]))
    ]
    assert [each.read_tokens for each in answers if isinstance(each, Proposal)] == [5, 9, 12]
    assert tree_of(answers[-1]) == expected
    # Token by token, each with a block of its own before it, whose rows must be gone. What was committed teaches.
    step = DflashProposer(head)
    for length in range(4, LENGTH + 1):
        first = 0 if length == 4 else length - 2
        step.propose([context(tokens[:length], features[first : length - 1], first)])
    assert torch.allclose(step._drafted["session"].logits, alone._drafted["session"].logits, atol=1e-4)


def test_the_beginning_of_a_text_is_taken_from_another_of_its_salt(head: DflashHead) -> None:
    tokens, features = text_of(1)
    proposer = DflashProposer(head)
    expected = tree_of(proposer.propose([context(tokens, features, handle="first", cache_salt="a")])[0])
    later = features[8:]
    assert tree_of(proposer.propose([context(tokens, later, 8, handle="second", cache_salt="a")])[0]) == expected
    assert tree_of(proposer.propose([context(tokens, later, 8, handle="third", cache_salt="b")])[0]) != expected
    assert proposer._reader.cache("third").start == 8


def test_without_room_or_hidden_states_nothing_is_proposed(head: DflashHead) -> None:
    tokens, features = text_of(1)
    proposer = DflashProposer(head, most_tokens=LENGTH)
    expected = tree_of(proposer.propose([context(tokens, features, handle="first")])[0])
    refused = proposer.propose([context(tokens, features, handle="second")])[0]
    assert isinstance(refused, Proposal) and refused.no_room and not refused.nodes
    proposer.close_sequence("first")
    assert tree_of(proposer.propose([context(tokens, None, handle="second")])[0]) == expected
    for early in (context(tokens[:1], None, handle="short"), context(tokens, None, handle="unread")):
        assert tree_of(DflashProposer(head).propose([early])[0]) == []


def test_tokens_are_drawn_level_by_level_under_rejection(head: DflashHead) -> None:
    tokens, features = text_of(1)
    proposer = DflashProposer(head, width=2)
    drawn = SamplingParams(temperature=1.0, acceptance="rejection")
    first = proposer.propose([context(tokens, features, sampling=drawn, noise_stream=1)])[0]
    assert isinstance(first, Proposal) and len(first.nodes) == 2
    assert all(node.distribution is not None for node in first.nodes)
    below = context(
        tokens, None, sampling=drawn, node_tokens=[first.nodes[0].token], parents=[ROOT], expand=[0], noise_stream=1
    )
    second = proposer.propose([below])[0]
    assert isinstance(second, Proposal) and {node.parent for node in second.nodes} == {0} and proposer.passes == 1
    q = second.nodes[0].distribution
    best = proposer._drafted["session"].logits[1].argmax()
    assert q is not None and int(best) in q.token_ids


def test_broken_numbers_end_drafting_of_their_session_alone(head: DflashHead) -> None:
    (tokens, features), (others, of_others) = text_of(1), text_of(2)
    drawn = SamplingParams(temperature=1.0, acceptance="rejection")
    broken, whole = DflashProposer(head).propose(
        [
            context(tokens, features * math.nan, handle="broken", sampling=drawn),
            context(others, of_others, handle="whole", sampling=drawn),
        ]
    )
    assert isinstance(broken, SlipstreamError) and broken.reason == "BROKEN_NUMBERS"
    assert isinstance(whole, Proposal) and whole.nodes
    coupled = DflashProposer(head).propose([context(tokens, features * math.nan)])[0]
    assert isinstance(coupled, Proposal) and not coupled.nodes


def test_the_trial_at_the_start_counts_first_tokens_behind_some_roots(head: DflashHead) -> None:
    tokens, features = text_of(1, 18)
    features = torch.cat((features, features[:1]))
    right = [0] * 18
    for root in (1, 9, 17):
        right[root] = int(logits_of(head, tokens[: root + 1], features[:root])[0].argmax())
    accuracy = one_step_accuracy(head)
    assert accuracy(tokens, states_of(features), right) == 1.0
    right[9] = (right[9] + 1) % VOCABULARY
    assert accuracy(tokens, states_of(features), right) == pytest.approx(2 / 3)


def test_the_method_opens_with_what_it_needs_of_the_target(target: str, tmp_path: Path) -> None:
    folder = save_dflash(tmp_path, random_tensors(reads=2), config_of())
    opened = open_proposer("dflash", ProposerSettings(model=folder, target=target, device="cpu"))
    assert opened.hidden is not None and opened.hidden.layers == LAYERS and opened.hidden.every_row
    assert opened.depth == BLOCK - 1 and opened.accuracy is not None and MASK < VOCABULARY
