"""The events of a response, numbered alike on every gateway and however rounds cut the text.

An event's number is `FIRST + STEP * characters + index`: the characters of text that were read before it, and its index
among the events that they cause. A reader of tool calls is therefore given one character at a time, or a run of which
each character would cause nothing, or be text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gateway.sessions.output_stream import Event
from gateway.text.tool_calls import ToolCall, new_reader
from slipstream.v1 import gateway_pb2

FIRST = 2
"""Number of the first event behind `response.created` and `response.in_progress`."""
STEP = 16
"""More than the events that one character can cause."""

Record = Callable[[gateway_pb2.Started, list[dict[str, Any]], gateway_pb2.Finished | None], dict[str, Any]]
"""Makes the response object."""


class ResponseEvents:
    def __init__(self, format: str, record: Record, after: int = -1) -> None:
        """`format`: of tool calls in the text. `after`: the number up to which the client has the events."""
        self._reader = new_reader(format)
        self._record = record
        self._after = after
        self._started = gateway_pb2.Started()
        self._at = self._index = 0
        self._output: list[dict[str, Any]] = []
        self._text: list[str] | None = None
        """Pieces of the text of the message that is open."""
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
        """The text in runs, whose events are those of its single characters. A message that is opened has events of its
        own: its first character comes alone."""
        at = 0
        while at < len(text):
            run = self._reader.silent(text, at)
            if not run and self._text is not None:
                run = self._reader.certain(text, at)
            run = run or 1
            yield text[at : at + run]
            at += run

    def _start(self, started: gateway_pb2.Started) -> None:
        self._started = started
        for number, name in enumerate(("response.created", "response.in_progress")):
            if number > self._after:
                made = {"type": name, "sequence_number": number, "response": self._record(started, [], None)}
                self._made.append(made)

    def _finish(self, finished: gateway_pb2.Finished) -> None:
        self._advance(1)
        for part in self._reader.finish():
            self._add(part, 1)
        if self._text is None and not self._output:
            self._open_message()
        self._close_message()
        self._response = response = self._record(self._started, self._output, finished)
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

    def _add(self, part: str | ToolCall, characters: int) -> None:
        """`characters`: how many of the text caused the part."""
        if isinstance(part, ToolCall):
            self._close_message()
            self._add_call(part)
            return
        if self._text is None:
            self._open_message()
        assert self._text is not None
        self._text.append(part)
        number = self._number()
        if number > self._after:
            had = (self._after - FIRST) // STEP - (self._at - characters) if characters > 1 else 0
            self._fresh.append(part[max(0, had) :])
            self._fresh_number = number

    def _send_text(self) -> None:
        if fresh := "".join(self._fresh):
            made = {"type": "response.output_text.delta", "sequence_number": self._fresh_number}
            self._made.append(made | self._place | {"delta": fresh, "logprobs": []})
        self._fresh = []

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": len(self._output), "content_index": 0}

    @property
    def _item_id(self) -> str:
        return f"item_{self._started.session_id}_{len(self._output)}"

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self._item_id, "status": status, "role": "assistant", "content": content}

    def _open_message(self) -> None:
        self._text = []
        item = self._message("in_progress", [])
        self._emit("response.output_item.added", output_index=len(self._output), item=item)
        self._emit("response.content_part.added", **self._place, part=_part(""))

    def _close_message(self) -> None:
        if self._text is None:
            return
        text = "".join(self._text)
        self._emit("response.output_text.done", **self._place, text=text, logprobs=[])
        self._emit("response.content_part.done", **self._place, part=_part(text))
        item = self._message("completed", [_part(text)])
        self._emit("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._text = None

    def _add_call(self, call: ToolCall) -> None:
        index = len(self._output)
        item = {"type": "function_call", "id": self._item_id, "call_id": f"call_{self._item_id}", "name": call.name}
        place = {"item_id": self._item_id, "output_index": index}
        empty = {**item, "arguments": "", "status": "in_progress"}
        self._emit("response.output_item.added", output_index=index, item=empty)
        self._emit("response.function_call_arguments.delta", **place, delta=call.arguments)
        self._emit("response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments)
        done = {**item, "arguments": call.arguments, "status": "completed"}
        self._emit("response.output_item.done", output_index=index, item=done)
        self._output.append(done)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
