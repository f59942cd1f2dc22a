"""Functions that take any bytes and return whether these got to the end. An exception that is no typed error is a bug,
and so is a broken property."""

from __future__ import annotations

import asyncio
import json
import math
from array import array
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from google.protobuf.message import DecodeError
from pydantic import ValidationError
from tokenizers import AddedToken, Tokenizer

from gateway.api.anthropic.fields import CountRequest, MessageRequest
from gateway.api.openai.chat import ChatRequest
from gateway.api.openai.completions import CompletionRequest
from gateway.api.openai.models import DetokenizeRequest, TokenizeRequest
from gateway.api.openai.response_fields import ResponseRequest
from gateway.text import large_message
from gateway.text.answers.formats import CALLS, HARMONY, THINK, AnswerFormat
from gateway.text.chat_messages import read_chat
from gateway.text.encoding import TextEncoding
from gateway.text.json_body import put_together, take_apart
from slipstream.errors import Internal, SlipstreamError
from slipstream.rpc.proto_conversion import sampling_from_proto, structure_from_proto
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.frame import TreeLimits
from slipstream.tokenizer.chat_template_source import ChatTemplateSource
from slipstream.tokenizer.vocabulary import load_tokenizer
from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2
from tests.support.model_answers import read
from tests.support.toy_tokenizer import toy_tokenizer
from verifier_svc.sources.flow_control import read_frame

MODELS = (
    CompletionRequest,
    ChatRequest,
    ResponseRequest,
    MessageRequest,
    CountRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
MOST_VALUES = 4096
TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{%- if message.tool_calls %}{% for call in message.tool_calls %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}
{%- endif %}
{{ message.content | trim }}<|im_end|>
{% endfor -%}
{%- if tools %}{% for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}{% endif -%}
{%- if variables is defined %}{{ variables.first[1:] | upper }}{% endif -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""
CONTROL = ("<|im_start|>", "<|im_end|>")
VOCABULARY = 260
LONGEST = 64
"""Tokens of the longest prompt."""
LIMITS = TreeLimits(nodes=32, depth=8, frame_nodes=16)


@cache
def encoding() -> TextEncoding:
    """Of a tokenizer whose tokens are bytes and two control tokens."""
    with TemporaryDirectory() as folder:
        tokenizer: Tokenizer = load_tokenizer(str(toy_tokenizer(Path(folder))))
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in CONTROL])
    return TextEncoding(tokenizer, 100_000, ChatTemplateSource({"default": TEMPLATE}))


def bodies(data: bytes) -> bool:
    """A body of a route, which the first byte chooses: taken apart, put together, checked, and read."""
    model, body = MODELS[data[0] % len(MODELS)] if data else MODELS[0], data[1:]
    try:
        taken = take_apart(body, MOST_VALUES)
    except RecursionError:  # a typed error of the process that does it
        return False
    if "sizes" not in taken.head:
        assert taken.head.keys() & {"values", "not_json", "surrogate", "unreadable"}
        return False
    value = asyncio.run(put_together(taken))
    assert _same(value, json.loads(body))
    try:
        asked: Any = model.model_validate(value)
    except ValidationError:
        return False
    for name in ("template_data", "tool_data", "prompts", "check", "template_variables", "forced_name", "sampling"):
        found = _typed(partial(getattr, asked, name, None))
        if callable(found):
            _typed(found)
    if hasattr(asked, "to_generate"):
        _typed(lambda: asked.to_generate(None, 0))
    return True


def messages(data: bytes) -> bool:
    """A large message of gRPC: what is taken out of it and what is left make the message that it was."""
    taken = _typed(lambda: large_message.take_apart(data, lambda chat: len(chat.messages), LONGEST))
    if taken is None:
        return False
    large, sent = large_message.put_together(taken), gateway_pb2.GenerateRequest.FromString(data)
    made = gateway_pb2.GenerateRequest()
    made.CopyFrom(large.rest)
    if sent.HasField("chat"):
        made.chat.ParseFromString(large.chat)
    for name, ids, field in (
        ("prompt", large.prompt, made.prompt_token_ids),
        ("prediction", large.prediction, made.prediction.token_ids if "prediction" in large.counts else None),
    ):
        if name in large.counts:
            assert len(ids) == (large.counts[name] if large.counts[name] <= LONGEST else 0)
            field.SetInParent()
            field.token_ids.extend(ids)
    for message in (made, sent):
        message.DiscardUnknownFields()
    assert made == sent or any(count > LONGEST for count in large.counts.values())
    return True


def _same(value: Any, parsed: Any) -> bool:
    if isinstance(value, array):
        return list(value) == parsed
    if isinstance(value, dict):
        return value.keys() == parsed.keys() and all(_same(value[name], parsed[name]) for name in value)
    if isinstance(value, list):
        return len(value) == len(parsed) and all(map(_same, value, parsed))
    return bool(value == parsed) or (value != value and parsed != parsed)


