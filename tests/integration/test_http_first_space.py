"""A completion goes on from its prompt: with the space that a tokenizer puts before words, and transformers decodes.

The prompt and what is written behind it read as transformers decodes the whole, for every kind of tokenizer that puts
spaces before words or takes them away from the beginning of a text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from slipstream.v1 import gateway_pb2
from tests.integration.test_gateway_logprobs import likely
from tests.support.http_client import Web, web
from tests.support.scripted_gateway import Setting
from tests.support.sentence_piece import KINDS, sentence_piece

SAID = "The capital of France is Paris, and it lief."
TEMPLATE = """{% for message in messages %}<{{ message.role }}> {{ message.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
HI = [{"role": "user", "content": "Hi"}]


class Written:
    """A gateway whose tokenizer is of one kind, before a verifier that writes what is asked of it."""

    def __init__(self, setting: Setting, front: Web, folder: Path) -> None:
        self.web = front
        self._setting = setting
        self._theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        self.ids: list[int] = setting.tokenizer.encode(SAID).ids

    def decoded(self, ids: list[int]) -> str:
        return str(self._theirs.decode(ids, skip_special_tokens=True))

    async def complete(self, at: int, prompt: Any, **options: Any) -> dict[str, Any]:
        """Completes a prompt with what stands behind the first `at` tokens."""
        self.web.front.verifiers[0].script[:] = self.ids[at:]
        asked: dict[str, Any] = {"prompt": prompt, "max_tokens": len(self.ids) - at} | options
        if options.get("stream"):
            chunks = [event.json for event in (await self.web.events("/v1/completions", asked))[:-1]]
            choices = [each["choices"][0] for each in chunks]
            logprobs = [each["logprobs"] for each in choices if each["logprobs"]]
            joined = {name: [value for each in logprobs for value in each[name]] for name in ("text_offset", "tokens")}
            return {"text": "".join(each["text"] for each in choices), "logprobs": joined}
        answer = await self.web.post("/v1/completions", asked)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["choices"][0])


@pytest.fixture(params=KINDS)
async def written(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Written]:
    folder = sentence_piece(request.param, tmp_path)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    async with AsyncExitStack() as stack:
        setting = Setting(folder, stack)
        verifier = setting.verifier([setting.eos])
        template = str(tmp_path / "chat.jinja")
        yield Written(setting, await web(setting, stack, verifier, chat_template=template), folder)


@pytest.fixture(params=["llama 2"])
async def llama(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Written]:
    async for each in written.__wrapped__(request, tmp_path):  # type: ignore[attr-defined]
        yield each


async def test_the_prompt_and_its_completion_read_as_transformers_decodes_both(written: Written) -> None:
    whole = written.decoded(written.ids)
    assert whole.startswith("The capital of France is Paris")
    for at in range(2, len(written.ids)):
        begun = written.decoded(written.ids[:at])
        if written.web.front.tokenizer.encode(begun).ids != written.ids[:at]:
            continue  # cut inside a word, which the prompt spells otherwise
        for prompt in (begun, written.ids[:at]):
            assert begun + (await written.complete(at, prompt))["text"] == whole
            assert begun + (await written.complete(at, prompt, stream=True))["text"] == whole
            assert (await written.complete(at, prompt, echo=True))["text"] == whole
            assert (await written.complete(at, prompt, echo=True, stream=True))["text"] == whole


async def test_a_text_behind_nothing_but_special_tokens_begins_as_a_text(written: Written) -> None:
    whole = written.decoded(written.ids)
    assert (await written.complete(1, written.ids[:1]))["text"] == whole


async def test_offsets_are_places_in_the_text_with_the_prompt_and_without(written: Written) -> None:
    if isinstance(written.web.front.tokenizer.decoder, decoders.BPEDecoder):
        pytest.skip("the space behind a word is no part of any token")
    written.web.front.verifiers[0].mangle = likely
    for at in (1, 5):
        for options in ({}, {"echo": True}, {"stream": True}, {"stream": True, "echo": True}):
            made = await written.complete(at, written.ids[:at], logprobs=1, **options)
            echoed = options.get("echo") or at == 1
            assert made["text"] == written.decoded(written.ids)[0 if echoed else len("The capital of France") :]
            _check_offsets(made["text"], made["logprobs"])
    begun = "The capital of France"
    made = await written.complete(5, begun, logprobs=1, echo=True)
    _check_offsets(made["text"], made["logprobs"])


def _check_offsets(text: str, logprobs: dict[str, Any]) -> None:
    """Every token stands at its offset; only the text's first one may have lost its space."""
    ends = [*logprobs["text_offset"][1:], len(text)]
    pieces = [text[start:end] for start, end in zip(logprobs["text_offset"], ends, strict=True)]
    assert "".join(pieces) == text
    first = next(index for index, piece in enumerate(pieces) if piece)
    for index, (piece, token) in enumerate(zip(pieces, logprobs["tokens"], strict=True)):
        assert piece == (token.lstrip(" ") if index == first and not piece.startswith(" ") else token) or not piece


async def test_a_session_that_is_resumed_or_branched_has_the_space_as_well(llama: Written) -> None:
    front, at = llama.web.front, 6
    front.verifiers[0].script[:] = llama.ids[at:]
    left = len(llama.ids) - at
    answer = await front.generate(prompt=llama.decoded(llama.ids[:at]), max_tokens=left)
    assert answer.text == llama.decoded(llama.ids)[len("The capital of France is") :]
    assert answer.text.startswith(" Paris")
    assert (await front.resume(answer.started.session_id)).text == answer.text
    branch = await front.roll_back(answer.started.session_id, 1, branch=True)
    front.verifiers[0].script[:] = [llama.ids[-1]] * left
    assert (await front.resume(branch.key.id)).text.startswith(" Paris")


async def test_a_message_begins_without_the_space_and_one_that_goes_on_has_it(llama: Written) -> None:
    front, at = llama.web.front, 6
    front.verifiers[0].script[:] = llama.ids[at:]
    asked = {"messages": HI, "max_tokens": len(llama.ids) - at}
    made = (await llama.web.post("/v1/chat/completions", asked)).json()
    assert made["choices"][0]["message"]["content"].startswith("Paris")
    begun = {"messages": [*HI, {"role": "assistant", "content": "The capital of France is"}]}
    for variables in ({"continue_final_message": True}, {"add_generation_prompt": False}):
        made = (await llama.web.post("/v1/chat/completions", asked | begun | variables)).json()
        assert made["choices"][0]["message"]["content"].startswith(" Paris")
        for padding in ("", "x" * 5000):  # read beside the event loop, too
            chat = gateway_pb2.Chat(template_variables_json=json.dumps(variables | {"padding": padding}))
            for message in begun["messages"]:
                chat.messages.add(**message)
            assert (await front.generate(prompt=None, chat=chat, max_tokens=3)).text.startswith(" Paris")
