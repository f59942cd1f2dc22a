"""A conversation from a request, as chat templates read it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import TOO_MANY_ITEMS, InvalidArgument
from slipstream.v1 import gateway_pb2

Message = Mapping[str, Any]
"""One message of a conversation, as OpenAI's API writes it: `role`, `content` and what else the template reads."""
MAX_MESSAGES = 10_000
CONTINUE, GENERATE = "continue_final_message", "add_generation_prompt"
"""Variables of a template that say how a prompt ends: the answer goes on with the last message, or a message begins."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning, in clients and in templates."""
_MARK_DIGITS = 20


def check_messages(chat: gateway_pb2.Chat) -> None:
    """Raises InvalidArgument for too many messages."""
    if len(chat.messages) > MAX_MESSAGES:
        raise InvalidArgument(
            f"The conversation has {len(chat.messages)} messages; send at most {MAX_MESSAGES}.",
            reason=TOO_MANY_ITEMS,
            field="chat.messages",
            numbers={"items": len(chat.messages), "limit": MAX_MESSAGES},
        )


def read_chat(chat: gateway_pb2.Chat) -> tuple[list[dict[str, Any]], list[Any], dict[str, Any]]:
    """Messages, tools and further variables of the template. Raises InvalidArgument for too many messages, and for JSON
    that cannot be read or is not of the right kind."""
    check_messages(chat)
    messages = [
        {"role": each.role, "content": each.content, **_parsed("fields_json", each.fields_json, dict)}
        for each in chat.messages
    ]
    tools = _parsed("tools_json", chat.tools_json, list)
    return messages, tools, _parsed("template_variables_json", chat.template_variables_json, dict)


def goes_on(variables: Mapping[str, Any]) -> bool:
    """Whether what is written behind a conversation goes on from its text; else a message begins there."""
    return bool(variables.get(CONTINUE)) or not variables.get(GENERATE, True)


def chat_goes_on(chat: gateway_pb2.Chat) -> bool:
    """`goes_on` of a client's variables; False where they cannot be read. Parses only what may say so."""
    text = chat.template_variables_json
    if not any(part in text for part in (CONTINUE, GENERATE, "\\u")):
        return False
    try:
        return goes_on(_parsed("template_variables_json", text, dict))
    except InvalidArgument:
        return False


def as_template_reads(message: Message) -> dict[str, Any]:
    """The message without what is None, and with its reasoning under all names that templates know."""
    said = {name: value for name, value in message.items() if value is not None}
    reasoning = next((said[name] for name in REASONING if name in said), None)
    return said if reasoning is None else {"thinking": reasoning, **said, "reasoning_content": reasoning}


def with_written_arguments(messages: Sequence[Message]) -> list[Message] | None:
    """The messages with the arguments of calls as texts of JSON, as OpenAI's API has them; None where they are, or are
    no JSON."""
    written, changed = list[Message](), False
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list) and any(isinstance(_function(call).get("arguments"), dict) for call in calls):
            try:
                changed, message = True, {**message, "tool_calls": [written_call(call) for call in calls]}
            except (TypeError, ValueError, RecursionError):
                return None
        written.append(message)
    return written if changed else None


def written_call(call: Any) -> Any:
    """The call with its arguments, if these are an object, as a text of JSON."""
    function = _function(call)
    if not isinstance(function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _function(call: Any) -> Mapping[str, Any]:
    found = call.get("function") if isinstance(call, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def texts_in(content: Any) -> list[str]:
    """The texts of a message's content: its own, or those of its parts."""
    if isinstance(content, list):
        found = [part.get("text") for part in content if isinstance(part, Mapping)]
        return [text for text in found if isinstance(text, str)]
    return [content] if isinstance(content, str) else []


def said_in(content: Any) -> str:
    """The text of a message's content: a line for each part."""
    return "\n".join(texts_in(content))


class UnfinishedMessage:
    """The last message of a conversation, with a mark at the end of its text: what the template puts behind the mark is
    left out, whatever the message says."""

    def __init__(self, message: Message, field: str, template: str) -> None:
        """`field`: `content`, or one of its reasoning. Raises InvalidArgument where the message has no text there, or
        the template's source does not name it."""
        self._mark = "".join(secrets.choice("0123456789") for _ in range(_MARK_DIGITS))
        content = message.get(field)
        blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
        last = next((block for block in reversed(blocks) if "text" in block), {})
        text = last.get("text") if isinstance(content, list) else content
        if not isinstance(text, str):
            raise InvalidArgument(
                f"continue_final_message needs a last message with a text in {field}.",
                reason="CHAT_REFUSED",
                field="chat.messages",
            )
        self._text = text
        marked = f"{text}{self._mark} "  # the space shows whether the template leaves space at the ends of texts
        if isinstance(content, list):
            marked_content: Any = [block | {"text": marked} if block is last else block for block in content]
        else:
            marked_content = marked
        same = [name for name in REASONING if message.get(name) == text] if field in REASONING else [field]
        if not any(name in template for name in same):
            raise InvalidArgument(
                f"The model's chat template does not read {field}, which continue_final_message goes on with.",
                reason="CHAT_REFUSED",
                field="chat.messages",
            )
        self.message: dict[str, Any] = {**message, **dict.fromkeys(same, marked_content)}

    def cut(self, rendered: str) -> str:
        """The rendered text up to the end of the message's. Raises InvalidArgument where the template changes it."""
        at = rendered.rfind(self._mark)
        if at < 0 or self._text.strip() not in rendered:
            raise InvalidArgument(
                "The model's chat template leaves out the last message, or parts of it, which continue_final_message "
                "goes on with; send another one.",
                reason="CHAT_REFUSED",
                field="chat.messages",
            )
        kept = rendered[:at]
        return kept if rendered[at + _MARK_DIGITS :].startswith(" ") else kept.rstrip()


def _parsed(name: str, text: str, kind: type[dict[str, Any]] | type[list[Any]]) -> Any:
    """The value in a JSON text; an empty text is an empty value."""
    try:
        value = json.loads(text) if text else kind()
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"{name} is not JSON; send what json.dumps writes.", reason="NOT_JSON", field=f"chat.{name}"
        ) from error
    if not isinstance(value, kind):
        wanted = "an object" if kind is dict else "a list"
        raise InvalidArgument(f"{name} must be {wanted} in JSON.", reason="NOT_JSON", field=f"chat.{name}")
    return value
