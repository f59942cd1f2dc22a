"""A model in a GGUF file is the same function as its own checkpoint, or is refused before it serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from slipstream.engine.models import gguf_conversion
from slipstream.engine.models.gguf_file import read_header
from slipstream.engine.models.gguf_rope import llama3_divisors
from slipstream.errors import FailedPrecondition, NotFound, SlipstreamError
from slipstream.tokenizer import gguf_folder
from slipstream.tokenizer.chat_template_source import load_chat_template
from slipstream.tokenizer.vocabulary import check_folder, eos_token_ids, is_local, load_tokenizer, model_folder
from slipstream.user_cache import cache_folder
from tests.support.gguf_files import header, random_model, save_gguf, vocabulary

TOKENS = torch.randint(2, 200, (1, 40), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(TOKENS).logits.float()
    return found


def converted(file: Path, folder: Path) -> Any:
    gguf_conversion.convert(file, folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_folder_computes_what_the_checkpoint_computes(tmp_path: Path, family: str, tied: bool) -> None:
    model = random_model(family, tie_word_embeddings=tied)
    read = converted(save_gguf(model, family, tmp_path / "tiny.gguf"), tmp_path / "made")
    assert torch.equal(logits(read), logits(model))
    assert read.dtype == torch.float32 and getattr(read.config, "quantization_config", None) is None


@pytest.mark.parametrize(("kind", "dtype", "off"), [("F16", "float16", 0.01), ("BF16", "bfloat16", 0.05),
                                                   ("Q8_0", "bfloat16", 0.05), ("Q4_0", "bfloat16", 0.6)])  # fmt: skip
def test_blocks_become_numbers_of_one_type(tmp_path: Path, kind: str, dtype: str, off: float) -> None:
    model = random_model("llama")
    read = converted(save_gguf(model, "llama", tmp_path / "tiny.gguf", kind), tmp_path / "made")
    assert read.dtype == getattr(torch, dtype)
    found, wanted = logits(read), logits(model)
    assert float((found - wanted).norm() / wanted.norm()) < off


def test_tokenizer_template_and_ends_come_out_of_the_file(tmp_path: Path) -> None:
    more = header(**{"tokenizer.ggml.eot_token_id": 5, "general.sampling.temp": 0.25})
    file = save_gguf(random_model("llama"), "llama", tmp_path / "tiny.gguf", more=more)
    gguf_conversion.convert(file, tmp_path / "made")
    folder = str(tmp_path / "made")
    assert eos_token_ids(folder) == (1, 5)
    assert json.loads((tmp_path / "made" / "generation_config.json").read_text())["temperature"] == 0.25
    template = load_chat_template(folder)
    assert template is not None and "message['content']" in template.chosen(tools=False)
    tokenizer = load_tokenizer(folder)
    words = vocabulary()
    assert [words[token] for token in tokenizer.encode("the 12<|stop|>").ids] == ["th", "e", "Ġ", "1", "2", "<|stop|>"]
    assert tokenizer.decode(tokenizer.encode("the 12").ids) == "the 12"


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_scaled_positions_of_llama_3_are_found_in_their_tensor(tmp_path: Path, factor: float) -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": factor, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    model = random_model("llama", rope_parameters=scaling, max_position_embeddings=65536)
    divisors = np.array(llama3_divisors(10000.0, 16, factor, 8192), np.float32)
    assert divisors.max() == factor and divisors.min() == 1.0

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", divisors)

    read = converted(save_gguf(model, "llama", tmp_path / "tiny.gguf", more=more), tmp_path / "made")
    assert {key: read.config.rope_parameters[key] for key in scaling} == scaling
    assert torch.equal(logits(read), logits(model))


def test_scalings_that_a_header_names_are_kept_and_unknown_ones_refused(tmp_path: Path) -> None:
    model = random_model("qwen2")
    yarn = {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0,
            "qwen2.rope.scaling.original_context_length": 128}  # fmt: skip
    read = converted(save_gguf(model, "qwen2", tmp_path / "yarn.gguf", more=header(**yarn)), tmp_path / "made")
    assert read.config.rope_parameters["rope_type"] == "yarn" and read.config.rope_parameters["factor"] == 4.0
    other = save_gguf(model, "qwen2", tmp_path / "o.gguf", more=header(**{"qwen2.rope.scaling.type": "spiral"}))
    with pytest.raises(FailedPrecondition, match="spiral"):
        gguf_conversion.convert(other, tmp_path / "other")


def test_tensors_and_settings_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    def bias(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_q.bias", np.ones(64, np.float32))

    model = random_model("llama")
    cases = {
        "weights and transformers reads": bias,
        "attn_logit_softcapping": header(**{"llama.attn_logit_softcapping": 30.0}),
        "sliding_window": header(**{"llama.attention.sliding_window": 8}),
        "cuts text": header(**{"tokenizer.ggml.pre": "unheard-of"}),
    }
    for number, (says, more) in enumerate(cases.items()):
        if says == "cuts text":
            file = with_pre_tokenizer(model, tmp_path / f"{number}.gguf")
        else:
            file = save_gguf(model, "llama", tmp_path / f"{number}.gguf", more=more)
        with pytest.raises(FailedPrecondition, match=says) as refusal:
            gguf_conversion.convert(file, tmp_path / str(number))
        assert refusal.value.reason == "GGUF_UNREADABLE" and "safetensors" in refusal.value.message


def with_pre_tokenizer(model: Any, file: Path) -> Path:
    content = save_gguf(model, "llama", file).read_bytes()
    file.write_bytes(content.replace(b"smollm", b"noname"))
    return file


def test_files_that_cannot_be_read_are_refused_before_their_weights(tmp_path: Path) -> None:
    whole = save_gguf(random_model("llama"), "llama", tmp_path / "tiny.gguf")
    content = whole.read_bytes()

    def refusal(name: str, data: bytes) -> str:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(FailedPrecondition) as refused:
            read_header(tmp_path / name)
        return refused.value.message

    assert "not whole" in refusal("cut.gguf", content[: len(content) - 4096])
    assert "not whole" in refusal("header.gguf", content[:3000])
    assert "no GGUF file" in refusal("other.gguf", b"<html>" + content)
    assert "--merge" in refusal("tiny-00001-of-00003.gguf", content)
    assert "GGMLQuantizationType" in refusal("type.gguf", with_type(content, 0, 250))
    file = save_gguf(random_model("llama"), "llama", tmp_path / "parts.gguf", more=header(**{"split.count": 2}))
    assert "--merge" in refusal("parts.gguf", file.read_bytes())
    renamed = content.replace(b"llama", b"lamma")
    (tmp_path / "arch.gguf").write_bytes(renamed)
    with pytest.raises(FailedPrecondition, match="architecture 'lamma'"):
        gguf_conversion.convert(tmp_path / "arch.gguf", tmp_path / "made")


def with_type(content: bytes, old: int, new: int) -> bytes:
    """The first tensor's type is another number."""
    at = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    assert int.from_bytes(content[at : at + 4], "little") == old
    return content[:at] + new.to_bytes(4, "little") + content[at + 4 :]


