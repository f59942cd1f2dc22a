"""The events of a response, numbered alike on every gateway and however rounds cut the text.

An event's number is `FIRST + STEP * characters + index`: the characters of text that were read before it, and its index
among the events that they cause. A reader of tool calls is therefore given one character at a time, or a run of which
each character would cause nothing, or be text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gateway.api.openai.call_arguments import are_whole
from gateway.requests.answers import AnswerPlan
from gateway.sessions.output_stream import Event
from gateway.text.answers.reader import AnswerReader, Arguments, CallBegan, CallEnded, Part, PlainReader, Reasoning
from gateway.text.answers.reasoning_tokens import ReasoningTokens
from slipstream.v1 import gateway_pb2
from slipstream.v1.verifier_pb2 import FINISH_REASON_STOP

FIRST = 2
"""Number of the first event behind `response.created` and `response.in_progress`."""
STEP = 16
"""More than the events that one character can cause."""

Record = Callable[[gateway_pb2.Started, list[dict[str, Any]], gateway_pb2.Finished | None], dict[str, Any]]
"""Makes the response object."""


MESSAGE, REASONING, CALL = "message", "reasoning", "function_call"
_DELTAS = {
    MESSAGE: "response.output_text.delta",
    REASONING: "response.reasoning_text.delta",
    CALL: "response.function_call_arguments.delta",
}


class ResponseEvents:
    def __init__(self, plan: AnswerPlan, record: Record, after: int = -1) -> None:
        """`plan`: of the answer. `after`: the number up to which the client has the events."""
        self._plan = plan
        self._reader: AnswerReader = PlainReader()
        self._reasoned: ReasoningTokens | None = None
        self._record = record
        self._after = after
        self._started = gateway_pb2.Started()
        self._at = self._index = 0
        self._output: list[dict[str, Any]] = []
        self._open = ""
        """Kind of the item that is open; empty for none."""
        self._text: list[str] = []
        """Pieces of its text, or of its arguments."""
        self._call: dict[str, Any] = {}
        """The call that is open."""
        self._fresh: list[str] = []
        self._fresh_number = 0
        """Text that is not sent yet, and the number that its event has."""
        self._made: list[dict[str, Any]] = []
        self._response: dict[str, Any] = {}

    def whole(self) -> dict[str, Any]:
        """The response, once its session has ended."""
        return self._response

    def read(self, event: Event) -> list[dict[str, Any]]:
        """The events that an event of the session causes."""
        if isinstance(event, gateway_pb2.Started):
            self._start(event)
        elif isinstance(event, gateway_pb2.Delta):
            if self._reasoned is not None:
                self._reasoned.add(event.token_ids)
            for piece in self._pieces(event.text):
                self._advance(len(piece))
                for part in self._reader.push(piece):
                    self._add(part, len(piece))
        else:
            self._finish(event)
        self._send_text()
        made, self._made = self._made, []
        return made

    def _pieces(self, text: str) -> Iterator[str]:
        """The text in runs, whose events are those of its single characters."""
        at = 0
        while at < len(text):
            run = self._reader.run(text, at) or 1
            yield text[at : at + run]
            at += run

    def _start(self, started: gateway_pb2.Started) -> None:
        self._started = started
        self._reader, self._reasoned = self._plan.reader(started), self._plan.reasoning_tokens(started)
        for number, name in enumerate(("response.created", "response.in_progress")):
            if number > self._after:
                made = {"type": name, "sequence_number": number, "response": self._record(started, [], None)}
                self._made.append(made)

    def _finish(self, finished: gateway_pb2.Finished) -> None:
        self._advance(1)
        for part in self._reader.finish():
            self._add(part, 1)
        if not self._open and not self._output:
            self._open_item(MESSAGE)
        self._close_item("completed" if finished.reason == FINISH_REASON_STOP else "incomplete")
        self._response = response = self._record(self._started, self._output, finished)
        if self._reasoned is not None:
            response["usage"]["output_tokens_details"]["reasoning_tokens"] = self._reasoned.count
        names = {"completed": "completed", "failed": "failed"}
        self._emit(f"response.{names.get(response['status'], 'incomplete')}", response=response)

    def _advance(self, characters: int) -> None:
        self._at += characters
        self._index = 0

    def _number(self) -> int:
        self._index += 1
        return FIRST + STEP * self._at + self._index - 1

    def _emit(self, kind: str, **fields: Any) -> None:
        self._send_text()
        number = self._number()
        if number > self._after:
            self._made.append({"type": kind, "sequence_number": number, **fields})

    def _add(self, part: Part, characters: int) -> None:
        """`characters`: how many of the text caused the part."""
        if isinstance(part, CallEnded):
            self._close_item()
        elif isinstance(part, CallBegan):
            self._close_item()
            self._open_call(part)
        elif isinstance(part, Arguments):
            self._add_text(part.text, characters)
        else:
            kind, text = (REASONING, part.text) if isinstance(part, Reasoning) else (MESSAGE, part)
            if self._open != kind:
                self._close_item()
                self._open_item(kind)
            self._add_text(text, characters)

    def _add_text(self, text: str, characters: int) -> None:
        self._text.append(text)
        number = self._number()
        if number > self._after:
            had = (self._after - FIRST) // STEP - (self._at - characters) if characters > 1 else 0
            self._fresh.append(text[max(0, had) :])
            self._fresh_number = number

    def _send_text(self) -> None:
        if fresh := "".join(self._fresh):
            made = {"type": _DELTAS[self._open], "sequence_number": self._fresh_number} | self._place | {"delta": fresh}
            self._made.append(made | ({"logprobs": []} if self._open == MESSAGE else {}))
        self._fresh = []

    @property
    def _place(self) -> dict[str, Any]:
        place = {"item_id": self._item_id, "output_index": len(self._output)}
        return place if self._open == CALL else place | {"content_index": 0}

    @property
    def _item_id(self) -> str:
        return f"item_{self._started.session_id}_{len(self._output)}"

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        item: dict[str, Any] = {"type": self._open, "id": self._item_id, "status": status}
        more: dict[str, Any] = {"role": "assistant"} if self._open == MESSAGE else {"summary": []}
        return item | more | {"content": content}

    def _part(self, text: str) -> dict[str, Any]:
        if self._open == REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _open_item(self, kind: str) -> None:
        self._open, self._text = kind, []
        self._emit("response.output_item.added", output_index=len(self._output), item=self._item("in_progress", []))
        self._emit("response.content_part.added", **self._place, part=self._part(""))

    def _close_item(self, status: str = "completed") -> None:
        """`status`: of a text; whether a call is complete is read off its arguments."""
        if not self._open:
            return
        text = "".join(self._text)
        item = self._close_call(text) if self._open == CALL else self._close_text(text, status)
        self._emit("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = ""

    def _close_text(self, text: str, status: str) -> dict[str, Any]:
        if self._open == MESSAGE:
            self._emit("response.output_text.done", **self._place, text=text, logprobs=[])
        else:
            self._emit("response.reasoning_text.done", **self._place, text=text)
        self._emit("response.content_part.done", **self._place, part=self._part(text))
        return self._item(status, [self._part(text)])

    def _open_call(self, call: CallBegan) -> None:
        self._open, self._text = CALL, []
        made = self._plan.call_id(self._started, len(self._output), call)
        self._call = {"type": CALL, "id": self._item_id, "call_id": made, "name": call.name}
        item = {**self._call, "arguments": "", "status": "in_progress"}
        self._emit("response.output_item.added", output_index=len(self._output), item=item)

    def _close_call(self, arguments: str) -> dict[str, Any]:
        name = self._call["name"]
        self._emit("response.function_call_arguments.done", **self._place, name=name, arguments=arguments)
        return {**self._call, "arguments": arguments, "status": "completed" if are_whole(arguments) else "incomplete"}
