"""A base model, which has no chat template, converses by one that is shipped, named by the operator."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from slipstream.errors import NotFound
from slipstream.tokenizer.vocabulary import load_tokenizer
from slipstream.v1 import gateway_pb2
from tests.support.http_client import web
from tests.support.scripted_gateway import Setting
from tests.support.toy_tokenizer import toy_tokenizer

END = "<|im_end|>"
SAID = "Fine, thanks."
WRITTEN = SAID + END + "\n<|im_start|>user\nAnd then?" + END
ASKED = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60}
PROMPT = f"<|im_start|>user\nHi{END}\n<|im_start|>assistant\n"


@pytest.fixture(params=["text", "token"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A vocabulary without the template's control tokens, as base models have, and one where they are tokens."""
    folder = toy_tokenizer(tmp_path)
    if request.param == "token":
        encoder = load_tokenizer(str(folder))
        control = [AddedToken(word, special=True, normalized=False) for word in (END, "<|im_start|>")]
        encoder.add_special_tokens(control)
        encoder.save(str(folder / "tokenizer.json"))
    return folder


async def test_the_answer_ends_where_the_template_ends_a_turn(place: Path) -> None:
    async with AsyncExitStack() as stack:
        setting = Setting(place, stack)
        setting.model.max_length = 400
        served = await web(setting, stack, setting.verifier(WRITTEN), chat_template="chatml")
        verifier = served.front.verifiers[0]

        chat = (await served.post("/v1/chat/completions", ASKED)).json()
        assert chat["choices"][0]["message"]["content"] == SAID and chat["choices"][0]["finish_reason"] == "stop"
        prompt = list(verifier.opens()[-1].prefix.token_ids)
        assert setting.tokenizer.decode(prompt, skip_special_tokens=False) == PROMPT
        message = (await served.post("/v1/messages", ASKED)).json()
        assert message["content"][0]["text"] == SAID
        assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
        stopped = (await served.post("/v1/messages", ASKED | {"stop_sequences": [","]})).json()
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", ",")
        response = (await served.post("/v1/responses", {"input": "Hi", "max_output_tokens": 60})).json()
        assert response["status"] == "completed" and response["output"][0]["content"][0]["text"] == SAID
        said = gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(role="user", content="Hi")])
        answer = await served.front.generate(prompt=None, chat=said, max_tokens=60)
        assert answer.text == SAID
        assert (await served.front.resume(answer.started.session_id)).text == SAID

        most = [f"stop {index}" for index in range(16)]
        many = await served.front.generate(prompt=None, chat=said, max_tokens=60, stop=most)
        branch = await served.front.roll_back(many.started.session_id, 3, branch=True)
        assert (await served.front.resume(branch.key.id)).text == SAID

        endless = (await served.post("/v1/chat/completions", ASKED | {"ignore_eos": True, "max_tokens": 30})).json()
        assert endless["choices"][0]["finish_reason"] == "length"
        text = (await served.post("/v1/completions", {"prompt": "Hi", "max_tokens": 30})).json()
        assert text["choices"][0]["text"].startswith(SAID) and text["choices"][0]["finish_reason"] == "length"


async def test_tools_are_called_in_the_form_of_the_shipped_chatml(setting: Setting) -> None:
    call = '<tool_call>\n{"name": "warmth", "arguments": {"at": "x"}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "warmth", "parameters": {"type": "object"}}}]
    setting.model.max_length = 2000
    async with AsyncExitStack() as stack:
        served = await web(setting, stack, setting.verifier(call + END), chat_template="chatml")
        made: dict[str, Any] = (
            await served.post("/v1/chat/completions", ASKED | {"tools": tools, "max_tokens": 99})
        ).json()
        (choice,) = made["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "warmth"


async def test_an_unknown_name_ends_the_start_with_all_names(setting: Setting) -> None:
    with pytest.raises(NotFound, match="alpaca, chatml, llama2"):
        await setting.front(setting.verifier(), chat_template="chatlm")
