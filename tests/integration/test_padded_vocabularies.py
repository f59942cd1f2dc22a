"""Models of one tokenizer whose output layers are padded to different sizes, as those of every Qwen family are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slipstream.engine.factory import open_engine
from slipstream.proposers.base import ROOT, UNLIMITED, DeeperLevels, Proposal, ProposerContext
from slipstream.proposers.draft_model import ModelProposer
from slipstream.proposers.lookup import FoundNode, LookupProposer
from slipstream.proposers.node_choice import within
from slipstream.speculation.sampling_params import SamplingParams
from tests.support.checkpoints import VOCABULARY, save_checkpoint, save_tokenizer
from tests.support.fleet import drafter, gateway, verifier

PADDING = 57
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "coupled": SamplingParams(temperature=0.8, seed=3, top_p=0.9, top_k=20),
    "penalties": SamplingParams(
        temperature=0.8, seed=3, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={VOCABULARY + 5: 9.0, 4: 2.0}
    ),
    "rejection": SamplingParams(temperature=0.8, seed=3, acceptance="rejection"),
}


def pad(folder: Path, padded: Path) -> Path:
    """The same model with `PADDING` more rows, whose logits are large: as far as the weights go they would be chosen.

    Real paddings are small numbers of nothing, of which one is chosen now and then; these show it at once.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        more = torch.randn(PADDING, model.config.hidden_size, generator=torch.Generator().manual_seed(5))
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight = torch.nn.Parameter(torch.cat([layer.weight, more]))
    model.config.vocab_size += PADDING
    model.save_pretrained(padded)
    save_tokenizer(padded, VOCABULARY)
    return padded


def save_like(target: Path, folder: Path) -> Path:
    """A draft that is close to the target: what it proposes is often right, and not always."""
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * float(weight.std()) * torch.randn(weight.shape, generator=draw))
    model.save_pretrained(folder)
    save_tokenizer(folder, VOCABULARY)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("padded")
    target = save_checkpoint("qwen2", place / "target", seed=0)
    draft = save_like(target, place / "draft")
    found = {"target": target, "draft": draft}
    found |= {f"{name} padded": pad(folder, place / f"{name}-padded") for name, folder in found.items()}
    return {name: str(folder) for name, folder in found.items()}


def proposals(folder: str, sampling: SamplingParams, vocabulary_size: int, tokens: list[int]) -> list[Proposal]:
    """Two calls for one text: a level below the root with deeper ones, and one below two of its candidates."""
    proposer = ModelProposer(open_engine(folder, "float32", 4096), width=4, proposal_tokens=16)
    deeper = None if sampling.drawn else DeeperLevels(2, 4, [0.0], -20.0)
    first = ProposerContext("text", tokens, len(tokens), 3, 400, sampling, expand=[ROOT], noise_nodes=[0],
                            deeper=deeper, vocabulary_size=vocabulary_size)  # fmt: skip
    [one] = proposer.propose([first])
    assert isinstance(one, Proposal)
    chosen = [node.token for node in one.nodes if node.parent == ROOT][:2]
    second = replace(first, node_tokens=chosen, parents=[ROOT] * len(chosen), expand=[0], noise_nodes=[1], deeper=None)
    [two] = proposer.propose([second])
    assert isinstance(two, Proposal)
    return [one, two]


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_a_padded_draft_proposes_what_it_proposes_without_padding(folders: dict[str, str], kind: str) -> None:
    """So texts and acceptance are equal too; under `rejection` also each q: tokens are drawn behind the cut."""
    sampling, tokens = SAMPLINGS[kind], [5, 6, 7, 8, 9, 5, 6]
    plain = proposals(folders["draft"], sampling, VOCABULARY, tokens)
    cut = proposals(folders["draft padded"], sampling, VOCABULARY, tokens)
    free = proposals(folders["draft padded"], sampling, UNLIMITED, tokens)
    assert cut == plain and all(proposal.nodes for proposal in cut)
    assert max(node.token for proposal in free for node in proposal.nodes) >= VOCABULARY  # else nothing was shown


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("inside", [False, True])
async def test_a_padded_draft_serves_and_changes_no_text(folders: dict[str, str], kind: str, inside: bool) -> None:
    sampling: dict[str, Any] = {"sampling": without_unknown(SAMPLINGS[kind]), "tokens": 48}
    engine, local = open_engine(folders["target"], "float32"), dict[str, Any]()
    if inside:
        local = {"local_drafters": (f"model={folders['draft padded']}",), "draft_dtype": "float32"}
    async with (
        drafter(open_engine(folders["draft padded"], "float32")) as remote,
        verifier(engine, always_speculate=True, max_wait_s=1.0, **local) as server,
        gateway(server.address) as client,
    ):
        plain = await client.decode([5, 6, 7], **sampling)
        place = "verifier:model" if inside else remote
        drafted = await client.decode([5, 6, 7], **sampling, drafters=[place], trusted=True)
    assert not [event.failure for event in drafted.events if event.HasField("failure")]
    assert drafted.drafted > 0
    if kind != "rejection":  # whose text depends on what was drafted
        assert drafted.token_ids == plain.token_ids and drafted.accepted > 0


def without_unknown(sampling: SamplingParams) -> SamplingParams:
    """Its target has no padding, so a request that names such a token is refused."""
    return replace(sampling, logit_bias={token: bias for token, bias in sampling.logit_bias.items() if token < 199})


@pytest.mark.parametrize("kind", SAMPLINGS)
async def test_a_draft_goes_on_behind_tokens_that_only_its_target_has(folders: dict[str, str], kind: str) -> None:
    """The target writes tokens of its padding, and its prompt holds one."""
    prompt = [5, VOCABULARY + 3, 6, 7]
    asked: dict[str, Any] = {"sampling": SAMPLINGS[kind], "tokens": 48}
    async with (
        drafter(open_engine(folders["draft"], "float32")) as remote,
        verifier(open_engine(folders["target padded"], "float32"), always_speculate=True, max_wait_s=1.0) as server,
        gateway(server.address) as client,
    ):
        plain = await client.decode(prompt, **asked)
        drafted = await client.decode(prompt, **asked, drafters=[remote], trusted=True)
    assert not [event.failure for event in drafted.events if event.HasField("failure")]
    assert drafted.drafted > 0
    assert max(plain.token_ids) >= VOCABULARY
    if kind != "rejection":
        assert drafted.token_ids == plain.token_ids


def test_each_row_is_cut_at_its_own_targets_size() -> None:
    rows = torch.zeros(2, 6)
    assert within(rows, [UNLIMITED, 9]) is rows
    assert within(rows, [4, 4]).shape == (2, 4)
    mixed = within(rows, [3, 5])
    assert mixed.shape == (2, 5) and mixed.isneginf().sum(dim=1).tolist() == [2, 0]
    assert not rows.isneginf().any()


def test_a_lookup_ends_where_another_targets_token_stands() -> None:
    class Found:
        def read(self, tokens: list[int]) -> None: ...

        def finish(self) -> None: ...

        def look_up(self, path: list[int], count: int) -> list[FoundNode]:
            return [FoundNode(0, 3, 0.5), FoundNode(1, 9, 0.5), FoundNode(2, 4, 0.5)]

    proposer = LookupProposer(lambda _: Found())
    context = ProposerContext(
        "text", [1, 2], 2, 1, 9, SamplingParams(temperature=0.0), expand=[ROOT], vocabulary_size=9
    )
    [answer] = proposer.propose([context])
    assert isinstance(answer, Proposal) and [node.token for node in answer.nodes] == [3]
