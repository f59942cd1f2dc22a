"""Loading: what is known about a model, and what is refused with a sentence."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slipstream.engine.models import checkpoint as checkpoints
from slipstream.engine.models.checkpoint import describe_checkpoint, load_checkpoint
from slipstream.engine.segment import KVSequence, Segment
from slipstream.engine.torch_engine import TorchEngine
from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound, OutOfRange, ResourceExhausted
from slipstream.rpc.proto_conversion import model_to_proto
from slipstream.tokenizer.chat_template_source import chat_template_fingerprint
from slipstream.tokenizer.vocabulary import fingerprint, load_tokenizer
from tests.support.checkpoints import VOCABULARY, save_checkpoint, save_model
from tests.support.packed_passes import library_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("llama"), eos_token_id=[3, 4])


@pytest.fixture
def engine(llama: Path) -> TorchEngine:
    return TorchEngine(load_checkpoint(str(llama)), tokens=64, block_size=16)


def write_config(folder: Path, **content: Any) -> str:
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


def test_a_folder_is_described_without_the_network(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a local folder touched the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    info = load_checkpoint(str(llama)).info
    assert (info.name, info.vocabulary_size, info.max_length) == (llama.name, VOCABULARY, 512)
    assert (info.dtype, info.eos_token_ids) == ("float32", (3, 4))
    assert info.fingerprint == fingerprint(load_tokenizer(str(llama)))
    assert info.revision.startswith("local-")
    assert info.parameters == library_model(str(llama)).num_parameters()


def test_the_revision_follows_the_files(llama: Path, tmp_path: Path) -> None:
    other = save_checkpoint("llama", tmp_path, rms_norm_eps=1e-5)
    assert load_checkpoint(str(other)).info.revision != load_checkpoint(str(llama)).info.revision


COMMITS = ("a" * 40, "b" * 40)
LOADING = """
import sys
from slipstream.engine.models.checkpoint import describe_checkpoint, load_checkpoint
for name in sys.argv[1:]:
    loaded = load_checkpoint(name, lean=False)
    norm = next(p for n, p in loaded.forward.model.named_parameters() if n.endswith("norm.weight"))
    assert describe_checkpoint(name).name == loaded.info.name
    print(loaded.info.name, loaded.info.revision, float(norm[0]))
