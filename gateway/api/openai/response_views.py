"""Views of a response besides its whole: the output of one that still runs, log-probabilities, its input items.

All are made of the events that a response's reader makes, or of what is stored with it, however that reader works.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from gateway.api.openai.call_arguments import are_whole
from gateway.api.openai.chat import logprob_entry
from gateway.api.openai.response_events import ResponseEvents
from gateway.sessions.output_stream import Event
from gateway.text.chat_messages import said_in, texts_in
from gateway.work.pieces import in_pieces
from slipstream.errors import NotFound
from slipstream.v1 import gateway_pb2

INPUT_PREFIX = "msg_"
REASONING_PREFIX = "rs_"
_TEXT_DELTA, _REASONING_DELTA = "response.output_text.delta", "response.reasoning_text.delta"


def output_so_far(made: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output items that events have made, the last of them perhaps unfinished."""
    items: dict[int, dict[str, Any]] = {}
    for event in made:
        kind, index = event["type"], event.get("output_index", -1)
        if kind in ("response.output_item.added", "response.output_item.done"):
            items[index] = {**event["item"]}
        elif kind == "response.content_part.added":
            items[index]["content"] = [dict(event["part"])]
        elif kind in (_TEXT_DELTA, _REASONING_DELTA):
            items[index]["content"][0]["text"] += event["delta"]
        elif kind == "response.function_call_arguments.delta":
            items[index]["arguments"] += event["delta"]
    return [items[index] for index in sorted(items)]


class LoggedEvents:
    """A response's events, with the log-probabilities of their text."""

    def __init__(self, events: ResponseEvents) -> None:
        self._events = events
        self._fresh: list[dict[str, Any]] = []
        """Log-probabilities of tokens whose text no event has yet."""
        self._begins = False
        """Whether text begins behind an item of another kind."""
        self._said: dict[str, list[dict[str, Any]]] = {}
        """Log-probabilities of all tokens of each item's text."""

    def whole(self) -> dict[str, Any]:
        return self._events.whole()

    def read(self, event: Event) -> list[dict[str, Any]]:
        made = self._events.read(event)
        entries = [logprob_entry(each) for each in event.logprobs] if isinstance(event, gateway_pb2.Delta) else []
        self._fresh += entries
        for each in made:
            self._add(each)
            if each["type"] == "response.output_item.done" and each["item"]["type"] != "message":
                self._fresh, self._begins = entries, True
        if isinstance(event, gateway_pb2.Finished):
            self._fill(self._events.whole()["output"])
        return made

    def _add(self, made: dict[str, Any]) -> None:
        kind = made["type"]
        if kind == _TEXT_DELTA:
            if self._begins:
                self._fresh, self._begins = _last_of(self._fresh, len(made["delta"].encode())), False
            made["logprobs"], self._fresh = self._fresh, []
            self._said.setdefault(made["item_id"], []).extend(made["logprobs"])
        elif kind == "response.output_text.done":
            self._said.setdefault(made["item_id"], []).extend(self._fresh)
            self._fresh = []
            made["logprobs"] = self._said[made["item_id"]]
        elif kind == "response.content_part.done" and made["part"]["type"] == "output_text":
            made["part"]["logprobs"] = self._said.get(made["item_id"], [])
        elif kind.endswith(".delta"):  # of a call or of reasoning, whose tokens are no text's
            self._fresh = []
        elif kind == "response.output_item.done":
            self._fill([made["item"]])

    def _fill(self, items: Iterable[dict[str, Any]]) -> None:
        for item in items:
            for part in item["content"] if item["type"] == "message" else ():
                part["logprobs"] = self._said.get(item["id"], [])


def _last_of(entries: Sequence[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """The last tokens, as many as have so many bytes of text; special ones have none."""
    at = len(entries)
    while at and size > 0:
        at -= 1
        size -= len(entries[at]["bytes"])
    return list(entries[at:])


async def input_items(session: str, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation up to a response as its input items, in order."""
    found = await in_pieces(lambda each: _items_of(session, *each), enumerate(messages))
    return [item for items in found for item in items]


def _items_of(session: str, place: int, message: dict[str, Any]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    id, role, texts = f"{INPUT_PREFIX}{session}_{place}", message["role"], texts_in(message.get("content"))
    if role == "tool":
        call, output = message.get("tool_call_id") or "", said_in(message.get("content"))
        item = {"type": "function_call_output", "call_id": call, "output": output, "status": "completed"}
        return [{"id": id, **item}]
    if reasoning := message.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": reasoning}
        known = {"id": f"{REASONING_PREFIX}{session}_{place}", "type": "reasoning", "status": "completed"}
        items.append({**known, "summary": [], "content": [part]})
    if any(texts) or not message.get("tool_calls"):
        own: dict[str, Any] = {"type": "input_text"}
        if role == "assistant":
            own = {"type": "output_text", "annotations": []}
        content = [own | {"text": text} for text in texts or [""]]
        items.append({"id": id, "type": "message", "role": role, "status": "completed", "content": content})
    for number, call in enumerate(message.get("tool_calls") or ()):
        arguments = _arguments(call["function"]["arguments"])
        items.append(
            {
                "id": f"{id}_{number}",
                "type": "function_call",
                "call_id": call.get("id") or "",
                "name": call["function"]["name"],
                "arguments": arguments,
                "status": "completed" if are_whole(arguments) else "incomplete",
            }
        )
    return items


def page_of(items: Sequence[dict[str, Any]], limit: int, after: str) -> dict[str, Any]:
    """So many items behind the one with the id `after`, or the first ones, as a list of OpenAI's. Raises NotFound for
    an id that none of them has."""
    ids = [item["id"] for item in items]
    if after and after not in ids:
        raise NotFound("There is no such item; send an id of the page before.", reason="NO_ITEM", field="after")
    rest = items[ids.index(after) + 1 :] if after else items
    page = rest[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, "has_more": len(rest) > limit, **ends}


def _arguments(value: Any) -> str:
    """The arguments of a call as their text; what a response of an earlier version keeps is parsed."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
