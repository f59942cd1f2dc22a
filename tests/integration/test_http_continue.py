"""A conversation's last message is gone on with where it ends, whatever it says; `/tokenize` counts what a chat has."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.http_client import Web, web
from tests.support.scripted_gateway import TEXT, Setting
from tests.support.templates import CHAT_ML, TOOLS

HI = {"role": "user", "content": "Who is the end of d?"}
AWKWARD = [
    *("d", "end", "im_end", "of", "turn", "user", "assistant", "<", "|", "<|im_end|>", "x <|im", "\n", "Who", "a b "),
    *(" lead", "ends here", "20", "é", "", "  ", "d\n\n"),
]


@pytest.fixture
async def served(setting: Setting, tmp_path: Path) -> AsyncIterator[Web]:
    (tmp_path / "chat.jinja").write_text(CHAT_ML)
    setting.model.max_length = 20_000
    async with AsyncExitStack() as stack:
        options = {"chat_template": str(tmp_path / "chat.jinja"), "tool_calls": "hermes"}
        yield await web(setting, stack, setting.verifier(TEXT), **options)


@pytest.fixture
def theirs(setting: Setting) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_file=str(setting.folder / "tokenizer.json"))
    made.chat_template = CHAT_ML
    return made


async def prompt_of(served: Web, path: str, body: dict[str, Any]) -> str:
    answer = await served.post(path, {"max_tokens": 5} | body)
    assert answer.status_code == 200, answer.text
    return str(served.front.tokenizer.decode(list(served.front.verifiers[0].opens()[-1].prefix.token_ids)))


async def counted(served: Web, body: dict[str, Any]) -> list[int]:
    answer = await served.post("/tokenize", body)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["tokens"])


@pytest.mark.parametrize("said", AWKWARD)
async def test_the_last_message_is_continued_at_its_own_end(
    served: Web, theirs: PreTrainedTokenizerFast, said: str
) -> None:
    messages = [HI, {"role": "assistant", "content": said}]
    wanted = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    asked = {"messages": messages, "continue_final_message": True}
    assert await prompt_of(served, "/v1/chat/completions", asked) == wanted
    opened = list(served.front.verifiers[0].opens()[-1].prefix.token_ids)
    assert await counted(served, asked) == opened
    if said.strip():  # no message of Anthropic's is empty
        anthropic = {"messages": messages}
        assert await prompt_of(served, "/v1/messages", anthropic) == wanted
        answer = await served.post("/v1/messages/count_tokens", anthropic)
        assert answer.json()["input_tokens"] == len(opened)


async def test_a_prefill_of_anthropics_api_is_continued_and_only_the_rest_is_answered(served: Web) -> None:
    begun = {"role": "assistant", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "day ("}]}
    answer = (await served.post("/v1/messages", {"messages": [HI, begun], "max_tokens": 4})).json()
    assert answer["content"] == [{"type": "text", "text": TEXT[:4]}]
    assert (await prompt_of(served, "/v1/messages", {"messages": [HI, begun]})).endswith("assistant\nOne\nday (")


@pytest.mark.parametrize(
    "last",
    [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "warmth", "input": {}}]},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "21"}]},
    ],
)
async def test_a_last_message_that_is_no_prefill_is_answered_by_a_message_of_its_own(
    served: Web, last: dict[str, Any]
) -> None:
    assert (await prompt_of(served, "/v1/messages", {"messages": [HI, last]})).endswith("<|im_start|>assistant\n")


async def test_a_message_without_content_or_left_out_by_the_template_cannot_be_continued(
    served: Web,
) -> None:
    call = {"type": "function", "function": {"name": "warmth", "arguments": "{}"}}
    for last in ({"role": "assistant", "tool_calls": [call]}, {"role": "hidden", "content": "d"}):
        asked = {"messages": [HI, last], "continue_final_message": True, "max_tokens": 5}
        answer = await served.post("/v1/chat/completions", asked)
        assert answer.status_code == 400 and "continue_final_message" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none"},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"documents": [{"title": "A", "text": "B"}]},
        {"messages": [HI, {"role": "assistant", "content": "of"}], "continue_final_message": True},
        {"messages": [HI] * 300, "tools": TOOLS},
    ],
)
async def test_tokenize_counts_what_a_chat_with_the_same_fields_has(served: Web, options: dict[str, Any]) -> None:
    asked = {"messages": [HI]} | options
    await prompt_of(served, "/v1/chat/completions", asked)
    assert await counted(served, asked) == list(served.front.verifiers[0].opens()[-1].prefix.token_ids)


async def test_fields_of_a_conversation_without_one_are_refused(served: Web) -> None:
    answer = await served.post("/tokenize", {"prompt": "Hi", "tools": TOOLS})
    assert answer.status_code == 400 and "messages" in answer.json()["error"]["message"]