def test_a_type_that_the_package_cannot_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save_gguf(random_model("llama"), "llama", tmp_path / "tiny.gguf", "Q8_0")

    def unread(*_: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(gguf, "dequantize", unread)
    with pytest.raises(FailedPrecondition, match="cannot read weights of type Q8_0"):
        read_header(file)


def test_the_package_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(FailedPrecondition, match=r"slipstream-serve\[gguf\]") as refusal:
        read_header(tmp_path / "any.gguf")
    assert refusal.value.reason == "GGUF_MISSING"


def test_a_file_is_converted_once_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls = []

    def convert(file: Path, folder: Path) -> None:
        calls.append(file)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(gguf_folder, "convert", convert)
    (tmp_path / "m.gguf").write_bytes(b"GGUF one")
    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(model_folder, [str(tmp_path / "m.gguf")] * 4))
    assert len(calls) == 1 and len(folders) == 1 and folders.pop().name == "m"
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "m.gguf").write_bytes(b"GGUF one")
    assert model_folder(str(tmp_path / "copy" / "m.gguf")) == model_folder(str(tmp_path / "m.gguf"))
    (tmp_path / "m.gguf").write_bytes(b"GGUF two, longer")
    model_folder(str(tmp_path / "m.gguf"))
    assert len(calls) == 2
    assert not list(cache_folder(gguf_folder.CACHE).rglob("part-*"))


def test_a_failed_conversion_leaves_nothing_and_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "m.gguf").write_bytes(b"no such thing")
    with pytest.raises(FailedPrecondition, match="no GGUF file"):
        model_folder(str(tmp_path / "m.gguf"))
    assert not [each for each in cache_folder(gguf_folder.CACHE).rglob("*") if each.is_dir() and each.name == "m"]
    with pytest.raises(NotFound, match="no file"):
        check_folder("missing.gguf")
    assert is_local("missing.gguf") and not is_local("owner/name")


def test_a_folder_that_holds_a_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "m.Q4_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(NotFound, match=r"m\.Q4_0\.gguf"):
        check_folder(str(tmp_path))


def test_a_cache_that_cannot_be_written_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(SlipstreamError, match="XDG_CACHE_HOME") as refusal:
        model_folder(str(tmp_path / "m.gguf"))
    assert refusal.value.reason == "CACHE_UNWRITABLE"


@pytest.mark.long
def test_the_gateway_reads_a_file_without_torch(tmp_path: Path) -> None:
    """Its own process imports neither torch nor transformers, also where it is the first to convert."""
    file = save_gguf(random_model("llama"), "llama", tmp_path / "tiny.gguf")
    code = (
        "import sys\nfrom slipstream.tokenizer.vocabulary import load_tokenizer\n"
        "from slipstream.tokenizer.chat_template_source import load_chat_template\n"
        f"assert load_tokenizer({str(file)!r}).encode('ab').ids\nassert load_chat_template({str(file)!r})\n"
        "assert not {'torch', 'transformers', 'gguf'} & set(sys.modules)\n"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
