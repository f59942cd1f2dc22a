"""`slipstream serve --target FILE.gguf`: the gateway has its tokenizer and chat template, the verifier its weights."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from slipstream.client.client import complete
from slipstream.engine.factory import open_engine
from slipstream.rpc.channel import channel
from slipstream.tokenizer.vocabulary import load_tokenizer
from slipstream.v1 import gateway_pb2
from tests.e2e.conftest import SPECULATING, serving_both
from tests.support.gguf_files import random_model, save_gguf
from tests.support.greedy_text import greedy

PROMPT, TOKENS = "the other 12, the 12", 24


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_gguf_file_is_served_as_the_model_that_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = save_gguf(random_model("llama"), "llama", tmp_path / "tiny.gguf")
    options = ("--target", str(file), "--dtype", "float32", "--drafter", "suffix")
    with serving_both(*options, **SPECULATING, XDG_CACHE_HOME=str(tmp_path / "cache")) as (grpc, http):
        request = gateway_pb2.GenerateRequest(prompt=PROMPT, max_tokens=TOKENS, ignore_eos=True)
        request.sampling.temperature = 0.0
        async with channel(grpc) as line:
            completion = await complete(line, request)
        async with httpx.AsyncClient(base_url=f"http://{http}/v1", timeout=120, trust_env=False) as client:
            (model,) = (await client.get("/models")).json()["data"]
            body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, "temperature": 0}
            body |= {"ignore_eos": True, "return_token_ids": True}
            chat = (await client.post("/chat/completions", json=body)).json()
    prompt = list(completion.started.prompt_token_ids)
    assert load_tokenizer(str(file)).decode(prompt) == PROMPT
    expected = greedy(open_engine(str(file), "float32"), prompt, TOKENS)
    assert completion.token_ids == expected and model["id"] == "tiny"
    assert chat["choices"][0]["token_ids"] == expected, "the file's template is the message itself"
    made = [each for each in (tmp_path / "cache" / "slipstream" / "gguf").glob("*/*") if each.is_dir()]
    assert [each.name for each in made] == ["tiny"], "all roles share one conversion"
