"""The arguments of calls that come back in a conversation: any text, as OpenAI's API has it, for the length or a stop
string may have cut what the model wrote."""

from __future__ import annotations

import json
import math
import re
from typing import Any

INVALID = "INVALID_JSON"
"""Key of arguments that are no JSON object: Anthropic's documentation has it (fine-grained tool streaming)."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def are_whole(arguments: str) -> bool:
    """Whether a call's arguments are at their end."""
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    return True


def as_object(arguments: str) -> dict[str, Any]:
    """The arguments as templates read them, and as Anthropic's clients do: an object that can be written as JSON again.
    What is no such object is wrapped, so that the conversation can go on with it."""
    try:
        value = _DECODER.decode(arguments)
        if _SURROGATE.search(arguments):  # half a character cannot be written, in a key or in a value
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID: arguments}


def with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """The message of a chat with the arguments of its calls as objects."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_object(call) for call in calls]} if calls else message


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    given = function["arguments"]
    # What a response of an earlier version keeps is parsed.
    return {**call, "function": {**function, "arguments": as_object(given)}} if isinstance(given, str) else call


def _finite(number: str) -> float:
    """Raises ValueError for a number that only Python's JSON can write."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError("not a number of JSON")
    return value


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)
