"""`/v1/models`, and the tokenizer: `/tokenize`, `/detokenize`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from gateway.api.http.body import BodyRoute
from gateway.api.http.dependencies import HttpDependencies
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
        """The models that can be asked for."""
        return {"object": "list", "data": [_model(each, parts) for each in parts.router.models().values()]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model."""
        check_name(name)
        return _model(parts.router.model(name), parts)

    @router.post("/tokenize")
    async def tokenize(asked: TokenizeRequest) -> dict[str, Any]:
        """Token ids of a prompt, or of messages as the chat template writes them."""
        log_unknown(asked)
        found = _served(parts, asked.model)
        tokens = await _tokens(parts, asked)
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": found.max_length, "tokens": tokens}
        if asked.return_token_strs:
            answer["token_strs"] = [parts.tokenizer.shown(token).text for token in tokens]
        return answer

    @router.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest) -> dict[str, Any]:
        """The text of token ids."""
        log_unknown(asked)
        found = _served(parts, asked.model)
        if max(asked.tokens, default=0) >= found.vocabulary_size:
            raise InvalidArgument(
                f"{found.name} has tokens below {found.vocabulary_size}.", reason="TOKEN_OUT_OF_RANGE"
            )
        return {"prompt": await parts.tokenizer.decode(asked.tokens)}

    return router


async def _tokens(parts: HttpDependencies, asked: TokenizeRequest) -> list[int]:
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidArgument("Send prompt, or messages.")
    if asked.messages is not None:
        return await parts.tokenizer.encode_chat([message.as_template_data() for message in asked.messages])
    prompt = asked.prompt or ""
    return await (
        parts.tokenizer.encode(prompt) if asked.add_special_tokens else parts.tokenizer.encode_rendered(prompt)
    )


def _served(parts: HttpDependencies, name: str) -> types_pb2.ModelInfo:
    check_name(name)
    return parts.router.model(name)


def _model(model: types_pb2.ModelInfo, parts: HttpDependencies) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "slipstream",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_length,
        "arithmetics": [
            {
                "name": each.arithmetic,
                "verifiers": each.verifiers,
                "same_tokens": each.batch_invariant,
                "newest_weights": each.newest,
            }
            for each in parts.router.arithmetics(model.name)
        ],
    }
