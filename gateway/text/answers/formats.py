"""The formats in which families of models write reasoning and calls of tools: which one a chat template shows, and the
reader of each."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.text.answers import harmony, json_calls, marked_calls, pythonic_calls, xml_calls
from gateway.text.answers.argument_grammar import writes
from gateway.text.answers.reader import AnswerReader, CallBegan, PlainReader, TextReader, Thoughts
from gateway.text.chat_messages import REASONING, written_call
from slipstream.errors import FailedPrecondition

NONE = "none"
"""Reads an answer without tools, or without reasoning."""
AUTO = "auto"
JSON = "json"
"""Format of a forced call where the model's format is not known, or cannot hold it to the tool's schema."""
UNKNOWN = "unknown"
"""Nothing is read as a call."""
HERMES, LLAMA, MISTRAL, MISTRAL_ARGS = "hermes", "llama3_json", "mistral", "mistral_args"
QWEN_CODER, PYTHONIC, GLM = "qwen3_coder", "pythonic", "glm45"
DEEPSEEK_V3, DEEPSEEK_V31, KIMI, HARMONY = "deepseek_v3", "deepseek_v31", "kimi_k2", "harmony"
THINK, MISTRAL_THINK, SEED_THINK = "think", "mistral", "seed"


@dataclass(frozen=True, slots=True)
class CallFormat:
    shown: tuple[str, ...]
    """Strings that every chat template of this format contains."""
    marks: tuple[str, ...] = ()
    """Strings that may be control tokens, which a text has not unless it is asked for. The first begins the calls."""
    reader: Callable[..., TextReader] = TextReader
    id: str = "call_"
    """Prefix of ids of calls; empty: nine letters and digits."""


_MISTRAL_MARKS = (json_calls.TOOL_CALLS, json_calls.CALL_ID, json_calls.ARGS)
_DEEPSEEK, _KIMI = marked_calls.DeepSeekReader, marked_calls.KimiReader
_DEEPSEEK_MARKS = (_DEEPSEEK.CALLS, _DEEPSEEK.CALL, _DEEPSEEK.JSON, _DEEPSEEK.CALL_END, _DEEPSEEK.CALLS_END)
_KIMI_MARKS = (_KIMI.CALLS, _KIMI.CALL, _KIMI.JSON, _KIMI.CALL_END, _KIMI.CALLS_END)
_XML_MARKS = (json_calls.BEGIN, json_calls.END)
_GLM_MARKS = (xml_calls.KEY, xml_calls.KEY_END, xml_calls.VALUE, xml_calls.VALUE_END)
_HARMONY_MARKS = (harmony.START, harmony.CHANNEL, harmony.MESSAGE, harmony.CONSTRAIN, harmony.END, harmony.CALL)
CALLS: Mapping[str, CallFormat] = {
    HARMONY: CallFormat((harmony.CHANNEL, harmony.MESSAGE), _HARMONY_MARKS, harmony.HarmonyReader),
    KIMI: CallFormat((_KIMI.CALL,), _KIMI_MARKS, _KIMI),
    DEEPSEEK_V3: CallFormat((_DEEPSEEK.CALL, "```json"), _DEEPSEEK_MARKS, _DEEPSEEK),
    DEEPSEEK_V31: CallFormat((_DEEPSEEK.CALL,), _DEEPSEEK_MARKS, _DEEPSEEK),
    GLM: CallFormat((xml_calls.KEY, json_calls.BEGIN), (*_XML_MARKS, *_GLM_MARKS), xml_calls.GlmReader),
    QWEN_CODER: CallFormat(
        (json_calls.BEGIN, xml_calls.FUNCTION, xml_calls.PARAMETER), _XML_MARKS, xml_calls.QwenCoderReader
    ),
    MISTRAL_ARGS: CallFormat((json_calls.TOOL_CALLS, json_calls.ARGS), _MISTRAL_MARKS, json_calls.MistralReader, ""),
    MISTRAL: CallFormat((json_calls.TOOL_CALLS,), _MISTRAL_MARKS, json_calls.MistralReader, ""),
    HERMES: CallFormat((json_calls.BEGIN,), _XML_MARKS, json_calls.HermesReader),
    PYTHONIC: CallFormat(
        ("[func_name1(",), (pythonic_calls.PYTHON_START, pythonic_calls.PYTHON_END), pythonic_calls.PythonicReader
    ),
    LLAMA: CallFormat(("<|python_tag|>",), (json_calls.PYTHON_TAG,), json_calls.JsonCallsReader),
}
"""In the order in which templates are looked at: the mark of one format may stand in the template of another."""
_LLAMA_32 = ("Environment: ipython", '"parameters"')
"""Marks in Llama 3.2's template instead of the tag."""
_OTHERS: Mapping[str, CallFormat] = {
    NONE: CallFormat(()),
    UNKNOWN: CallFormat(()),
    JSON: CallFormat((), (), json_calls.JsonCallsReader),
}
CALL_FORMATS = (AUTO, *CALLS)
XML = (QWEN_CODER, GLM)
"""Formats whose values have no types of their own."""
THOUGHTS: Mapping[str, Thoughts] = {
    THINK: Thoughts("<think>", "</think>"),
    MISTRAL_THINK: Thoughts("[THINK]", "[/THINK]"),
    SEED_THINK: Thoughts("<seed:think>", "</seed:think>"),
}
THOUGHT_FORMATS = (AUTO, NONE, *THOUGHTS, HARMONY)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Format in which an answer is read. Kept with a response, as JSON."""

    calls: str = NONE
    """NONE where the request has no tools."""
    thoughts: str = NONE
    tools: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """The names of the request's tools; with the types of their parameters where the format needs those."""
    single: bool = False
    """Whether calls behind the first one are left out."""

    def __post_init__(self) -> None:
        """Raises ValueError for a format that is not known."""
        if self.calls not in (*CALLS, *_OTHERS) or self.thoughts not in THOUGHT_FORMATS[1:]:
            raise ValueError(f"no format {self.calls!r} of calls, or {self.thoughts!r} of reasoning")

    @property
    def plain(self) -> bool:
        """Whether everything is text."""
        return self.calls in (NONE, UNKNOWN) and self.thoughts == NONE

    @property
    def begin_of_thoughts(self) -> str:
        """The mark with which the prompt may end already; empty for none."""
        return THOUGHTS[self.thoughts].begin if self.thoughts in THOUGHTS else ""

    @property
    def marks(self) -> tuple[str, ...]:
        """Strings that have to be in the text, if they are control tokens."""
        thoughts = THOUGHTS.get(self.thoughts)
        marks = (*self._calls.marks, *((thoughts.begin, thoughts.end) if thoughts else ()))
        return tuple(dict.fromkeys((*marks, *_HARMONY_MARKS))) if self.thoughts == HARMONY else marks

    def reader(self, *, opened: bool = False, within: bool = False) -> AnswerReader:
        """`opened`: the prompt ends with `begin_of_thoughts`. `within`: the text goes on from its reasoning."""
        if self.plain:
            return PlainReader()
        found = THOUGHTS.get(self.thoughts)
        thoughts = None if found is None else Thoughts(found.begin, found.end, opened, within)
        if self.thoughts == HARMONY or self.calls == HARMONY:
            begun = Thoughts("", harmony.END, within=True) if within else None
            return harmony.HarmonyReader(self.tools, begun, single=self.single)
        if self.calls in XML:
            return self._calls.reader(self.tools, thoughts, single=self.single, types=self.tools)
        return self._calls.reader(self.tools, thoughts, single=self.single)

    def call_id(self, session: str, index: int, call: CallBegan) -> str:
        """The id of a call, the same however often the session is read."""
        if call.id:
            return call.id
        begin = self._calls.id
        return f"{begin}{session}_{index}" if begin else nine_characters(f"{session}_{index}")

    @property
    def _calls(self) -> CallFormat:
        return CALLS[self.calls] if self.calls in CALLS else _OTHERS[self.calls]


