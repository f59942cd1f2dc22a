"""What a request wants to see of its text and prompt, as vLLM has it: the stop string, special tokens, and a prompt
that is cut to a length; whole and in a stream, with token ids and log-probabilities, and when it is read again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_client import CHAT_TEMPLATE, Web, web
from tests.support.scripted_gateway import Setting, with_logprobs
from tests.support.toy_tokenizer import END, toy_tokenizer

MARK = "<mark>"
SAID = f"Käse{MARK} and stop it; more{END}"
CHAT = {"messages": [{"role": "user", "content": "Tell me all of it."}]}


class Shown:
    def __init__(self, setting: Setting, front: Web) -> None:
        self.web = front
        self.tokens: list[int] = setting.tokenizer.encode(SAID, add_special_tokens=False).ids
        self.setting = setting

    async def ask(self, route: str, **options: Any) -> dict[str, Any]:
        """The choice; of a stream its text, tokens and log-probabilities, joined."""
        prompt: dict[str, Any] = CHAT if "chat" in route else {"prompt": "Tell me all of it."}
        asked = {**prompt, "max_tokens": 60, "return_token_ids": True} | options
        if not options.get("stream"):
            answer = await self.web.post(route, asked)
            assert answer.status_code == 200, answer.text
            choice = answer.json()["choices"][0]
            text = choice["message"]["content"] if "chat" in route else choice["text"]
            return choice | {"shown": text, "id": answer.json()["id"]}
        chunks = [event.json for event in (await self.web.events(route, asked))[:-1]]
        choices = [each["choices"][0] for each in chunks]
        deltas = [each["delta"].get("content") or "" if "chat" in route else each["text"] for each in choices]
        ids = [token for each in choices for token in each["token_ids"]]
        return choices[-1] | {"shown": "".join(deltas), "token_ids": ids, "id": chunks[0]["id"]}

    @property
    def prompt(self) -> list[int]:
        return list(self.web.front.verifiers[0].opens()[-1].prefix.token_ids)

    def encoded(self, text: str) -> list[int]:
        return list(self.setting.tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture
async def shown(tmp_path: Path) -> AsyncIterator[Shown]:
    folder = toy_tokenizer(tmp_path, [MARK])
    (tmp_path / "chat.jinja").write_text(CHAT_TEMPLATE)
    async with AsyncExitStack() as stack:
        setting = Setting(folder, stack)
        script = setting.tokenizer.encode(SAID, add_special_tokens=False).ids
        verifier = setting.verifier(script)
        yield Shown(setting, await web(setting, stack, verifier, chat_template=str(tmp_path / "chat.jinja")))


ROUTES = pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
STREAM = pytest.mark.parametrize("stream", [False, True])


@ROUTES
@STREAM
async def test_a_stop_string_is_part_of_the_text_if_the_request_asks_for_it(
    shown: Shown, route: str, stream: bool
) -> None:
    asked = {"stop": ["stop it"], "stream": stream}
    plain = await shown.ask(route, **asked)
    assert plain["shown"] == "Käse and " and plain["finish_reason"] == "stop"
    whole = await shown.ask(route, include_stop_str_in_output=True, **asked)
    assert whole["shown"] == "Käse and stop it" and whole["finish_reason"] == "stop"
    behind = len(shown.encoded(f"Käse{MARK} and "))
    assert plain["token_ids"] == shown.tokens[:behind]
    assert whole["token_ids"] == shown.tokens[: behind + len("stop it")]


@ROUTES
@STREAM
async def test_a_stop_token_is_named_and_its_text_left_out_unless_the_request_asks_for_it(
    shown: Shown, route: str, stream: bool
) -> None:
    """As in vLLM, where the token's id and log-probability stay."""
    (point,) = shown.encoded(";")
    asked = {"stop_token_ids": [point], "stream": stream}
    plain = await shown.ask(route, **asked)
    assert plain["shown"] == "Käse and stop it"
    whole = await shown.ask(route, include_stop_str_in_output=True, **asked)
    assert whole["shown"] == "Käse and stop it;"
    for made in plain, whole:
        assert (made["finish_reason"], made["stop_reason"]) == ("stop", point)
        assert made["token_ids"] == shown.tokens[: shown.tokens.index(point) + 1]
    again = await shown.web.front.resume(plain["id"].partition("-")[2])
    assert again.text == plain["shown"] and again.finished.stop_token_id == point
    ended = await shown.ask(route, stream=stream)
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", None)  # the model's own
    stopped = await shown.ask(route, stop=["it"], stop_token_ids=[point], stream=stream)
    assert (stopped["shown"], stopped["stop_reason"]) == ("Käse and stop ", "it")


