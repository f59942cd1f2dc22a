"""`/v1/completions`: prompts as texts or token ids, whole or as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from gateway.api.http.body import BodyRoute
from gateway.api.http.choices import MOST_CHOICES, Choice, last_position
from gateway.api.http.dependencies import HttpDependencies
from gateway.api.http.entry import context_of
from gateway.api.http.reply import Answer
from gateway.api.openai.call import Call, ChoiceStream, ending
from gateway.api.openai.completion_logprobs import completion_logprobs
from gateway.api.openai.fields import SamplingFields, Strings, TokenIds, log_unknown
from gateway.request_context import RequestContext
from gateway.requests.texts import text_of, tokens_of
from gateway.sessions.output_stream import Event
from gateway.work.once import Once
from slipstream.errors import InvalidArgument
from slipstream.v1 import gateway_pb2

MAX_TOKENS_DEFAULT = 16
"""Output tokens of a completion that names no number and has no operator's, as OpenAI and vLLM have it: a text that is
continued has no turn that ends, as a chat has."""


class CompletionRequest(SamplingFields):
    prompt: str | TokenIds | Strings | Annotated[list[TokenIds], Field(fail_fast=True)] = Field(
        union_mode="left_to_right"
    )
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = Field(None, ge=1)

    def prompts(self) -> list[str | Sequence[int]]:
        """The prompts, one or several. Raises InvalidArgument for what this server does not do."""
        if self.suffix:
            raise InvalidArgument("suffix is not served: the model continues a prompt and fills no gaps.")
        if self.best_of not in (None, self.choices):
            raise InvalidArgument("best_of is not served; ask for n choices and take the best yourself.")
        if self.echo and self.logprobs is not None:
            raise InvalidArgument("echo with logprobs is not served: a prompt has no log-probabilities here.")
        several = not isinstance(self.prompt, str) and not (self.prompt and isinstance(self.prompt[0], int))
        prompts: list[Any] = list(self.prompt) if several else [self.prompt]
        if not 1 <= len(prompts) * self.choices <= MOST_CHOICES:
            raise InvalidArgument(f"prompts times n must make 1 to {MOST_CHOICES} choices.")
        return prompts


def routes(parts: HttpDependencies) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)

    @router.post("/v1/completions")
    async def complete(asked: CompletionRequest, request: Request) -> Answer:
        """Continues prompts."""
        log_unknown(asked)
        context = context_of(request.scope)
        return CompletionCall(parts, context, asked).answer(last_position(context), request.query_params)

    return router


class CompletionCall(Call):
    prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"
    asked: CompletionRequest

    def __init__(self, parts: HttpDependencies, context: RequestContext, asked: CompletionRequest) -> None:
        self._prompts = asked.prompts()
        if asked.max_tokens is None and not parts.config.max_tokens_default:
            asked.max_tokens = MAX_TOKENS_DEFAULT
        self._echoes = [Once(partial(self._echo, prompt)) for prompt in self._prompts]
        tokenizer, indices = parts.tokenizer, list(range(asked.choices)) * len(self._prompts)
        prompts = [text_of(tokenizer, each) if isinstance(each, str) else tokens_of(each) for each in self._prompts]
        requests = [asked.to_generate(None, index) for index in indices]
        for request in requests:
            request.logprobs, request.top_logprobs = asked.logprobs is not None, asked.logprobs or 0
        super().__init__(parts, context, asked, requests, asked.texts(prompts, tokenizer))

    async def whole_choice(self, choice: Choice) -> dict[str, Any]:
        echoed = await self._echoed(choice)
        return self._choice(choice, echoed + choice.text, len(echoed))

    async def chunk_choice(self, stream: ChoiceStream, event: Event) -> dict[str, Any] | None:
        choice, echoed = stream.choice, ""
        if isinstance(event, gateway_pb2.Started):
            echoed = "" if stream.resumed else await self._echoed(choice)
        if not (echoed or choice.text or choice.finished):
            return None
        return self._choice(choice, echoed + choice.text, stream.characters)

    async def _echoed(self, choice: Choice) -> str:
        return await self._echoes[choice.index // self.asked.choices].get() if self.asked.echo else ""

    async def _echo(self, prompt: str | Sequence[int]) -> str:
        return prompt if isinstance(prompt, str) else await self.parts.tokenizer.decode(prompt, self._context.tenant)

    def _choice(self, choice: Choice, text: str, offset: int) -> dict[str, Any]:
        """`offset`: characters of the choice before the output that is sent."""
        made: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": completion_logprobs(choice.logprobs, offset) if self.asked.logprobs is not None else None,
            **ending(choice.finished),
        }
        if self.asked.return_token_ids:
            made["token_ids"] = list(choice.token_ids)
            made["prompt_token_ids"] = list(choice.started.prompt_token_ids)
        return made