def answer_format(
    template: str,
    tools: Sequence[Mapping[str, Any]],
    settings: tuple[str, str],
    *,
    forced: bool = False,
    single: bool = False,
) -> AnswerFormat:
    """The format of an answer to a request. `template`: in Jinja. `tools`: as templates know them. `settings`: of calls
    and of reasoning, AUTO to read them off the template. `forced`: the output is held to a call. Raises
    FailedPrecondition for tools that the template does not take."""
    thoughts = thought_format(template) if settings[1] == AUTO else settings[1]
    if not tools:
        return AnswerFormat(NONE, thoughts)
    calls = call_format(template, settings[0])
    functions = [tool["function"] for tool in tools]
    apart = calls in (PYTHONIC, *XML)
    if forced and (calls == UNKNOWN or (apart and not writes(functions, python=calls == PYTHONIC))):
        calls = JSON
    typed = calls in XML
    types = {each["name"]: xml_calls.types_of(each.get("parameters")) if typed else {} for each in functions}
    return AnswerFormat(calls, thoughts, types, single)


def call_format(template: str, setting: str) -> str:
    """The format in which a model with this template writes its calls; UNKNOWN where it shows none. Raises
    FailedPrecondition where it takes no tools."""
    if "tools" not in template:
        raise FailedPrecondition("The model's chat template takes no tools.", reason="NO_TOOLS")
    if setting != AUTO:
        return setting
    found = (name for name, each in CALLS.items() if all(mark in template for mark in each.shown))
    return next(found, LLAMA if all(mark in template for mark in _LLAMA_32) else UNKNOWN)