@ROUTES
@STREAM
async def test_special_tokens_are_part_of_the_text_if_the_request_asks_for_them(
    shown: Shown, route: str, stream: bool
) -> None:
    """The one that ends it is not, as a stop string is not, unless that is to be shown too."""
    texts = [
        (await shown.ask(route, stream=stream, **options))["shown"]
        for options in (
            {},
            {"skip_special_tokens": False},
            {"skip_special_tokens": False, "include_stop_str_in_output": True},
            {"include_stop_str_in_output": True},
        )
    ]
    assert texts == [SAID.replace(MARK, "").replace(END, ""), SAID.replace(END, ""), SAID, texts[0]]


async def test_offsets_of_special_tokens_that_are_shown_are_places_in_the_text(shown: Shown) -> None:
    shown.web.front.verifiers[0].mangle = with_logprobs
    made = await shown.ask("/v1/completions", skip_special_tokens=False, logprobs=1)
    logprobs = made["logprobs"]
    at = logprobs["tokens"].index(MARK)
    assert made["shown"][logprobs["text_offset"][at] :].startswith(MARK)
    assert logprobs["text_offset"][at + 1] == logprobs["text_offset"][at] + len(MARK)


async def test_a_text_that_is_read_again_shows_the_same(shown: Shown) -> None:
    made = await shown.ask(
        "/v1/completions", skip_special_tokens=False, include_stop_str_in_output=True, stop=["stop it"]
    )
    again = await shown.web.front.resume(made["id"].removeprefix("cmpl-"))
    assert again.text == made["shown"] == f"Käse{MARK} and stop it"
    assert again.finished.stop == "stop it"


@pytest.mark.parametrize("value", [None, True])
async def test_display_options_may_be_set_to_their_defaults(shown: Shown, value: bool | None) -> None:
    asked = {"skip_special_tokens": value, "include_stop_str_in_output": None if value is None else False}
    assert MARK not in (await shown.ask("/v1/completions", **asked))["shown"]


@ROUTES
async def test_a_prompt_is_cut_at_its_beginning_or_its_end(shown: Shown, route: str) -> None:
    await shown.ask(route)
    whole = shown.prompt
    await shown.ask(route, truncate_prompt_tokens=5)
    assert shown.prompt == whole[-5:]
    await shown.ask(route, truncate_prompt_tokens=5, truncation_side="right")
    assert shown.prompt == whole[:5]
    await shown.ask(route, truncate_prompt_tokens=100)
    assert shown.prompt == whole


async def test_a_prompt_that_is_too_long_is_cut_to_what_the_model_takes(shown: Shown) -> None:
    long = "many words " * 50
    refused = await shown.web.post("/v1/completions", {"prompt": long})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    for prompt in (long, shown.encoded(long)):
        await shown.ask("/v1/completions", prompt=prompt, max_tokens=1, truncate_prompt_tokens=-1)
        assert shown.prompt == shown.encoded(long)[-199:]
    messages = [{"role": "user", "content": long}]
    await shown.ask("/v1/chat/completions", messages=messages, max_tokens=1, truncate_prompt_tokens=-1)
    assert len(shown.prompt) == 199


async def test_every_prompt_and_choice_is_cut_and_the_echo_is_what_the_model_read(shown: Shown) -> None:
    asked = {"prompt": ["Tell me.", "Or not."], "n": 2, "truncate_prompt_tokens": 3, "echo": True, "max_tokens": 4}
    choices = (await shown.web.post("/v1/completions", asked)).json()["choices"]
    assert [each["text"] for each in choices] == ["me.Käs"] * 2 + ["ot.Käs"] * 2


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"truncate_prompt_tokens": 0}, "empty_prompt"),
        ({"truncate_prompt_tokens": 1000}, "number_out_of_range"),
        ({"truncate_prompt_tokens": -2}, None),
        ({"truncate_prompt_tokens": 3, "truncation_side": "middle"}, None),
    ],
)
async def test_a_length_that_cannot_be_is_refused(shown: Shown, options: dict[str, Any], code: str | None) -> None:
    refused = await shown.web.post("/v1/completions", {"prompt": "Tell me."} | options)
    assert refused.status_code == 400
    assert code is None or refused.json()["error"]["code"] == code


@pytest.mark.parametrize(
    ("route", "name", "value"),
    [
        ("/v1/responses", "truncate_prompt_tokens", 3),
        ("/v1/messages", "truncate_prompt_tokens", 3),
        ("/v1/messages", "include_stop_str_in_output", True),
        ("/v1/messages", "skip_special_tokens", False),
    ],
)
async def test_display_options_are_refused_by_name_on_routes_without_them(
    shown: Shown, route: str, name: str, value: Any
) -> None:
    asked = {"input": "Hi"} if route == "/v1/responses" else {**CHAT, "max_tokens": 3}
    refused = await shown.web.post(route, {**asked, "model": "", name: value})
    assert refused.status_code == 400 and name in refused.text
