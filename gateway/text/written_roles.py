"""Whose texts a chat template writes, and in which form it takes them: as a text, or as a list of parts, as in
`[{"type": "text", "text": "Hi"}]`. Found out by rendering a few messages once.

A template that was written for texts alone fails at a list, or writes it as Python shows it; one that was written for
lists alone leaves out texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.text.chat_messages import Message, said_in
from slipstream.errors import SlipstreamError

TURNS = 4
"""Answers of the conversation that is tried: some templates write the last turns alone."""
SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@dataclass(frozen=True, slots=True)
class WrittenRoles:
    texts: frozenset[str] = frozenset()
    """Roles whose messages are written if their content is a text."""
    parts: frozenset[str] = frozenset()
    """Roles of which each part is written if their content is a list."""

    @property
    def counted(self) -> frozenset[str]:
        """Those of users and the application: what assistants and tools say may be left out, as reasoning is, or
        written anew."""
        return (self.texts | self.parts) & {USER, SYSTEM}


def written_roles(render: Callable[[dict[str, Any]], str], *, tools: bool) -> WrittenRoles:
    """`render`: writes a conversation with these variables. `tools`: whether the requests have tools."""
    given = [_TOOL] if tools else None
    texts = _written(_conversations(str, given), render, lambda text, content: content in text)
    return WrittenRoles(texts, _written(_conversations(_parts, given), render, _are_in))


def with_fitting_content(message: Message, written: WrittenRoles) -> Message:
    """The message, its content in a form that the template writes: a list of texts as one text, with a line for each,
    where it does not write them all, and a text as a list where it writes no text."""
    content, role = message.get("content"), message.get("role")
    if not isinstance(role, str):  # the template says what it makes of that
        return message
    if isinstance(content, list) and all(map(_is_text, content)) and role not in written.parts:
        return {**message, "content": said_in(content)}
    if isinstance(content, str) and role in written.parts and role not in written.texts:
        return {**message, "content": [_part(content)]}
    return message


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _parts(digits: str) -> list[dict[str, str]]:
    return [_part(digits[:3]), _part(digits[3:])]


def _are_in(text: str, parts: list[dict[str, str]]) -> bool:
    """Whether the texts stand there, and not the list."""
    return re.search(r"[^{}\[\]]*".join(part["text"] for part in parts), text) is not None


def _conversations(content: Callable[[str], Any], tools: list[dict[str, Any]] | None) -> Iterator[dict[str, Any]]:
    """No content, and no second half of one, is in another's."""
    said = [
        {"role": role, "content": content(f"{100_103 + 20 * turn + (role == USER)}")}
        for turn in range(TURNS)
        for role in (USER, ASSISTANT)
    ]
    asked, first = {"role": USER, "content": content("200203")}, {"role": SYSTEM, "content": content("300307")}
    yield {"messages": [*said, asked], "tools": tools}
    yield {"messages": [first, *said, asked], "tools": tools}
    calling = {"role": ASSISTANT, "content": "", "tool_calls": [_CALL]}
    result = {"role": TOOL, "content": content("400409"), "tool_call_id": _CALL["id"], "name": "f"}
    yield {"messages": [asked, calling, result], "tools": [_TOOL]}


def _written(
    conversations: Iterator[dict[str, Any]], render: Callable[[dict[str, Any]], str], is_in: Callable[[str, Any], bool]
) -> frozenset[str]:
    written, missing = set[str](), set[str]()
    for conversation in conversations:
        try:
            text = render(conversation)
        except SlipstreamError:  # it refuses such a conversation
            continue
        for message in conversation["messages"]:
            if message["content"]:
                (written if is_in(text, message["content"]) else missing).add(message["role"])
    return frozenset(written - missing)
