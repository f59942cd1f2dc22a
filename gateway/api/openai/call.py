"""One request for completions or a chat, for as long as it is answered: whole, or as a stream of chunks."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from gateway.api.http.choices import Choice, StreamPosition, collect_choices, resume_choice, run_choices, wants_ids
from gateway.api.http.dependencies import HttpDependencies
from gateway.api.http.reply import Answer, Reply, trace_headers
from gateway.api.openai.fields import SamplingFields
from gateway.api.openai.usage import mixture, round_fields, speculation_metrics, usage
from gateway.request_context import RequestContext
from gateway.requests.texts import Texts
from gateway.sessions.output_stream import Event
from slipstream.errors import InvalidArgument
from slipstream.v1 import gateway_pb2, verifier_pb2

FINISH_REASONS = {
    verifier_pb2.FINISH_REASON_STOP: "stop",
    verifier_pb2.FINISH_REASON_LENGTH: "length",
    verifier_pb2.FINISH_REASON_CANCELLED: "abort",
    verifier_pb2.FINISH_REASON_ERROR: "error",
}
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class ChoiceStream:
    """A choice of a stream, which holds what was not sent yet."""

    def __init__(self, choice: Choice, position: StreamPosition | None, *, rereads: bool) -> None:
        """`rereads`: the events begin at the session's beginning, not at the position."""
        self.choice = choice
        self.resumed = position is not None
        self.tokens = position.tokens if position else 0
        """Output tokens that were sent, or that the client had."""
        self.characters = position.characters if position else 0
        self._known_tokens, self._known_characters = (self.tokens, self.characters) if rereads else (0, 0)
        """Tokens and characters of the coming output that the client has already."""
        self.known = 0
        """Characters of the text taken last that the client has."""

    def take_text(self) -> str:
        """The text that came since the last call; it counts as sent."""
        choice = self.choice
        text, choice.text = choice.text, ""
        self.known = min(self._known_characters, len(text))
        self.characters += len(text) - self.known
        self._known_characters -= self.known
        known_tokens = min(self._known_tokens, len(choice.token_ids))
        self._known_tokens -= known_tokens
        del choice.token_ids[:known_tokens]
        del choice.logprobs[: max(0, len(choice.logprobs) - len(choice.token_ids))]
        return text

    def advance(self) -> StreamPosition:
        """Forget what is sent now; returns the position behind it."""
        choice = self.choice
        self.tokens += len(choice.token_ids)
        self.characters += len(choice.text)
        choice.text, choice.token_ids, choice.logprobs, choice.rounds = "", [], [], []
        return StreamPosition(choice.started.session_id, self.tokens, self.characters, choice.started.revision)


