"""A conversation as the model was trained to read it: the model's chat template, rendered in Jinja's sandbox.

The set-up is that of transformers' `apply_chat_template`: the same blocks, filters and globals. Besides, rendering is
bounded: a template takes a limited number of steps and writes a limited number of bytes. A template comes with the
files of a model; none is ever taken from a request.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from gateway.text.chat_messages import (
    CONTINUE,
    GENERATE,
    Message,
    UnfinishedMessage,
    as_template_reads,
    with_written_arguments,
)
from gateway.text.written_roles import WrittenRoles, with_fitting_content, written_roles
from slipstream.errors import FIELD_INVALID, FIELDS_CONFLICT, FailedPrecondition, InvalidArgument
from slipstream.tokenizer.chat_template_source import ChatTemplateSource

MAX_STEPS = 1_000_000
"""Calls and passes through loops of one rendering; a conversation of 10,000 messages takes a few of each."""
TRIED_STEPS = 10_000
"""Steps of a conversation of a few messages, with which it is found out what a template writes."""
MAX_REPEATED = 1_000_000
"""Most characters or elements that multiplication makes; most bits of a power."""

_steps: ContextVar[int] = ContextVar("steps")
"""Steps that the rendering in this context has taken."""
NAMED = "chat_template"
"""Variable that names one of the model's templates."""


