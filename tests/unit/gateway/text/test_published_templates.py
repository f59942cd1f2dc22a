"""Templates of published kinds are found and rendered as transformers does both, wherever a model's folder has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from gateway.auth.tenant import OPEN
from gateway.text.chat_messages import texts_in, with_written_arguments
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound
from slipstream.tokenizer.chat_template_source import SHIPPED, load_chat_template, shipped_template
from slipstream.tokenizer.vocabulary import load_tokenizer
from tests.support.templates import (
    CHAT_ML,
    COMMAND_R,
    CONVERSATIONS,
    CORPUS,
    HI,
    IN_PARTS,
    LISTS_ALONE,
    OPTIONS,
    SYSTEM,
)
from tests.support.toy_tokenizer import END, toy_tokenizer

SMOLLM2 = Path(__file__).parents[4] / ".cache" / "smollm2"
REFUSED = object()


def write(folder: Path, templates: str | Mapping[str, str], place: str, tokens: str) -> Any:
    """Writes templates and special tokens where published models have them; returns transformers' tokenizer."""
    from transformers import PreTrainedTokenizerFast

    toy_tokenizer(folder)
    encoder = load_tokenizer(str(folder))
    encoder.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    encoder.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": {"content": END, "lstrip": False, "rstrip": False, "normalized": False}}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    named = {"default": templates} if isinstance(templates, str) else dict(templates)
    if place == "configuration":
        config["chat_template"] = (
            templates if isinstance(templates, str) else [{"name": a, "template": b} for a, b in named.items()]
        )
    else:
        config["chat_template"] = "what files come before"
        (folder / "additional_chat_templates").mkdir()
        for name, source in named.items():
            file = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
            (folder / file).write_text(source, encoding="utf-8")
    if tokens == "map":
        config["bos_token"] = "what the map comes before"
        (folder / "special_tokens_map.json").write_text(json.dumps(special))
    else:
        config |= {"bos_token": "<s>", "eos_token": {"__type": "AddedToken"} | special["eos_token"]}  # type: ignore[operator]
    if tokens == "listed":
        config["added_tokens_decoder"] = {}
        (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "what nothing reads"}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return PreTrainedTokenizerFast.from_pretrained(folder)


