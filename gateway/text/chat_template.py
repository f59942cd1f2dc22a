"""The model's chat template: Jinja in a sandbox, rendered as the library `transformers` renders it.

A template is code that came with a model: it can neither reach Python's objects nor run, or write, without bound.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound
from slipstream.tokenizer.vocabulary import tokenizer_file

RENDER_S = 2.0
"""Most seconds of one rendering."""
MOST_TEMPLATE_BYTES = 1 << 20
TOOL_USE = "tool_use"
"""Name of the template for requests with tools, in a model that has several."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MOST_FACTOR = 1 << 20
_DEADLINE: ContextVar[float] = ContextVar("deadline")

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """The constructor raises FailedPrecondition for a template that cannot be compiled."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], most_characters: int) -> None:
        """`sources`: by name, at least `default`."""
        self._special_tokens = dict(special_tokens)
        self._most = most_characters
        self.source = sources["default"]
        try:
            self._templates = {name: _environment().from_string(source) for name, source in sources.items()}
        except (jinja2.TemplateError, RecursionError) as error:
            raise FailedPrecondition(
                f"The chat template cannot be compiled: {error}; give another one with GATEWAY_CHAT_TEMPLATE.",
                reason="CHAT_TEMPLATE",
            ) from error

    async def render(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, ending where the model's answer begins. `more`: further variables of the template. Raises
        InvalidArgument for messages that the template refuses or that take too long."""
        return await asyncio.to_thread(self._render, messages, tools, more or {})

    def _render(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None, more: Mapping[str, Any]) -> str:
        template = self._templates.get(TOOL_USE if tools else "default", self._templates["default"])
        plain = [_plain(message) for message in messages]
        variables = {**self._special_tokens, "add_generation_prompt": True, **more}
        variables |= {"messages": plain, "tools": tools, "documents": None}
        _DEADLINE.set(time.monotonic() + RENDER_S)
        parts, size = [], 0
        try:
            for part in template.generate(**variables):
                _check_time()
                size += len(part)
                if size > self._most:
                    raise InvalidArgument(
                        f"The chat is above {self._most} characters; shorten it.", reason="TEXT_TOO_LONG"
                    )
                parts.append(part)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            text = str(error) if isinstance(error, jinja2.TemplateError) else type(error).__name__
            raise InvalidArgument(
                f"The chat template refuses these messages: {text}.", reason="CHAT_TEMPLATE"
            ) from error
        return "".join(parts)


def template_sources(name: str, given: str) -> tuple[dict[str, str], dict[str, str]]:
    """By name the template texts of a tokenizer, a folder or a hub id, and by name its special tokens. `given`: a file
    whose template replaces the tokenizer's. Both are empty where there are none. Raises NotFound for a missing file."""
    settings = _settings(name)
    sources = {"default": _text(Path(given))} if given else _own_sources(name, settings)
    special = {key: _token(settings[key]) for key in _SPECIAL if settings.get(key)}
    return sources, special


def template_hash(sources: Mapping[str, str]) -> str:
    """SHA-256 in hex of the default template; empty without one."""
    return hashlib.sha256(sources["default"].encode()).hexdigest() if "default" in sources else ""


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without the fields that are null, and with its reasoning under the names that templates know."""
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = plain.get("reasoning_content", plain.get("thinking", plain.get("reasoning")))
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _own_sources(name: str, settings: Mapping[str, Any]) -> dict[str, str]:
    try:
        return {"default": _text(tokenizer_file(name, "chat_template.jinja"))}
    except NotFound:
        own = settings.get("chat_template")
    if isinstance(own, str):
        return {"default": own}
    named = {each["name"]: each["template"] for each in own or ()}
    return named if "default" in named else {}


def _settings(name: str) -> dict[str, Any]:
    try:
        content = json.loads(_text(tokenizer_file(name, "tokenizer_config.json")))
    except NotFound:
        return {}
    except ValueError as error:
        raise FailedPrecondition(
            f"tokenizer_config.json of {name} is not JSON: {error}", reason="CONFIG_BROKEN"
        ) from error
    return content if isinstance(content, dict) else {}


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > MOST_TEMPLATE_BYTES:
            raise FailedPrecondition(f"{file} is above {MOST_TEMPLATE_BYTES} bytes.", reason="CHAT_TEMPLATE")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NotFound(f"{file} cannot be read: {error}.", reason="FILE_MISSING") from error


def _token(value: Any) -> str:
    """The text of a special token, which is written as a text or as an object."""
    return str(value.get("content", "")) if isinstance(value, dict) else str(value)


class _Generation(jinja2.ext.Extension):
    """The tag `generation`, which marks the model's own text for training: rendered as its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, in which every turn of a loop and every call of a macro checks the time."""

    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        repeated: list[nodes.For | nodes.Macro] = [*template.find_all(nodes.For), *template.find_all(nodes.Macro)]
        for node in repeated:
            check = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(check).set_lineno(node.lineno, override=True))
        template.set_environment(self)
        return template

    @staticmethod
    def check_time() -> None:
        _check_time()

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [abs(side) if isinstance(side, (int, float)) else len(side) for side in (left, right)]
        if max(sizes) > _MOST_FACTOR or (operator == "**" and sizes[1] > 64) or sizes[0] * sizes[1] > _MOST_FACTOR:
            raise SecurityError(f"the result of {operator} would be too large")
        return super().call_binop(context, operator, left, right)


class _Dict:
    """What templates know as `dict`: a function, whose attributes lead nowhere."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict(*arguments, **named)


class _Namespace(Namespace):
    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError("a namespace has no names that begin with _")
        super().__setitem__(name, value)


def _environment() -> _Environment:
    made = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return made


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As it stands: Jinja's own filter would escape what HTML needs."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check_time() -> None:
    if time.monotonic() > _DEADLINE.get():
        raise InvalidArgument(
            f"The chat template did not end within {RENDER_S:g} s; shorten the chat.", reason="CHAT_TIME"
        )
