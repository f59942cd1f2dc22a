"""Quantised weights: the quantiser's own numbers, rows that stand alone where a target needs it, and the same text."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchao.quantization
import transformers

from drafter_svc.config import DrafterConfig
from drafter_svc.drafter import open_configured
from slipstream.engine.factory import open_engine
from slipstream.engine.kernels.compiled import find_kernels
from slipstream.engine.models.checkpoint import load_checkpoint
from slipstream.engine.models.lean_decoder import LeanDecoder
from slipstream.engine.models.library_forward import LibraryForward
from slipstream.engine.models.quantisation import QUANTISERS, check_target_quantisation
from slipstream.engine.segment import Segment
from slipstream.engine.torch_engine import TorchEngine
from slipstream.errors import FailedPrecondition, InvalidArgument
from slipstream.speculation.sampling_params import SamplingParams
from tests.support.checkpoints import FAMILIES, VOCABULARY, save_checkpoint
from tests.support.fleet import Gateway, drafter, gateway, in_time, slowed, verifier
from tests.support.greedy_text import greedy
from verifier_svc.config import VerifierConfig
from verifier_svc.execution.target import open_target

STEADY = [name for name, quantiser in QUANTISERS.items() if quantiser.steady]
TREE = [-1, -1, 0, 0, 1, 2, 3, 5]
MIXTURES = ("mixtral", "gpt_oss")
MODELS = Path(__file__).parents[4] / "models"
# The NF4 kernel wants inputs in whole blocks of 64.
SHAPE: dict[str, Any] = {"intermediate_size": 128}


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint("llama", tmp_path_factory.mktemp("llama"), **SHAPE))


@pytest.fixture(scope="module")
def opened(folder: str) -> Callable[..., TorchEngine]:
    def build(quantisation: str, dtype: str = "float32") -> TorchEngine:
        engine = open_engine(folder, dtype, 4096, quantisation)
        assert isinstance(engine, TorchEngine)
        return engine

    return build


def library_model(folder: str, quantisation: str) -> Any:
    """The library's own attention on weights that its quantiser was asked for here, not through our code."""
    configs: dict[str, Any] = {
        "int8": transformers.TorchAoConfig(torchao.quantization.Int8WeightOnlyConfig()),
        "int4": transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        ),
    }
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype="float32", quantization_config=configs.get(quantisation)
    ).eval()
    if quantisation == "int8-dynamic":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic

            model = quantize_dynamic(model, {torch.nn.Linear: per_channel_dynamic_qconfig})
    return model


def last_logits(engine: TorchEngine, tokens: list[int]) -> torch.Tensor:
    sequence = engine.kv.begin_unshared(len(tokens))
    logits = engine.forward([Segment(sequence, tokens)]).logits[0]
    engine.kv.close(sequence)
    return logits


@pytest.mark.parametrize("quantisation", QUANTISERS)
def test_packed_numbers_are_the_quantised_models_own(quantisation: str, folder: str, opened: Any) -> None:
    engine, full, reference = opened(quantisation), opened(""), library_model(folder, quantisation)
    lost, apart = [], []
    for length in (1, 7, 30):
        tokens = prompt(length)
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        packed = last_logits(engine, tokens)
        apart.append(float((packed - expected).abs().max()))
        lost.append(float((packed - last_logits(full, tokens)).abs().max()))
    # What is rounded on the way (to bf16, to 7 bits) can fall to the other side for a difference of 1e-6.
    tolerance = 1e-4 if quantisation == "int8" else 0.5 * max(lost)
    assert max(apart) < tolerance < max(lost)


def test_int8_takes_the_lean_forward_pass_where_there_are_kernels(folder: str) -> None:
    expected = LeanDecoder if find_kernels() is not None else LibraryForward
    assert type(load_checkpoint(folder, "float32", quantisation="int8").forward) is expected
    assert type(load_checkpoint(folder, "float32", quantisation="int8", lean=False).forward) is LibraryForward


