"""`/v1/models`, and the tokenizer: `/tokenize`, `/detokenize`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.api.http.body import BodyRoute
from gateway.api.http.dependencies import HttpDependencies
from gateway.api.http.entry import context_of
from gateway.api.openai.chat import ChatMessage
from gateway.api.openai.fields import RequestFields, TokenIds, log_unknown
from gateway.requests.validation import check_name
from slipstream.errors import InvalidArgument
from slipstream.v1 import types_pb2


class TokenizeRequest(RequestFields):
    model: str = ""
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestFields):
    model: str = ""
    tokens: TokenIds


def routes(parts: HttpDependencies) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The models that can be asked for, their workers that answer, and whether the session store does."""
        data = [_model(each, parts) for each in parts.router.models().values()]
        store = {"kind": parts.store.kind, "answers": await parts.store.answers()}
        return {"object": "list", "data": data, "store": store}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model."""
        check_name(name)
        return _model(parts.router.model(name), parts)

    @router.post("/tokenize", response_model=dict[str, Any])
    async def tokenize(asked: TokenizeRequest, request: Request) -> Response:
        """Token ids of a prompt, or of messages as the chat template writes them."""
        log_unknown(asked)
        found = _served(parts, asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidArgument("Send prompt, or messages.")
        messages = None if asked.messages is None else [message.as_template_data() for message in asked.messages]
        answer = await parts.tokenizer.tokenized(
            messages if messages is not None else asked.prompt or "",
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

    return router


def _served(parts: HttpDependencies, name: str) -> types_pb2.ModelInfo:
    check_name(name)
    return parts.router.model(name)


def _model(model: types_pb2.ModelInfo, parts: HttpDependencies) -> dict[str, Any]:
    served = parts.router.describe_model(model.name, model)
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
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