def _typed(work: Callable[[], Any]) -> Any:
    """The result; None for a typed error, which is no fault of ours."""
    try:
        found = work()
        return asyncio.run(found) if asyncio.iscoroutine(found) else found
    except Internal:
        raise
    except SlipstreamError:
        return None


def templates(data: bytes) -> bool:
    """A conversation, as JSON or a message of gRPC: its texts become no control tokens."""
    if data[:1] == b"{":
        try:
            given = json.loads(data)
            messages, tools = given.get("messages", []), given.get("tools", [])
            variables = given.get("variables", {})
        except (ValueError, RecursionError):
            return False
        if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
            return False
        if not isinstance(tools, list) or not isinstance(variables, dict):
            return False
    else:
        try:
            chat = gateway_pb2.Chat.FromString(data)
        except DecodeError:
            return False
        read = _typed(lambda: read_chat(chat))
        if read is None:
            return False
        messages, tools, variables = read
    tokens = _typed(lambda: encoding().encode_chat(messages, tools, variables, 20_000))
    if tokens is not None:
        begin, end = (encoding().encoder.token_to_id(each) for each in CONTROL)
        assert tokens.count(end) <= len(messages) and tokens.count(begin) <= len(messages) + 1
    return tokens is not None


def tools(data: bytes) -> bool:
    """A model's text, cut into pieces at places that the first bytes choose: parts do not depend on the cuts."""
    cuts, text = data[1:5], data[5:].decode("utf-8", "replace")
    names = list(CALLS)
    for name in names if len(text) < 400 else names[data[0] % len(names) :][:2]:
        format = AnswerFormat(name, HARMONY if name == HARMONY else THINK, {"f": {}, "look": {"at": ["string"]}})
        assert read(format, [text]) == read(format, _cut(text, cuts))
        single, runs, at = format.reader(), format.reader(), 0
        while at < len(text):
            run = runs.run(text, at)
            step = max(run, 1)
            returned = [single.push(each) for each in text[at : at + step]]
            if run and any(returned):
                kinds = {type(part) for parts in returned for part in parts}
                assert len(kinds) == 1 and len(returned) == sum(map(len, returned))
            for each in text[at : at + step]:
                runs.push(each)
            at += step
    return True


def _cut(text: str, cuts: bytes) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[begin:end] for begin, end in pairwise(places)]


def frames(data: bytes) -> bool:
    """Messages of drafters and gateways: frames are grafted on a tree, within its limits; an Open is read."""
    grown, tree = False, CandidateTree([1, 2, 3], LIMITS)
    for part in data.split(b"\xff\xfe"):
        try:
            candidates = types_pb2.Candidates.FromString(part)
        except DecodeError:
            continue
        frame = _typed(partial(read_frame, candidates, 1, VOCABULARY, LIMITS, with_distributions=True))
        if frame is None:
            continue
        grafted = _typed(partial(tree.graft, frame))
        assert tree.node_count <= LIMITS.nodes and tree.depth <= LIMITS.depth
        if grafted is not None:
            grown |= grafted.added > 0
            count = grafted.added + grafted.merged + grafted.committed + sum(grafted.dropped.values())
            assert count == len(frame.token_ids)
        chosen = tree.select_likeliest(8)
        if len(part) % 3 == 0 and chosen.token_ids:
            tree.commit([chosen.token_ids[0]])
    try:
        opened = verifier_pb2.DecodeOpen.FromString(data)
    except DecodeError:
        return grown
    sampling = _typed(lambda: sampling_from_proto(opened.sampling))
    assert sampling is None or math.isfinite(sampling.temperature)
    _typed(lambda: structure_from_proto(opened.structured_output))
    return grown or opened.ByteSize() > 0


def token_ids(data: bytes) -> bool:
    """Ids of any tokens: the text that comes piece by piece is the one of all."""
    ids = [value % (VOCABULARY - 1) for value in data]
    decoder = encoding().decoder.detokenizer()
    text = "".join(decoder.push(each) for each in ids) + decoder.flush()
    assert text == encoding().decode(ids)
    _typed(lambda: encoding().decode(array("I", data[: len(data) // 4 * 4]).tolist(), VOCABULARY))
    return True


TARGETS: dict[str, Callable[[bytes], bool]] = {
    "bodies": bodies,
    "messages": messages,
    "templates": templates,
    "tools": tools,
    "frames": frames,
    "token_ids": token_ids,
}
CORPUS = Path(__file__).parent / "corpus"


def corpus(name: str) -> Iterator[bytes]:
    """Inputs that were found or written for a target."""
    for file in sorted((CORPUS / name).iterdir()):
        yield file.read_bytes()
