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
from gateway.api.openai.call import Call, ChoiceStream
from gateway.api.openai.completion_logprobs import completion_logprobs, echoed_logprobs, prompt_logprobs
from gateway.api.openai.fields import CutPromptFields, Strings, TokenIds, log_unknown
from gateway.request_context import RequestContext
from gateway.requests.texts import text_of, tokens_of
from gateway.sessions.output_stream import Event
from gateway.work.once import Once
from slipstream.errors import TOO_MANY_ITEMS, InvalidArgument
from slipstream.v1 import gateway_pb2, verifier_pb2

MAX_TOKENS_DEFAULT = 16
"""Output tokens of a completion that names no number and has no operator's, as OpenAI and vLLM have it: a text that is
continued has no turn that ends, as a chat has."""


class CompletionRequest(CutPromptFields):
    special_tokens = True
    prompt: str | TokenIds | Strings | Annotated[list[TokenIds], Field(fail_fast=True)] = Field(
        union_mode="left_to_right"
    )
    max_tokens: int | None = Field(None, ge=0, le=2**32 - 1)
    """Most output tokens; 0: the prompt alone, for `echo` and `prompt_logprobs`. Default: 16."""
    logprobs: int | None = Field(None, ge=0, le=20)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    """Log-probabilities of the prompt's tokens, and of so many likeliest ones. `echo` with `logprobs` needs none."""
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = Field(None, ge=1)

    def prompts(self) -> list[str | Sequence[int]]:
        """The prompts, one or several. Raises InvalidArgument for what this server does not do."""
        if self.suffix:
            raise InvalidArgument(
                "suffix is not served: the model continues a prompt and fills no gaps.",
                reason="FIELD_NOT_SERVED",
                field="suffix",
            )
        if self.best_of not in (None, self.choices):
            raise InvalidArgument(
                "best_of is not served; ask for n choices and take the best yourself.",
                reason="FIELD_NOT_SERVED",
                field="best_of",
            )
        several = not isinstance(self.prompt, str) and not (self.prompt and isinstance(self.prompt[0], int))
        prompts: list[Any] = list(self.prompt) if several else [self.prompt]
        if not 1 <= len(prompts) * self.choices <= MOST_CHOICES:
            raise InvalidArgument(
                f"prompts times n must make 1 to {MOST_CHOICES} choices.",
                reason=TOO_MANY_ITEMS,
                field="prompt",
                numbers={"limit": MOST_CHOICES},
            )
        return prompts

    @property
    def echoes_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    @property
    def top_prompt_logprobs(self) -> int | None:
        """Likeliest tokens beside each of the prompt's, as many as any field asks for; None: nothing of the prompt."""
        asked = (self.prompt_logprobs, self.logprobs if self.echoes_logprobs else None)
        return max((each for each in asked if each is not None), default=None)


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
        self._echoes: dict[int, Once[str]] = {}
        """Texts of the prompts, by index."""
        tokenizer, indices = parts.tokenizer, list(range(asked.choices)) * len(self._prompts)
        prompts = [
            asked.cut(text_of(tokenizer, each) if isinstance(each, str) else tokens_of(each)) for each in self._prompts
        ]
        self._begun: set[int] = set()
        """Indices of the choices whose prompt was sent, where a stream sends prompts."""
        self._silent = asked.max_tokens == 0
        if self._silent:
            asked.max_tokens = 1  # a session computes its prompt to write a token, which no client is sent
        self._top_prompt = asked.top_prompt_logprobs
        requests = [asked.to_generate(None, index) for index in indices]
        for request in requests:
            if self._top_prompt is not None:
                request.prompt_logprobs = self._top_prompt
            request.logprobs, request.top_logprobs = asked.logprobs is not None, asked.logprobs or 0
        super().__init__(parts, context, asked, requests, asked.texts(prompts, tokenizer))

    async def whole_choice(self, choice: Choice) -> dict[str, Any]:
        echoed = await self._echoed(choice)
        if self._silent:
            _silence(choice)
        return await self._choice(choice, echoed + choice.text, len(echoed), first=True)

    async def chunk_choice(self, stream: ChoiceStream, event: Event) -> dict[str, Any] | None:
        choice, echoed = stream.choice, ""
        began = isinstance(event, gateway_pb2.Started)
        if self._top_prompt is not None:  # they come with the first tokens, and the echo with them
            if began or not (choice.token_ids or choice.finished):
                return None
            began = not stream.resumed and choice.index not in self._begun
        if began:
            self._begun.add(choice.index)
            echoed = "" if stream.resumed else await self._echoed(choice)
        if self._silent:
            _silence(choice)
        if not (echoed or choice.text or choice.finished or choice.prompt_logprobs):
            return None
        before = len(await self._echoed(choice)) if self.asked.echo else 0
        made = await self._choice(choice, echoed + choice.text, before + stream.characters, first=began)
        choice.prompt_logprobs = []
        return made

    async def _echoed(self, choice: Choice) -> str:
        if not self.asked.echo:
            return ""
        index, cut = choice.index // self.asked.choices, self.asked.truncate_prompt_tokens is not None
        prompt = choice.started.prompt_token_ids if cut else self._prompts[index]
        if index not in self._echoes:
            self._echoes[index] = Once(partial(self._echo, prompt))
        return await self._echoes[index].get()

    async def _echo(self, prompt: str | Sequence[int]) -> str:
        return prompt if isinstance(prompt, str) else await self.parts.tokenizer.decode(prompt, self._context.tenant)

    async def _choice(self, choice: Choice, text: str, offset: int, *, first: bool) -> dict[str, Any]:
        """`offset`: characters of the choice before the output that is sent. `first`: the prompt is sent with it."""
        logprobs = None
        if self.asked.logprobs is not None and self.asked.echoes_logprobs and first:
            tokens, top = choice.started.prompt_token_ids, self.asked.logprobs
            first_token = self.parts.tokenizer.shown(tokens[0])  # nothing comes before it
            logprobs = await echoed_logprobs(first_token, choice.prompt_logprobs, choice.logprobs, top, text)
        elif self.asked.logprobs is not None:
            logprobs = await completion_logprobs(choice.logprobs, offset, text)
        made = {"index": choice.index, "text": text, "logprobs": logprobs} | self.ending(choice.finished)
        if self.asked.prompt_logprobs is not None and first:
            made["prompt_logprobs"] = await prompt_logprobs(choice.prompt_logprobs, self.asked.prompt_logprobs)
        if self.asked.return_token_ids:
            made["token_ids"] = list(choice.token_ids)
            made["prompt_token_ids"] = list(choice.started.prompt_token_ids)
        return made


def _silence(choice: Choice) -> None:
    """Forgets the output of a request for none."""
    choice.text, choice.token_ids, choice.logprobs, choice.rounds = "", [], [], []
    if choice.finished is not None:
        choice.finished.output_tokens = 0
        choice.finished.reason = verifier_pb2.FINISH_REASON_LENGTH
