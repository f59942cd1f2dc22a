"""The engine in float32 beside transformers on the same weights: greedy text token by token, log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slipstream.engine.engine import Engine
from slipstream.engine.factory import open_engine
from slipstream.engine.models.lean_files import equal_parts, read_parts
from slipstream.engine.sampler.logits_processor import logprobs
from slipstream.engine.segment import Segment
from tests.real_model.prompts import OWN, asked, encoded
from tests.support.greedy_text import greedy

FEW, MANY = 16, 96
"""Tokens of each text in the short and in the long form."""
PROMPTS, LONG_PROMPTS = (0, 4), 60
END = 2
KV_TOKENS = 8192


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Engine:
    torch.set_num_threads(1)
    return open_engine(str(smollm2), "float32", kv_tokens=KV_TOKENS)


@pytest.fixture(scope="module")
def library(smollm2: Path) -> Any:
    return library_model(smollm2, torch.float32)


def library_model(folder: Path, dtype: torch.dtype) -> Any:
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def generated(library: Any, prompt: list[int], count: int) -> list[int]:
    """The library's own greedy text; it ends at the model's end-of-text token."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        text = library.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    found: list[int] = text[0, len(prompt) :].tolist()
    return found


def check_greedy(engine: Engine, library: Any, prompts: list[list[int]], count: int) -> None:
    for prompt in prompts:
        expected = generated(library, prompt, count)
        assert greedy(engine, prompt, len(expected)) == expected


def test_greedy_text_equals_the_library_s(engine: Engine, library: Any, smollm2: Path) -> None:
    check_greedy(engine, library, encoded(smollm2, [OWN[index] for index in PROMPTS]), FEW)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_greedy_text_equals_the_library_s_for_many_prompts(engine: Engine, library: Any, smollm2: Path) -> None:
    check_greedy(engine, library, encoded(smollm2, asked(LONG_PROMPTS)), MANY)


def test_the_capital_of_france_is_paris(engine: Engine, smollm2: Path) -> None:
    """The conversion kept weights, tokenizer and template: a model with one of them wrong does not answer this."""
    (prompt,) = encoded(smollm2, ["What is the capital of France?"])
    text = greedy(engine, prompt, 9)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.decode(text[: text.index(END)]) == "The capital of France is Paris."


@pytest.mark.parametrize("prompt", [OWN[8], pytest.param(OWN[1], marks=pytest.mark.slow)], ids=["summary", "letter"])
def test_logprobs_are_within_a_thousandth_of_the_library_s(
    engine: Engine, library: Any, smollm2: Path, prompt: str
) -> None:
    """Of every token of a prompt, as a chain of candidates in one pass, with the five likeliest in each place."""
    (tokens,) = encoded(smollm2, [prompt])
    with torch.inference_mode():
        expected = library(torch.tensor([tokens]), use_cache=False).logits[0, :-1].double().log_softmax(-1)
    sequence = engine.kv.begin_unshared(len(tokens))
    chain = tokens[1:]
    rows = engine.forward([Segment(sequence, tokens[:1], chain, list(range(-1, len(chain) - 1)))]).logits[:-1]
    engine.kv.close(sequence)
    found = logprobs(rows, torch.tensor(chain), torch.full((len(chain),), 5).numpy()).tokens()
    for row, token, one in zip(expected, chain, found, strict=True):
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert [share for _, share in one.top] == pytest.approx(row.topk(5).values.tolist(), abs=1e-3)
        assert [float(row[other]) for other, _ in one.top] == pytest.approx([s for _, s in one.top], abs=1e-3)


def test_a_second_start_reads_the_same_model(smollm2: Path, library: Any) -> None:
    """Without the library's code, by what an earlier start found."""
    for dtype in (torch.float32, torch.bfloat16):
        model = library if dtype is torch.float32 else library_model(smollm2, dtype)
        parts = read_parts(smollm2, model.config, dtype, [None] * model.config.num_hidden_layers)
        assert equal_parts(parts, model, parts.layers)
