"""A conversation from a request, as chat templates read it."""

from __future__ import annotations

import json
from typing import Any

from slipstream.errors import TOO_MANY_ITEMS, InvalidArgument
from slipstream.v1 import gateway_pb2

MAX_MESSAGES = 10_000


def read_chat(chat: gateway_pb2.Chat) -> tuple[list[dict[str, Any]], list[Any], dict[str, Any]]:
    """Messages, tools and further variables of the template. Raises InvalidArgument for too many messages, and for JSON
    that cannot be read or is not of the right kind."""
    if len(chat.messages) > MAX_MESSAGES:
        raise InvalidArgument(
            f"The conversation has {len(chat.messages)} messages; send at most {MAX_MESSAGES}.",
            reason=TOO_MANY_ITEMS,
            field="chat.messages",
            numbers={"items": len(chat.messages), "limit": MAX_MESSAGES},
        )
    messages = [
        {"role": each.role, "content": each.content, **_parsed("fields_json", each.fields_json, dict)}
        for each in chat.messages
    ]
    tools = _parsed("tools_json", chat.tools_json, list)
    return messages, tools, _parsed("template_variables_json", chat.template_variables_json, dict)


def _parsed(name: str, text: str, kind: type[dict[str, Any]] | type[list[Any]]) -> Any:
    """The value in a JSON text; an empty text is an empty value."""
    try:
        value = json.loads(text) if text else kind()
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{name} is not JSON; send what json.dumps writes.", reason="NOT_JSON") from error
    if not isinstance(value, kind):
        wanted = "an object" if kind is dict else "a list"
        raise InvalidArgument(f"{name} must be {wanted} in JSON.", reason="NOT_JSON")
    return value