"""


def test_a_hub_id_with_a_revision_is_that_commit_and_without_one_the_newest(llama: Path, tmp_path: Path) -> None:
    """Out of a cache as the hub's own tool leaves it, without the network."""
    cache = tmp_path / "hub" / "models--owner--name"
    for number, commit in enumerate(COMMITS):
        folder = cache / "snapshots" / commit
        shutil.copytree(llama, folder)
        weights = load_file(folder / "model.safetensors")
        norms = {name: torch.full_like(weights[name], number + 2.0) for name in weights if name.endswith("norm.weight")}
        save_file(weights | norms, folder / "model.safetensors", {"format": "pt"})
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMITS[1])
    names = [f"owner/name@{COMMITS[0]}", f"owner/name@{COMMITS[1]}", "owner/name"]
    done = subprocess.run(
        [sys.executable, "-c", LOADING, *names],
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    told = [line.split() for line in done.stdout.splitlines()]
    expected = [["owner/name", COMMITS[number], f"{number + 2.0}"] for number in (0, 1, 1)]
    assert told == expected, done.stderr


def test_a_model_is_described_with_its_chat_template(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    assert load_checkpoint(str(tmp_path)).info.chat_template == ""
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    described = model_to_proto(load_checkpoint(str(tmp_path)).info)  # what GetModel answers
    assert described.chat_template_fingerprint == chat_template_fingerprint(str(tmp_path)) != ""


def test_without_a_tokenizer_the_fingerprint_is_the_size(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert load_checkpoint(str(tmp_path)).info.fingerprint == f"size-{VOCABULARY}"


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_a_model_is_loaded_in_the_requested_dtype(llama: Path, dtype: str) -> None:
    info = load_checkpoint(str(llama), dtype).info
    assert info.dtype == ("float32" if dtype == "auto" else dtype)


def test_long_rope_is_served_up_to_its_original_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}
    save_checkpoint("llama", tmp_path, rope_parameters=rope)
    assert load_checkpoint(str(tmp_path)).info.max_length == 128


def test_missing_or_broken_parts_of_a_checkpoint_are_named(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no folder"):
        load_checkpoint("./nowhere")
    with pytest.raises(NotFound, match=r"config\.json"):
        load_checkpoint(str(tmp_path))
    with pytest.raises(InvalidArgument, match="int3"):
        load_checkpoint(str(llama), "int3")
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    with pytest.raises(FailedPrecondition, match="cannot be loaded"):
        load_checkpoint(str(tmp_path))


def test_pickled_weights_are_refused(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    torch.save({"lm_head.weight": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(FailedPrecondition, match="cannot be loaded"):
        load_checkpoint(str(tmp_path))


@pytest.mark.parametrize("read", [load_checkpoint, describe_checkpoint])
def test_kimi_k2_is_deepseek_v3_under_another_name(read: Any, tmp_path: Path) -> None:
    """Its checkpoints name code of their own, which is not needed."""
    settings = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    sizes = {"num_key_value_heads": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    save_model("DeepseekV3Config", settings | experts | sizes, tmp_path)
    file, of_theirs = tmp_path / "config.json", {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    before = read(str(tmp_path))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "kimi_k2", "auto_map": of_theirs}))
    after = read(str(tmp_path))
    known = [replace(getattr(each, "info", each), revision="", arithmetic="") for each in (before, after)]
    assert known[0] == known[1]  # the digest is that of the files


@pytest.mark.parametrize("model_type", ["llama", "of-their-own"])
@pytest.mark.parametrize("read", [load_checkpoint, describe_checkpoint])
def test_code_in_a_checkpoint_never_runs(read: Any, model_type: str, tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    file, ran = tmp_path / "config.json", tmp_path / "ran"
    names = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model", "AutoTokenizer": "theirs.Tokenizer"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": model_type, "auto_map": names}))
    (tmp_path / "theirs.py").write_text(f"open({str(ran)!r}, 'w').close()")
    if model_type == "llama":
        read(str(tmp_path))
    else:
        with pytest.raises((NotFound, FailedPrecondition)):
            read(str(tmp_path))
    assert not ran.exists()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "mamba"}, "linear_attention"),
        ({"model_type": "rwkv"}, "cannot be rolled back"),
        ({"model_type": "qwen3_next"}, "linear_attention"),
        ({"model_type": "lfm2", "num_hidden_layers": 1, "layer_types": ["conv"]}, "conv"),
        ({"model_type": "llama4_text"}, "chunked_attention"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "roformer"}, "cannot be replaced"),
        ({"model_type": "git"}, "cannot be replaced"),
        ({"model_type": "vit"}, "no causal language model"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_families_that_cannot_be_packed_are_refused_before_their_weights_are_read(
    config: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "weights_revision", lambda name: pytest.fail("the weights' digest was computed"))
    with pytest.raises(FailedPrecondition, match=why):
        load_checkpoint(write_config(tmp_path, **config))


def test_a_model_without_causal_attention_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint("llama", tmp_path)
    kind = transformers.models.llama.modeling_llama.LlamaAttention
    real = kind.__init__

    def look_ahead(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.is_causal = False

    monkeypatch.setattr(kind, "__init__", look_ahead)
    with pytest.raises(FailedPrecondition, match="look ahead"):
        load_checkpoint(str(tmp_path))


def test_the_pool_is_sized_in_tokens(llama: Path) -> None:
    checkpoint = load_checkpoint(str(llama))
    assert TorchEngine(checkpoint, tokens=100, block_size=32).kv.blocks_total == 3
    with pytest.raises(ResourceExhausted):
        TorchEngine(checkpoint, tokens=31, block_size=32)


def test_kv_blocks_are_reserved_or_the_sequence_is_refused(engine: TorchEngine) -> None:
    first = engine.kv.begin_unshared(40)
    assert (engine.kv.blocks_total, engine.kv.blocks_free) == (4, 1)
    with pytest.raises(ResourceExhausted, match="try later"):
        engine.kv.begin_unshared(17)
    with pytest.raises(OutOfRange):
        engine.forward([Segment(first, [1] * 49)])
    engine.kv.close(first)
    engine.kv.close(first)
    assert engine.kv.blocks_free == 4


def test_bad_steps_are_refused(engine: TorchEngine) -> None:
    sequence = engine.kv.begin_unshared(16)
    for segments in (
        [],
        [Segment(sequence, [1]), Segment(sequence, [1])],
        [Segment(sequence, [VOCABULARY])],
        [Segment(sequence, [1], [-1], [-1])],
        [Segment(sequence, [1], [2], [-1], wanted=[1])],
        [Segment(sequence, [1, 2], [3], [-1], wanted=[-3])],
    ):
        with pytest.raises(InvalidArgument):
            engine.forward(segments)


def test_a_prefill_chunk_costs_no_logits(engine: TorchEngine) -> None:
    chunk = Segment(engine.kv.begin_unshared(16), [1, 2, 3], want_logits=False)
    assert engine.forward([chunk]).logits.shape == (0, VOCABULARY)


def test_logits_are_returned_for_the_requested_rows_alone(engine: TorchEngine) -> None:
    one, other = engine.kv.begin_unshared(16), engine.kv.begin_unshared(16)
    every = engine.forward([Segment(one, [1, 2], [3, 4, 5], [-1, 0, -1])]).logits
    some = engine.forward(
        [
            Segment(one, [1, 2], [3, 4, 5], [-1, 0, -1], wanted=[2, -1]),
            Segment(other, [1, 2], [3, 4, 5], [-1, 0, -1], wanted=[1]),
        ]
    ).logits
    assert torch.equal(some, every[[3, 0, 2]])


def test_rows_that_a_tree_holds_are_not_computed_again(engine: TorchEngine) -> None:
    sequence = engine.kv.begin_unshared(16)
    tree = Segment(sequence, [1, 2], [3, 4, 5, 6], [-1, 0, -1, 2])
    every = engine.forward([tree]).logits
    grown = Segment(sequence, [1, 2], [3, 4, 5, 6], [-1, 0, -1, 2], wanted=[2, 3], held=4)
    with pytest.raises(InvalidArgument, match="batch-invariant"):
        engine.forward([grown])
    engine.batch_invariant = False
    engine.forward([Segment(sequence, [1, 2], [3, 4], [-1, 0])])
    assert torch.allclose(engine.forward([grown]).logits, every[3:], atol=1e-5)
    engine.kv.keep(grown, [2, 3])
    assert sequence.tokens == [1, 2, 5, 6]
    with pytest.raises(FailedPrecondition, match="rows"):  # none are there after `keep`
        engine.forward([Segment(sequence, [7], [8], [-1], wanted=[0], held=1)])
    with pytest.raises(InvalidArgument, match="wanted"):  # the root was computed before
        engine.forward([Segment(sequence, [7], [8], [-1])])
        engine.forward([Segment(sequence, [7], [8, 9], [-1, 0], held=2)])


def test_a_step_that_was_not_kept_is_forgotten(engine: TorchEngine) -> None:
    sequence = engine.kv.begin_unshared(32)
    engine.forward([Segment(sequence, [9, 8, 7], [6, 5], [-1, 0])])
    again = engine.forward([Segment(sequence, [1, 2])]).logits
    fresh = engine.forward([Segment(engine.kv.begin_unshared(8), [1, 2])]).logits
    assert torch.equal(again, fresh)


def test_committed_tokens_end_at_the_models_length(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path, max_position_embeddings=8)
    engine = TorchEngine(load_checkpoint(str(tmp_path)), tokens=64, block_size=16)
    sequence = engine.kv.begin_unshared(16)
    last = Segment(sequence, list(range(8)), [3, 4], [-1, 0])
    at_the_end = engine.forward([last]).logits[0]
    assert torch.allclose(at_the_end, engine.forward([Segment(sequence, list(range(8)))]).logits[0], atol=1e-5)
    with pytest.raises(OutOfRange, match="end the session"):
        engine.forward([Segment(sequence, list(range(9)))])


def read(engine: TorchEngine, tokens: list[int], salt: str = "") -> tuple[KVSequence, torch.Tensor]:
    """A sequence of these tokens, and the logits after the last one."""
    sequence = engine.kv.begin(tokens, salt)
    return sequence, go_on(engine, sequence, tokens[sequence.length :])


def go_on(engine: TorchEngine, sequence: KVSequence, tokens: list[int]) -> torch.Tensor:
    engine.kv.grow(sequence, len(tokens))
    segment = Segment(sequence, tokens)
    logits = engine.forward([segment]).logits[0]
    engine.kv.keep(segment, [])
    return logits


def test_shared_prefixes_give_the_same_numbers(llama: Path) -> None:
    engine = TorchEngine(load_checkpoint(str(llama)), tokens=256, block_size=16)
    prompt = [(7 * place) % VOCABULARY for place in range(40)]
    first, alone = read(engine, prompt)
    second, shared = read(engine, prompt)
    assert second.blocks[:2] == first.blocks[:2] and torch.allclose(alone, shared, atol=1e-5)
    _, other = read(engine, prompt, salt="another tenant")
    assert torch.allclose(alone, other, atol=1e-5)
    # A rollback into what both read: one goes on elsewhere, the other one does not notice.
    engine.kv.rollback(second, 21)
    changed = go_on(engine, second, [3, 1, 4])
    _, fresh = read(engine, [*prompt[:21], 3, 1, 4], salt="nobody")
    assert torch.allclose(changed, fresh, atol=1e-5)
    assert torch.allclose(go_on(engine, first, [5]), read(engine, [*prompt, 5], salt="nobody")[1], atol=1e-5)