def thought_format(template: str) -> str:
    """The format in which a model with this template writes its reasoning; NONE where it shows none."""
    if all(mark in template for mark in CALLS[HARMONY].shown):
        return HARMONY
    return next((name for name, each in THOUGHTS.items() if each.end in template), NONE)


_NINE = re.compile(r"[A-Za-z0-9]{9}")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def nine_characters(id: str) -> str:
    """The id itself, if it is one of Mistral's: nine letters and digits; else one that is made of it."""
    if _NINE.fullmatch(id):
        return id
    number, digits = int.from_bytes(hashlib.sha256(id.encode("utf-8", "replace")).digest()), ""
    for _ in range(9):
        number, digit = divmod(number, len(_DIGITS))
        digits += _DIGITS[digit]
    return digits


def fitting(template: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]] | None:
    """Returns the function that converts a message to what this template reads: Mistral's refuses ids that are not its
    own, gpt-oss's a content and reasoning beside calls, and DeepSeek's joins texts where others have a content or none,
    and an object. None: it reads them all as they are."""
    if json_calls.TOOL_CALLS in template:
        return _with_nine
    if thought_format(template) == HARMONY:
        return _with_one_thought
    return _with_texts if _JOINS.search(template) else None


_JOINS = re.compile(r"\+\s*\w[\w.\[\]'\"]*\barguments['\"\]]*\s*(\+|-?\}\})")
"""Arguments that a template appends to a text as they are."""


def _with_texts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [written_call(call) for call in message["tool_calls"]]
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def _with_nine(message: Mapping[str, Any]) -> Mapping[str, Any]:
    made = dict(message)
    if isinstance(made.get("tool_call_id"), str):
        made["tool_call_id"] = nine_characters(made["tool_call_id"])
    if made.get("tool_calls"):
        calls = made["tool_calls"]
        made["tool_calls"] = [
            {**call, "id": nine_characters(str(call.get("id") or index))} for index, call in enumerate(calls)
        ]
    return made


def _with_one_thought(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """With calls, its template takes either a content or reasoning."""
    if not message.get("content") or not message.get("tool_calls"):
        return message
    return {name: value for name, value in message.items() if name not in REASONING}
