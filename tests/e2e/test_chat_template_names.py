"""The first chat of a newcomer: the shipped pair has no chat template, and `slipstream serve` gets the name of one."""

from __future__ import annotations

import httpx

from tests.e2e.conftest import SPECULATING, serving_both
from tests.integration.test_first_steps import said


def test_a_base_model_converses_by_a_template_that_is_named() -> None:
    asked = {"messages": [{"role": "user", "content": "Write a loop."}], "max_tokens": 24, "temperature": 0}
    with (
        serving_both("--dtype", "float32", "--chat-template", "alpaca", **SPECULATING) as (_, http),
        httpx.Client(base_url=f"http://{http}", timeout=60, trust_env=False) as client,
    ):
        made = client.post("/v1/chat/completions", json=asked | {"return_token_ids": True})
        assert made.status_code == 200, made.text
        (choice,) = made.json()["choices"]
        assert choice["message"]["content"] and "### Instruction:" not in choice["message"]["content"]
        counted = client.post("/tokenize", json={"messages": asked["messages"]}).json()["tokens"]
        assert counted == choice["prompt_token_ids"]
        prompt = client.post("/detokenize", json={"tokens": counted}).json()["prompt"]
        assert prompt.endswith("### Instruction:\nWrite a loop.\n\n### Response:\n")


async def test_a_name_that_is_none_ends_the_command_before_anything_starts() -> None:
    status, text = await said("serve", "--chat-template", "chatlm")
    assert status == 1 and "alpaca, chatml, llama2" in text and "ready" not in text