class ChatTemplate:
    """The template of one model."""

    def __init__(self, source: ChatTemplateSource | None, max_bytes: int) -> None:
        self.given = source
        self.max_bytes = max_bytes
        self._compiled: dict[str, Template] = {}
        self._written: dict[tuple[str, bool], WrittenRoles] = {}
        """Roles that are written, by source of the template and whether there are tools."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer, beside the model's own end-of-text tokens."""
        return () if self.given is None else tuple(self.given.stops)

    @property
    def fingerprint(self) -> str:
        return "" if self.given is None else self.given.fingerprint

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the model answers. `tools`: definitions of functions in JSON schema. `variables`: what else the
        template reads, such as `enable_thinking`; with `continue_final_message` the text ends with the last message's,
        or that of its field of this name, which the model goes on with, with a false `add_generation_prompt` it ends
        behind that message; `chat_template` names one of the model's templates.

        Raises FailedPrecondition for a model without a usable template, InvalidArgument for messages that the template
        refuses or that become too long. Takes time: not for the event loop.
        """
        if not messages:
            raise InvalidArgument(
                "The conversation is empty; send at least one message.", reason="EMPTY_PROMPT", field="chat.messages"
            )
        variables = dict(variables or {})
        source = self.source(tools=bool(tools), name=variables.pop(NAMED, None))
        unfinished, begins = variables.pop(CONTINUE, None), variables.pop(GENERATE, None)
        if unfinished and begins:
            raise InvalidArgument(
                "continue_final_message and add_generation_prompt exclude each other; send one.",
                reason=FIELDS_CONFLICT,
                field="chat.template_variables_json",
            )
        documents = variables.get("documents")
        if documents is not None and not _are_objects(documents):
            raise InvalidArgument(
                "documents is a list of objects, with title and text.", reason=FIELD_INVALID, field="documents"
            )
        written = self._written_roles(source, tools=bool(tools))
        read = [with_fitting_content(as_template_reads(each), written) for each in messages]
        last = None
        if unfinished:
            last = UnfinishedMessage(read[-1], unfinished if isinstance(unfinished, str) else "content", source)
            read[-1] = last.message
        given = {
            **variables,
            "messages": read,
            "tools": list(tools) or None,
            "documents": documents,
            GENERATE: not unfinished if begins is None else begins,
        }
        text = self._rendered(source, given)
        return text if last is None else last.cut(text)

    def written_roles(self, *, tools: bool, name: Any = None) -> WrittenRoles:
        """Roles whose texts the template for these requests writes. Raises what `source` raises."""
        return self._written_roles(self.source(tools=tools, name=name), tools=tools)

    def _written_roles(self, source: str, *, tools: bool) -> WrittenRoles:
        key = source, tools
        if key not in self._written:
            usual = {"documents": None, GENERATE: True}
            self._written[key] = written_roles(
                lambda given: self._rendered(source, usual | given, most=TRIED_STEPS), tools=tools
            )
        return self._written[key]

    def _rendered(self, source: str, given: dict[str, Any], most: int | None = None) -> str:
        """`most`: steps; None: as many as a rendering may take."""
        assert self.given is not None
        template = self._template(source)
        token = _steps.set(0 if most is None else MAX_STEPS - most)
        try:
            return self._joined(template.generate({**self.given.special_tokens, **given}))
        except InvalidArgument:
            raise
        except Exception as error:  # a template is a program: it may fail in any way
            written = with_written_arguments(given["messages"])
            if isinstance(error, TypeError) and written is not None:  # some write them as they come from OpenAI
                return self._rendered(source, given | {"messages": written}, most)
            raise InvalidArgument(
                f"The model's chat template does not take this conversation: {error}. Change its messages.",
                reason="CHAT_REFUSED",
                field="chat.messages",
            ) from error
        finally:
            _steps.reset(token)

    def _joined(self, blocks: Iterable[str]) -> str:
        written, size = list[str](), 0
        for block in blocks:
            size += len(block.encode())
            if size > self.max_bytes:
                raise InvalidArgument(
                    f"The conversation has more than {self.max_bytes} bytes in the model's template; shorten it.",
                    reason="TEXT_TOO_LONG",
                )
            written.append(block)
        return "".join(written)

    def source(self, *, tools: bool, name: Any = None) -> str:
        """Jinja source for a request with tools, or without, or of the model's template of a name. Raises
        FailedPrecondition for a model without one, InvalidArgument for another name."""
        if self.given is None:
            raise FailedPrecondition(
                "The model has no chat template; send a prompt instead, or let the operator name a template with "
                "GATEWAY_CHAT_TEMPLATE (`slipstream serve --chat-template chatml`, or a file).",
                reason="CHAT_TEMPLATE_MISSING",
            )
        return self.given.chosen(tools=tools) if name is None else self.given.named(name)

    def _template(self, source: str) -> Template:
        if source not in self._compiled:
            self._compiled[source] = _compile(source)
        return self._compiled[source]


def _are_objects(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, Mapping) for each in values)


def _compile(source: str) -> Template:
    environment = _Sandbox()
    try:
        tree = environment.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.iter = _counted_node(loop.iter)
            if loop.recursive:
                for call in loop.find_all(nodes.Call):
                    if isinstance(call.node, nodes.Name) and call.node.name == "loop":
                        call.args = [_counted_node(each) for each in call.args]
        tree.set_environment(environment)
        return environment.from_string(tree)
    except Exception as error:  # Jinja's own errors, and Python's where the program it made is none
        where = f"line {error.lineno}: {error.message}" if isinstance(error, TemplateSyntaxError) else f"{error}"
        raise FailedPrecondition(
            f"The model's chat template cannot be read ({where}); name another one with "
            "GATEWAY_CHAT_TEMPLATE (`slipstream serve --chat-template FILE`).",
            reason="CHAT_TEMPLATE_BROKEN",
        ) from error


def _counted_node(values: nodes.Node) -> nodes.Expr:
    return nodes.Filter(values, "counted", [], [], None, None, lineno=values.lineno)


class _Generation(Extension):
    """`{% generation %}`: marks what the model wrote, for training; here its content stands as it is. A block with a
    caller, as in transformers: what stands in it sees the same names, and no `break` leaves it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("written"), [], [], body, lineno=line)

    def written(self, caller: Macro) -> str:
        """Returns the text of the block."""
        return caller()


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters |= {"tojson": _to_json, "counted": _counted}
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        _take(1)
        return super().call(context, called, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            sizes = [len(each) if isinstance(each, (str, list, tuple)) else each for each in (left, right)]
            size = 0 if isinstance(left, (int, float)) and isinstance(right, (int, float)) else sizes[0] * sizes[1]
        else:
            size = abs(right) * (left.bit_length() if isinstance(left, int) else 1)
        if size > MAX_REPEATED:
            raise SecurityError(f"{operator} makes more than {MAX_REPEATED} characters")
        return super().call_binop(context, operator, left, right)


class _Dict:
    """`dict` without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """`namespace` that takes no name with an underscore in front: such ones lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name with an underscore in front, such as {name}")


def _take(steps: int) -> None:
    taken = _steps.get() + steps
    if taken > MAX_STEPS:
        raise SecurityError(f"it takes more than {MAX_STEPS} steps")
    _steps.set(taken)


@pass_context  # a template's own constants too are counted when it is rendered, not when it is compiled
def _counted(_: Context, values: Iterable[Any]) -> Iterator[Any]:
    """Yields the elements of a loop; each element is a step, when it comes: an iterator that a loop leaves goes on in
    the next one."""
    return map(_step, iter(values))


def _step(value: Any) -> Any:
    _take(1)
    return value


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