class Call(ABC):
    prefix: ClassVar[str]
    """Prefix of the answer's id."""
    object: ClassVar[str]
    chunk_object: ClassVar[str]
    rereads = False
    """True where the rest of an output can be read only by reading it from its beginning."""

    def __init__(
        self,
        parts: HttpDependencies,
        context: RequestContext,
        asked: SamplingFields,
        requests: Sequence[gateway_pb2.GenerateRequest],
        texts: Sequence[Texts],
    ) -> None:
        """`texts`: of the request at the same index."""
        self.parts = parts
        self.asked = asked
        self._context = context
        self._requests = requests
        self._texts = texts
        self._created = int(time.time())

    @abstractmethod
    async def whole_choice(self, choice: Choice) -> dict[str, Any]:
        """The choice in an answer that is sent at once."""

    @abstractmethod
    async def chunk_choice(self, stream: ChoiceStream, event: Event) -> dict[str, Any] | None:
        """The choice in the chunk for an event that `stream.choice` holds already; None if it is not sent yet."""

    @property
    def reasoning_tokens(self) -> int:
        """Output tokens that are reasoning, of all choices."""
        return 0

    def ending(self, finished: gateway_pb2.Finished | None) -> dict[str, Any]:
        """The fields of a choice for its end; null while it goes on."""
        if finished is None:
            return {"finish_reason": None}
        stop: str | int | None = finished.stop or None
        if finished.HasField("stop_token_id") and finished.stop_token_id in (self.asked.stop_token_ids or ()):
            stop = finished.stop_token_id
        reason = {"finish_reason": FINISH_REASONS.get(finished.reason), "stop_reason": stop}
        return reason | mixture(finished.statistics)

    def answer(self, position: StreamPosition | None, query: Mapping[str, str]) -> Answer:
        """`position`: where the client goes on. `query`: may ask for events with ids for that."""
        ids = position is not None or wants_ids(self._context, query)
        if position is not None or self.asked.stream:
            return Answer(lambda reply: self._stream(reply, position, ids=ids), self.parts.config.http_idle_s)
        return Answer(self._whole, self.parts.config.http_idle_s)

    async def _whole(self, reply: Reply) -> None:
        choices = await collect_choices(self.parts.sessions, self._context, self._requests, self._texts)
        made = [await self.whole_choice(choice) for choice in choices]
        answer = self._frame(self.object, choices[0].started, made) | self._totals(choices)
        answer["system_fingerprint"] = _fingerprint(choices)
        await reply.send_json(answer, trace_headers(self._context.trailers))

    async def _stream(self, reply: Reply, position: StreamPosition | None, *, ids: bool) -> None:
        if ids and len(self._requests) > 1:
            raise InvalidArgument("Events have ids only in a stream of one choice.", reason="EVENT_ID")
        streams = [ChoiceStream(Choice(index), position, rereads=self.rereads) for index in range(len(self._requests))]

        async def send(index: int, event: Event) -> None:
            await self._send_chunk(reply, streams[index], event, ids=ids)

        if position is None:
            await run_choices(self.parts.sessions, self._context, self._requests, self._texts, send)
        else:
            begin = replace(position, tokens=0, characters=0) if self.rereads else position
            await resume_choice(self.parts.sessions, self._context, begin, send, self.asked.mixed_arithmetic)
        if self.asked.include_usage:
            choices = [stream.choice for stream in streams]
            last = self._frame(self.chunk_object, choices[0].started, []) | self._totals(choices)
            last["system_fingerprint"] = _fingerprint(choices)
            await reply.send_event(json.dumps(last))
        await reply.send_event("[DONE]")
        await reply.end_events()

    async def _send_chunk(self, reply: Reply, stream: ChoiceStream, event: Event, *, ids: bool) -> None:
        choice = stream.choice
        choice.add(event)
        made = await self.chunk_choice(stream, event)
        if made is None:
            return
        if choice.rounds:
            made["speculation"] = {"rounds": [round_fields(each) for each in choice.rounds]}
        chunk = self._frame(self.chunk_object, choice.started, [made])
        if choice.finished is not None:
            chunk["system_fingerprint"] = _fingerprint([choice])
        position = stream.advance()
        if self.asked.continuous_usage:
            chunk["usage"] = usage(len(choice.started.prompt_token_ids), stream.tokens)
        elif self.asked.include_usage:
            chunk["usage"] = None
        await reply.send_event(json.dumps(chunk), id=str(position) if ids else "")

    def _frame(self, object: str, started: gateway_pb2.Started, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}{started.session_id}",
            "object": object,
            "created": self._created,
            "model": started.model,
            "choices": choices,
            "system_fingerprint": None,
        }

    def _totals(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Usage and, for a single choice, the figures of its speculation."""
        by_prompt = [choices[first:][: self.asked.choices] for first in range(0, len(choices), self.asked.choices)]
        prompt_tokens = sum(len(each[0].started.prompt_token_ids) for each in by_prompt)
        cached_tokens = sum(map(_cached_tokens, by_prompt))
        finished = [choice.finished for choice in choices if choice.finished]
        output_tokens, statistics = sum(each.output_tokens for each in finished), [each.statistics for each in finished]
        totals: dict[str, Any] = {"usage": usage(prompt_tokens, output_tokens, statistics, cached_tokens)}
        totals["usage"]["completion_tokens_details"]["reasoning_tokens"] = self.reasoning_tokens
        if len(finished) == 1 and (metrics := speculation_metrics(finished[0].statistics)):
            totals["metrics"] = metrics
        return totals


def _fingerprint(choices: Sequence[Choice]) -> str | None:
    """The arithmetic that wrote the end of the choices; None until they end, and where theirs differ."""
    spans = [choice.finished.statistics.arithmetics if choice.finished else () for choice in choices]
    names = {each[-1].arithmetic if each else None for each in spans}
    return names.pop() if len(names) == 1 else None


def _cached_tokens(choices: Sequence[Choice]) -> int:
    """Tokens of one prompt that none of its choices had to compute: a choice finds what the one before it computed."""
    return min(each.finished.statistics.cached_prompt_tokens if each.finished else 0 for each in choices)


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
