"""SmolLM2 with a draft whose output layer has 128 rows more than there are tokens, as every Qwen model has some."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.engine.engine import Engine
from slipstream.engine.factory import open_engine
from slipstream.proposers.base import ROOT, UNLIMITED, DeeperLevels, Proposal, ProposerContext
from slipstream.proposers.draft_model import ModelProposer
from slipstream.speculation.sampling_params import SamplingParams
from tests.real_model.prompts import OWN, encoded
from tests.real_model.shallow import save_shallow
from tests.support.fleet import drafter, gateway, verifier

PADDING, KV_TOKENS, TOKENS = 128, 2048, 24
GREEDY = SamplingParams(temperature=0.0)
EMBEDDINGS = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def vocabulary(smollm2: Path) -> int:
    return int(json.loads((smollm2 / "config.json").read_text("utf-8"))["vocab_size"])


@pytest.fixture(scope="module")
def padded(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shallow draft whose rows of padding have large logits: as far as the weights go they are chosen at once."""
    folder = save_shallow(smollm2, tmp_path_factory.mktemp("padded"))
    config, weights = json.loads((folder / "config.json").read_text("utf-8")), load_file(folder / "model.safetensors")
    known = weights[EMBEDDINGS]  # of the input and, tied, of the output
    draw = torch.Generator().manual_seed(5)
    more = torch.randn(PADDING, known.shape[1], generator=draw) * 20 * float(known.float().std())
    weights[EMBEDDINGS] = torch.cat([known, more.to(known.dtype)])
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": len(weights[EMBEDDINGS])}))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def proposed(folder: Path, prompt: list[int], vocabulary_size: int) -> list[int]:
    proposer = ModelProposer(open_engine(str(folder), "float32", KV_TOKENS), width=4, proposal_tokens=16)
    deeper = DeeperLevels(2, 4, [0.0], -20.0)
    context = ProposerContext("text", prompt, len(prompt), len(prompt), 400, GREEDY, expand=[ROOT], noise_nodes=[0],
                              deeper=deeper, vocabulary_size=vocabulary_size)  # fmt: skip
    (found,) = proposer.propose([context])
    assert isinstance(found, Proposal)
    return [node.token for node in found.nodes]


@pytest.mark.long
def test_candidates_of_a_padded_draft_are_tokens_of_the_target(
    smollm2: Path, shallow: Path, padded: Path, vocabulary: int
) -> None:
    for prompt in encoded(smollm2, OWN[:2]):
        assert max(proposed(padded, prompt, UNLIMITED)) >= vocabulary, "else nothing is shown"
        cut = proposed(padded, prompt, vocabulary)
        assert cut and cut == proposed(shallow, prompt, vocabulary)


@pytest.mark.timeout(600)
async def test_drafting_goes_on_with_a_padded_draft_and_changes_no_text(smollm2: Path, padded: Path) -> None:
    (prompt,) = encoded(smollm2, OWN[:1])
    target: Engine = open_engine(str(smollm2), "float32", KV_TOKENS)
    async with (
        drafter(open_engine(str(padded), "float32", KV_TOKENS)) as remote,
        verifier(target, always_speculate=True, max_wait_s=5.0) as server,
        gateway(server.address) as client,
    ):
        plain = await client.decode(prompt, sampling=GREEDY, tokens=TOKENS)
        drafted = await client.decode(prompt, sampling=GREEDY, tokens=TOKENS, drafters=[remote], trusted=True)
    assert drafted.token_ids == plain.token_ids
    assert not [event.failure for event in drafted.events if event.HasField("failure")]
    assert drafted.rounds and sum(each.drafted > 0 for each in drafted.rounds) > 2, "not only the first candidates"