@pytest.mark.parametrize("quantisation", QUANTISERS)
def test_only_quantisers_for_targets_keep_rows_independent(quantisation: str, opened: Any) -> None:
    """Chains, trees and prefill of others in one pass, against each text alone in a pass of its own."""
    engine = opened(quantisation)
    tokens, other = prompt(20), prompt(37, seed=2)
    nodes = prompt(len(TREE), seed=3)
    sequence, neighbour = engine.kv.begin_unshared(64), engine.kv.begin_unshared(64)
    logits = engine.forward([Segment(neighbour, other), Segment(sequence, tokens, nodes, TREE)]).logits[1:]
    texts = [tokens]
    for token, parent in zip(nodes, TREE, strict=True):
        texts.append([*texts[parent + 1], token])
    alone = torch.stack([last_logits(engine, text) for text in texts])
    apart = float((logits - alone).abs().max())
    lost = float((alone - torch.stack([last_logits(opened(""), text) for text in texts])).abs().max())
    if QUANTISERS[quantisation].steady:
        assert apart < (1e-4 if quantisation == "int8" else 0.05 * lost)
        assert torch.equal(logits.argmax(dim=-1), alone.argmax(dim=-1))
        assert check_target_quantisation(quantisation) == quantisation
    else:
        assert apart > 0.2 * lost
        with pytest.raises(InvalidArgument, match="choose int8 or int4"):
            open_target(VerifierConfig(model="given", quantisation=quantisation))


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("", "int8-dynamic"),
        ("int8", "int4"),
        *(pytest.param("", draft, marks=pytest.mark.slow) for draft in ("int8", "int4")),
    ],
)
async def test_quantised_guesses_never_change_a_token(target: str, draft: str) -> None:
    """The shipped pair in fp32, greedy and sampled."""
    answers = slowed(open_engine(str(MODELS / "target"), "float32", 4096, target))
    guesses = open_engine(str(MODELS / "draft"), "float32", 4096, draft)
    async with drafter(guesses) as address, verifier(answers) as server, gateway(server.address) as client:
        assert await in_time(lambda: guesses_help(client, address))


async def guesses_help(client: Gateway, address: str) -> bool:
    """Whether some of its guesses were accepted, and some were not."""
    drafted = accepted = 0
    for seed, tokens in enumerate(([262, 14, 339, 8], prompt(9))):
        for sampling in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=seed)):
            plain = await client.decode(tokens, tokens=16, sampling=sampling)
            helped = await client.decode(tokens, tokens=16, sampling=sampling, drafters=[address])
            assert helped.token_ids == plain.token_ids
            assert plain.drafted == 0
            drafted, accepted = drafted + helped.drafted, accepted + helped.accepted
    return 0 < accepted < drafted


def test_drafters_and_verifiers_quantise_as_their_settings_specify(folder: str) -> None:
    model = open_configured(DrafterConfig(model=folder, quantisation="int4", kv_tokens=64)).model
    assert model.dtype == "int4/float32"
    assert open_target(VerifierConfig(model=folder, quantisation="int8", kv_tokens=64)).model.dtype == "int8/float32"


@pytest.mark.parametrize("quantisation", STEADY)
def test_a_quantised_target_generates_what_the_library_generates(quantisation: str, folder: str, opened: Any) -> None:
    reference = library_model(folder, quantisation)
    tokens = prompt(9, 4)
    with torch.inference_mode():
        expected = reference.generate(torch.tensor([tokens]), max_new_tokens=16, do_sample=False)[0].tolist()
    assert tokens + greedy(opened(quantisation), tokens, 16) == expected


@pytest.mark.parametrize("quantisation", QUANTISERS)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_the_dtype_of_a_model_names_its_quantisation_and_the_type_of_its_products(
    quantisation: str, dtype: str, folder: str, opened: Any
) -> None:
    if dtype not in QUANTISERS[quantisation].dtypes:
        with pytest.raises(InvalidArgument, match="auto or float32"):
            opened(quantisation, dtype)
        return
    info, full = opened(quantisation, dtype).model, load_checkpoint(folder).info
    assert info.dtype == f"{quantisation}/{'float32' if dtype == 'auto' else dtype}"
    assert (info.parameters, info.vocabulary_size) == (full.parameters, full.vocabulary_size)
    assert (info.fingerprint, info.eos_token_ids) == (full.fingerprint, full.eos_token_ids)