def rendered(theirs: Any, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> Any:
    asked = {"add_generation_prompt": not options.get("continue_final_message")} | options
    try:
        return theirs.apply_chat_template(messages, tokenize=False, **asked)
    except TypeError:
        written = with_written_arguments(messages)
        return REFUSED if written is None else rendered(theirs, written, options)  # type: ignore[arg-type]
    except Exception:
        return REFUSED


def ours(template: ChatTemplate, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> Any:
    variables = {name: value for name, value in options.items() if name != "tools"}
    try:
        return template.render(messages, options.get("tools", ()), variables)
    except (InvalidArgument, FailedPrecondition):
        return REFUSED


def check(theirs: Any, template: ChatTemplate, options: Mapping[str, Any]) -> int:
    """Compares all conversations; returns how many were rendered."""
    found = {name: ours(template, said, options) for name, said in CONVERSATIONS.items()}
    assert found == {name: rendered(theirs, said, options) for name, said in CONVERSATIONS.items()}
    return sum(text is not REFUSED for text in found.values())


@pytest.mark.parametrize("kind", CORPUS)
@pytest.mark.parametrize(("place", "tokens"), [("configuration", "map"), ("files", "listed"), ("files", "plain")])
def test_texts_are_those_of_transformers(tmp_path: Path, kind: str, place: str, tokens: str) -> None:
    theirs = write(tmp_path, CORPUS[kind], place, tokens)
    template = ChatTemplate(load_chat_template(str(tmp_path)), 1 << 20)
    rendered = sum(check(theirs, template, options) for options in OPTIONS)
    assert rendered >= 20, "most conversations are refused, which compares nothing"


def in_parts(theirs: Any, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> Any:
    """As transformers renders them where that shows the texts of all parts; else with each content as one text, or
    each text as a list."""
    said = [each["content"] for each in messages if isinstance(each["content"], list) or each["role"] != "assistant"]
    texts = [text.strip() for content in said for text in texts_in(content)]
    joined = [
        each | {"content": "\n".join(part["text"] for part in each["content"])}
        if isinstance(each["content"], list)
        else each
        for each in messages
    ]
    listed = [
        each | {"content": [{"type": "text", "text": each["content"]}]} if isinstance(each["content"], str) else each
        for each in messages
    ]
    for some in (messages, joined, listed):
        text = rendered(theirs, some, options)
        shown = text is not REFUSED and all(each in text for each in texts)
        if shown and "'type': 'text'" not in text and '"type": "text"' not in text:
            return text
    return rendered(theirs, joined, options)


@pytest.mark.parametrize("kind", [*CORPUS, "lists alone"])
def test_parts_of_a_content_stay_parts_where_the_template_writes_them_and_else_are_one_text(
    tmp_path: Path, kind: str
) -> None:
    theirs = write(tmp_path, CORPUS.get(kind, LISTS_ALONE), "files", "plain")
    template = ChatTemplate(load_chat_template(str(tmp_path)), 1 << 20)
    for options in ({}, {"add_generation_prompt": False}):
        for name, messages in IN_PARTS.items():
            assert ours(template, messages, options) == in_parts(theirs, messages, options), name


def test_a_template_that_writes_lists_alone_loses_no_text(tmp_path: Path) -> None:
    write(tmp_path, LISTS_ALONE, "files", "plain")
    template = ChatTemplate(load_chat_template(str(tmp_path)), 1 << 20)
    assert "User: Hi<end_of_utterance>" in template.render([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("kind", CORPUS)
async def test_tokens_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    theirs = write(tmp_path, CORPUS[kind], "files", "plain")
    tokenizer = Tokenizer(load_tokenizer(str(tmp_path)), 1 << 20, load_chat_template(str(tmp_path)))
    for options in OPTIONS:
        for messages in CONVERSATIONS.values():
            text = rendered(theirs, messages, options)
            if text is not REFUSED:
                variables = {name: value for name, value in options.items() if name != "tools"}
                tokens = await tokenizer.encode_chat(messages, options.get("tools", ()), variables, tenant=OPEN)
                assert tokens == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="make real-model")
def test_texts_of_a_published_model_are_those_of_transformers() -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(SMOLLM2)
    template = ChatTemplate(load_chat_template(str(SMOLLM2)), 1 << 20)
    assert sum(check(theirs, template, options) for options in OPTIONS) >= 20


def test_a_request_chooses_among_the_model_s_templates_by_name(tmp_path: Path) -> None:
    theirs = write(tmp_path, COMMAND_R, "files", "plain")
    template = ChatTemplate(load_chat_template(str(tmp_path)), 1 << 20)
    options = {"documents": [{"title": "A", "text": "B"}], "chat_template": "rag", "add_generation_prompt": False}
    assert check(theirs, template, options) == len(CONVERSATIONS)
    for other in ("nothing", "{{ 1 }}", ["rag"]):
        with pytest.raises(InvalidArgument, match="default, rag, tool_use") as caught:
            template.render([SYSTEM], (), {"chat_template": other})
        assert caught.value.reason == "CHAT_TEMPLATE_UNKNOWN"


LOADING = """
import sys
from slipstream.tokenizer.chat_template_source import chat_template_fingerprint, load_chat_template

assert chat_template_fingerprint("owner/nothing") == ""
print(sorted(load_chat_template(sys.argv[1]).templates))
"""


def test_templates_of_a_hub_id_are_those_that_were_downloaded_where_there_is_no_network(tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "models--owner--name"
    folder = cache / "snapshots" / ("a" * 40)
    folder.mkdir(parents=True)
    write(folder, COMMAND_R, "files", "map")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("a" * 40)
    done = subprocess.run(
        [sys.executable, "-c", LOADING, "owner/name"],
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split("\n")[0] == str(sorted(COMMAND_R)), done.stderr


def test_an_operator_chooses_a_file_a_template_of_the_model_or_a_shipped_one(tmp_path: Path) -> None:
    write(tmp_path, COMMAND_R, "files", "map")
    (tmp_path / "own").write_text("{{ bos_token }}own")
    found = {given: load_chat_template(str(tmp_path), given) for given in (str(tmp_path / "own"), "rag", "chatml")}
    said = [{source.templates["default"][:21] for source in [each] if source} for each in found.values()]
    assert said[0] == {"{{ bos_token }}own"} and said[1] == {COMMAND_R["rag"][:21]} and "ChatML" in said[2].pop()
    for source in found.values():
        assert source is not None and source.special_tokens == {"bos_token": "<s>", "eos_token": END}
    with pytest.raises(NotFound, match="default, rag, tool_use, alpaca, chatml"):
        load_chat_template(str(tmp_path), "nothing")


WANTED: dict[str, Callable[[str, str], str]] = {
    "chatml": lambda system, user: (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    ),
    "zephyr": lambda system, user: f"<|system|>\n{system}</s>\n<|user|>\n{user}</s>\n<|assistant|>\n",
    "llama2": lambda system, user: f"<s>[INST] <<SYS>>\n{system}\n<</SYS>>\n\n{user} [/INST]",
    "llama3": lambda system, user: (
        f"<s><|start_header_id|>system<|end_header_id|>\n\n{system}<|eot_id|>"
        f"<|start_header_id|>user<|end_header_id|>\n\n{user}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "vicuna": lambda system, user: f"<s>{system} USER: {user} ASSISTANT:",
    "alpaca": lambda system, user: f"<s>{system}\n\n### Instruction:\n{user}\n\n### Response:\n",
}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_templates_write_the_published_forms(name: str) -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    template = ChatTemplate(shipped_template(name, tokens), 1 << 20)
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert template.render(said) == WANTED[name]("Be brief.", "Hi")
    turns = template.render([*said, {"role": "assistant", "content": "Ho"}, said[1]])
    assert turns.startswith(WANTED[name]("Be brief.", "Hi")) and turns.count("Hi") == 2 and "Ho" in turns
    bare = ChatTemplate(shipped_template(name), 1 << 20)  # a tokenizer may have neither
    assert bare.render(said) == WANTED[name]("Be brief.", "Hi").replace("<s>", "").replace("</s>", "")
    assert bare.render(said[1:])
    begun = [*said, {"role": "assistant", "content": "Ho"}]
    assert template.render(begun, (), {"continue_final_message": True}).endswith("Ho")


def test_the_shipped_chatml_has_tools_as_the_corpus_has_them() -> None:
    from tests.support.templates import CALLING, RESULT, TOOLS

    text = ChatTemplate(shipped_template("chatml"), 1 << 20).render([SYSTEM, HI, CALLING, RESULT, RESULT], TOOLS)
    assert '<tools>\n{"type": "function"' in text and "Be brief." in text
    assert '<tool_call>\n{"name": "warmth", "arguments": {"at": "Ärö", "n": [1, null]}}\n</tool_call><|im_end|>' in text
    assert text.count("<|im_start|>user") == 2 and text.count("<tool_response>\n21\n</tool_response>") == 2
    assert CHAT_ML.count("tools")
