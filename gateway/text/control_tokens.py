"""Control tokens in what a request says are text: only the model's chat template writes control tokens.

A mark is put into every control token of a request's strings before the template is rendered, and the rendered text is
encoded in pieces, which end where a mark was. The template's own control tokens are whole, so they stay what they are.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from slipstream.errors import InvalidArgument

_MARK_DIGITS = 20
_APPLICATION = frozenset({"system", "developer", "assistant"})
"""Roles of the application and its model, which write markup such as `<think>`. Users and tools write plain text."""


class ControlTokens:
    """The added tokens of a tokenizer that are special, or that the source of a template names."""

    def __init__(self, encoder: Tokenizer, source: str) -> None:
        added: Iterable[AddedToken] = encoder.get_added_tokens_decoder().values()
        found = [each for each in added if each.content.strip() and (each.special or each.content in source)]
        self._everybody = _Breaker(encoder, found)
        self._application = _Breaker(encoder, [each for each in found if each.special or not _is_markup(each.content)])

    def mark(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], variables: Mapping[str, Any]
    ) -> tuple[str, list[Any], list[Any], dict[str, Any]]:
        """The mark, and the three with the mark in every control token. Raises InvalidArgument for a control token that
        only the tokenizer's normalisation makes."""
        mark = "".join(secrets.choice("0123456789") for _ in range(_MARK_DIGITS))  # no filter of a template changes it
        said = [self._marked(message, mark) for message in messages]
        return mark, said, self._everybody.marked(list(tools), mark), self._application.marked(variables, mark)

    def _marked(self, message: Mapping[str, Any], mark: str) -> dict[str, Any]:
        """Marks a message. Fields that are not plain, such as the arguments of a call, are never markup."""
        role = message.get("role")  # a client of gRPC may send anything as one
        own = isinstance(role, str) and role in _APPLICATION
        return {
            name: (self._application if own and _is_text(name, value) else self._everybody).marked(value, mark)
            for name, value in message.items()
        }


class _Breaker:
    def __init__(self, encoder: Tokenizer, tokens: Sequence[AddedToken]) -> None:
        self._tokens = [token.content for token in tokens if len(token.content) > 1]
        self._firsts = {token[0] for token in self._tokens}
        self._begins = {token[:size] for token in self._tokens for size in range(1, len(token))}
        self._longest = max(map(len, self._tokens), default=0)
        self._normalise = encoder.normalizer.normalize_str if encoder.normalizer else None
        self._normal = [self._normalise(token.content) for token in tokens if token.normalized and self._normalise]

    def marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._broken(value, mark)
        if isinstance(value, Mapping):
            return {self.marked(name, mark): self.marked(each, mark) for name, each in value.items()}
        return [self.marked(each, mark) for each in value] if isinstance(value, list | tuple) else value

    def _broken(self, text: str, mark: str) -> str:
        if any(first in text for first in self._firsts):
            for token in self._tokens:
                while token in text:  # again, for one that overlaps itself
                    text = text.replace(token, token[0] + mark + token[1:])
            end = len(text.rstrip())  # templates may cut off the space behind it
            if self._may_go_on(text[:end]):
                text = text[:end] + mark + text[end:]
        if self._normalise and any(token in self._normalise(text) for token in self._normal):
            raise InvalidArgument(
                "A message holds a control token of the model in another way of writing; leave it out.",
                reason="CONTROL_TOKEN",
                field="chat.messages",
            )
        return text

    def _may_go_on(self, text: str) -> bool:
        """Whether the text ends as a control token begins: what the template puts behind it could complete it."""
        return any(text[-size:] in self._begins for size in range(1, min(self._longest, len(text) + 1)))


def _is_text(name: str, value: Any) -> bool:
    return isinstance(value, str) or name == "content"


def _is_markup(token: str) -> bool:
    """Whether a token looks like `<think>` or `</tool_call>`."""
    return token[0] == "<" and token[-1] == ">" and token[1:-1].removeprefix("/").replace("_", "").isalnum()