def in_turn() -> list[Any]:
    """Families times quantisers; in the short form each family has one of them, and its neighbour the other one."""
    quantisers = ("int8", "int8-dynamic")
    return [
        pytest.param(family, quantisation, marks=() if number % 2 == which else pytest.mark.slow)
        for number, family in enumerate(family for family in FAMILIES if family != "openai_gpt")
        for which, quantisation in enumerate(quantisers)
    ]


@pytest.mark.parametrize(("family", "quantisation"), in_turn())
def test_every_family_can_be_quantised(family: str, quantisation: str, tmp_path: Path) -> None:
    name = str(save_checkpoint(family, tmp_path))
    full = last_logits(TorchEngine(load_checkpoint(name), tokens=64), prompt(20))
    quantised = last_logits(TorchEngine(load_checkpoint(name, quantisation=quantisation), tokens=64), prompt(20))
    assert not torch.equal(full, quantised)
    # Nought for unrelated numbers; random routers send near-ties to other experts.
    assert torch.nn.functional.cosine_similarity(full, quantised, dim=0) > (0.5 if family in MIXTURES else 0.9)


@pytest.mark.parametrize("quantisation", ["int8", "int8-dynamic"])
def test_a_model_that_nothing_would_quantise_is_refused(quantisation: str, tmp_path: Path) -> None:
    """Its layers are `Conv1D`: it was served in full under the name of the quantisation."""
    with pytest.raises(FailedPrecondition, match="openai-gpt has no layer that can be quantised"):
        load_checkpoint(str(save_checkpoint("openai_gpt", tmp_path)), quantisation=quantisation)


@pytest.mark.parametrize("quantisation", STEADY)
def test_a_folder_that_is_quantised_already_needs_no_choice(
    quantisation: str, folder: str, opened: Any, tmp_path: Path
) -> None:
    library_model(folder, quantisation).save_pretrained(tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    method = {"int8": "torchao", "int4": "bitsandbytes"}[quantisation]
    assert checkpoint.info.dtype == f"{method}/float32"
    tokens = prompt(20)
    stored = last_logits(TorchEngine(checkpoint, tokens=64), tokens)
    assert torch.allclose(stored, last_logits(opened(quantisation), tokens), atol=1e-4)
    with pytest.raises(FailedPrecondition, match="quantised already"):
        load_checkpoint(str(tmp_path), quantisation=quantisation)


def test_a_width_that_a_kernel_cannot_compute_is_refused(tmp_path: Path) -> None:
    """With AVX512-BF16 the NF4 kernel wants whole blocks; without, bitsandbytes computes any width another way."""
    from bitsandbytes.functional import has_avx512bf16  # with torch's compiler: half a second

    folder = str(save_checkpoint("llama", tmp_path, intermediate_size=97))
    if not has_avx512bf16():
        assert load_checkpoint(folder, quantisation="int4").info.dtype.startswith("int4")
        return
    with pytest.raises(FailedPrecondition, match="choose another quantisation"):
        load_checkpoint(folder, quantisation="int4")


def test_choices_that_cannot_be_are_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="int3"):
        load_checkpoint(folder, quantisation="int3")
    with pytest.raises(InvalidArgument, match="does not run on cuda"):
        load_checkpoint(folder, device="cuda", quantisation="int8-dynamic")
    with pytest.raises(InvalidArgument, match="no weights"):
        open_engine("emulated:", quantisation="int8")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    with pytest.raises(FailedPrecondition, match=r"bitsandbytes, which .*slipstream-serve\[quantised\]"):
        load_checkpoint(folder, quantisation="int4")
