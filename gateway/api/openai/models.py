"""`/v1/models`, and the tokenizer: `/tokenize`, `/detokenize`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.api.http.body import BodyRoute
from gateway.api.http.dependencies import HttpDependencies
from gateway.api.http.entry import context_of
from gateway.api.openai.chat import ConversationFields, Messages
from gateway.api.openai.fields import RequestFields, TokenIds, log_unknown
from gateway.requests.answers import fitted_chat
from gateway.requests.validation import check_name
from gateway.text.tokenizer import Conversation
from slipstream.errors import FIELD_MISSING, FIELDS_CONFLICT, InvalidArgument
from slipstream.v1 import types_pb2

TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""Class that transformers makes of a `tokenizer.json`, which is what this server reads."""


class TokenizeRequest(ConversationFields):
    """A prompt, or a conversation with what a chat says of it."""

    model: str = ""
    prompt: str | None = None
    messages: Messages | None = None  # type: ignore[assignment]
    add_special_tokens: bool = True
    """Whether a prompt gets them; a chat template writes its own."""
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestFields):
    model: str = ""
    tokens: TokenIds


def routes(parts: HttpDependencies) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The models that can be asked for, by each of their names, their workers that answer, and whether the session
        store does."""
        known = parts.router.models()
        aliases = {alias: model or next(iter(known)) for alias, model in parts.router.aliases.items()}
        named = known | {alias: known[model] for alias, model in aliases.items() if model in known}
        data = [_model(name, each, parts) for name, each in named.items()]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"], "has_more": False}
        store = {"kind": parts.store.kind, "answers": await parts.store.answers()}
        return {"object": "list", "data": data, **ends, "store": store}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model."""
        check_name("model", name)
        return _model(name, parts.router.model(name), parts)

    _add_tokenizer(router, parts)
    return router


def _add_tokenizer(router: APIRouter, parts: HttpDependencies) -> None:
    @router.post("/tokenize", response_model=dict[str, Any])
    async def tokenize(asked: TokenizeRequest, request: Request) -> Response:
        """Token ids of a prompt, or of messages as the chat template writes them."""
        log_unknown(asked)
        found = _served(parts, asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidArgument("Send prompt, or messages.", reason=FIELD_MISSING, field="prompt")
        variables, tools = asked.template_variables(), await asked.tool_data()
        if asked.messages is None and (variables or tools):
            raise InvalidArgument(
                "Fields of a chat need messages; a prompt is taken as it is.", reason=FIELDS_CONFLICT, field="prompt"
            )
        given: str | Conversation = asked.prompt or ""
        if asked.messages is not None:
            messages = await fitted_chat(parts.tokenizer, await asked.template_data(), tools, variables)
            given = messages, tools, variables
        answer = await parts.tokenizer.tokenized(
            given,
            context_of(request.scope).tenant,
            special=asked.add_special_tokens,
            texts=bool(asked.return_token_strs),
            max_length=found.max_length,
        )
        return Response(answer, media_type="application/json")

    @router.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest, request: Request) -> dict[str, Any]:
        """The text of token ids."""
        log_unknown(asked)
        found = _served(parts, asked.model)
        tenant = context_of(request.scope).tenant
        return {"prompt": await parts.tokenizer.decode(asked.tokens, tenant, below=found.vocabulary_size)}

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """The tokenizer's description from `tokenizer_config.json`: its special tokens by their names, and the chat
        template of requests without tools."""
        template, tokens = parts.tokenizer.chat_template.given, dict(parts.tokenizer.special_tokens)
        source = "" if template is None else template.templates.get("default", "")
        return {"tokenizer_class": TOKENIZER_CLASS, **tokens} | ({"chat_template": source} if source else {})


def _served(parts: HttpDependencies, name: str) -> types_pb2.ModelInfo:
    check_name("model", name)
    return parts.router.model(name)


def _model(name: str, model: types_pb2.ModelInfo, parts: HttpDependencies) -> dict[str, Any]:
    """As clients of OpenAI's, and those of Anthropic's, read it. `name`: one of the model's."""
    served = parts.router.describe_model(model.name, model)
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "owned_by": "slipstream",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_length,
        "sampling_defaults": {field.name: value for field, value in parts.sessions.sampling_defaults.ListFields()},
        "arithmetics": [
            {
                "name": each.arithmetic,
                "verifiers": each.verifiers,
                "same_tokens": each.batch_invariant,
                "newest_weights": each.newest,
            }
            for each in served.arithmetics
        ],
        "verifiers": served.verifiers,
        "verifiers_away": served.verifiers_away,
        "drafters": [
            {"name": each.name, "replicas": each.replicas, "replicas_away": each.replicas_away}
            for each in served.drafters
        ],
    }
