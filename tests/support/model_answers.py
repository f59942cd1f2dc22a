"""Answers as models write them, and what readers make of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.text.answers.formats import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GLM,
    HARMONY,
    HERMES,
    KIMI,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    NONE,
    PYTHONIC,
    QWEN_CODER,
    THINK,
    UNKNOWN,
    AnswerFormat,
)
from gateway.text.answers.reader import Arguments, CallBegan, CallEnded, Part, Reasoning, joined


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str
    id: str = ""


Read = str | Reasoning | Call


def read(format: AnswerFormat, pieces: Iterable[str], *, opened: bool = False) -> list[Read]:
    """What comes out, with neighbours of a kind joined and each call whole."""
    reader = format.reader(opened=opened)
    return whole([part for piece in pieces for part in reader.push(piece)] + reader.finish())


def whole(parts: Iterable[Part]) -> list[Read]:
    made: list[Read] = []
    call: Call | None = None
    for part in joined(parts):
        if isinstance(part, CallBegan):
            assert call is None
            call = Call(part.name, "", part.id)
        elif isinstance(part, Arguments):
            assert call is not None
            call = Call(call.name, call.arguments + part.text, call.id)
        elif isinstance(part, CallEnded):
            assert call is not None
            made.append(call)
            call = None
        else:
            assert call is None
            made.append(part)
    assert call is None
    return made


TEMPLATES = {
    HERMES: "return json objects within <tool_call></tool_call> XML tags",
    LLAMA: "<|python_tag|>",
    MISTRAL: '[TOOL_CALLS] [{"name"',
    MISTRAL_ARGS: "[TOOL_CALLS]{{ name }}[ARGS]",
    QWEN_CODER: "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
    PYTHONIC: "Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)] Environment: ipython",
    DEEPSEEK_V3: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name\n```json",
    DEEPSEEK_V31: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments",
    KIMI: "<|tool_calls_section_begin|><|tool_call_begin|>",
    GLM: "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",
    HARMONY: "<|start|>assistant<|channel|>commentary to=functions.x<|message|>",
    UNKNOWN: "[TOOL]",
}
"""What the templates of each family say of calls."""


@dataclass(frozen=True)
class Published:
    """An answer that a model's makers published."""

    source: str
    calls: str
    text: str
    wanted: list[Read]
    tools: dict[str, dict[str, list[str]]]
    thoughts: str = NONE
    opened: bool = False

    @property
    def format(self) -> AnswerFormat:
        return AnswerFormat(self.calls, self.thoughts, self.tools)


PUBLISHED = [
    Published(
        "Hermes 2 Pro, model card: function calling",
        HERMES,
        '<tool_call>\n{"arguments": {"symbol": "TSLA"}, "name": "get_stock_fundamentals"}\n</tool_call>',
        [Call("get_stock_fundamentals", '{"symbol": "TSLA"}')],
        {"get_stock_fundamentals": {}},
    ),
    Published(
        "Qwen documentation, function calling (Qwen 2.5 and 3)",
        HERMES,
        "<think>\nOkay, the user wants both.\n</think>\n\n"
        '<tool_call>\n{"name": "get_current_temperature", "arguments": {"location": "San Francisco, CA, USA"}}\n'
        "</tool_call>\n"
        '<tool_call>\n{"name": "get_temperature_date", "arguments": {"location": "San Francisco, CA, USA", '
        '"date": "2024-10-01"}}\n</tool_call>',
        [
            Reasoning("Okay, the user wants both."),
            Call("get_current_temperature", '{"location": "San Francisco, CA, USA"}'),
            Call("get_temperature_date", '{"location": "San Francisco, CA, USA", "date": "2024-10-01"}'),
        ],
        {"get_current_temperature": {}, "get_temperature_date": {}},
        THINK,
    ),
    Published(
        "Meta, Llama 3.1: JSON based tool calling",
        LLAMA,
        '<|python_tag|>{"name": "get_current_conditions", "parameters": {"location": "San Francisco, CA", '
        '"unit": "Fahrenheit"}}',
        [Call("get_current_conditions", '{"location": "San Francisco, CA", "unit": "Fahrenheit"}')],
        {"get_current_conditions": {}},
    ),
    Published(
        "Meta, Llama 3.1: JSON based tool calling, without the tag",
        LLAMA,
        '{"name": "trending_songs", "parameters": {"n": "10", "genre": "all"}}',
        [Call("trending_songs", '{"n": "10", "genre": "all"}')],
        {"trending_songs": {}},
    ),
    Published(
        "Meta, Llama 3.2 and 4: zero-shot function calling",
        PYTHONIC,
        "[get_weather(city='San Francisco', metric='celsius'), get_weather(city='Seattle', metric='celsius')]",
        [
            Call("get_weather", '{"city": "San Francisco", "metric": "celsius"}'),
            Call("get_weather", '{"city": "Seattle", "metric": "celsius"}'),
        ],
        {"get_weather": {}},
    ),
    Published(
        "vLLM documentation, pythonic tool parser",
        PYTHONIC,
        '<|python_start|>[get_user_info(user_id=7890, special="black", more=[1.5, True, {"a": None}])]<|python_end|>',
        [Call("get_user_info", '{"user_id": 7890, "special": "black", "more": [1.5, true, {"a": null}]}')],
        {"get_user_info": {}},
    ),
    Published(
        "Mistral 7B Instruct v0.3, model card",
        MISTRAL,
        '[TOOL_CALLS] [{"name": "get_current_weather", "arguments": {"location": "Paris, FR", "format": "celsius"}}]',
        [Call("get_current_weather", '{"location": "Paris, FR", "format": "celsius"}')],
        {"get_current_weather": {}},
    ),
    Published(
        "mistral-common, tokenizer v13 (Magistral Small 2509, Devstral 2)",
        MISTRAL_ARGS,
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich"}[TOOL_CALLS]now[ARGS]{}',
        [Call("get_weather", '{"city": "Zürich"}'), Call("now", "{}")],
        {"get_weather": {}, "now": {}},
    ),
    Published(
        "mistral-common, tokenizer v11 (Mistral Small 3.2)",
        MISTRAL_ARGS,
        '[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{"city": "Zürich"}',
        [Call("get_weather", '{"city": "Zürich"}')],
        {"get_weather": {}},
    ),
    Published(
        "Qwen3-Coder, chat template: its example of the format, with a value of several lines",
        QWEN_CODER,
        "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
        "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
        "</parameter>\n</function>\n</tool_call>",
        [
            Call(
                "example_function_name",
                '{"example_parameter_1": "value_1", "example_parameter_2": '
                '"This is the value for the second parameter\\nthat can span\\nmultiple lines"}',
            )
        ],
        {"example_function_name": {"example_parameter_1": ["string"], "example_parameter_2": ["string"]}},
    ),
    Published(
        "Qwen3-Coder, model card: square_the_number",
        QWEN_CODER,
        "<tool_call>\n<function=square_the_number>\n<parameter=input_num>\n1024\n</parameter>\n</function>\n</tool_call>",
        [Call("square_the_number", '{"input_num": 1024}')],
        {"square_the_number": {"input_num": ["number"]}},
    ),
    Published(
        "DeepSeek-V3-0324, chat template",
        DEEPSEEK_V3,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"location": "Beijing"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"location": "Hangzhou"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [Call("get_weather", '{"location": "Beijing"}'), Call("get_weather", '{"location": "Hangzhou"}')],
        {"get_weather": {}},
    ),
    Published(
        "DeepSeek-V3.1, model card: ToolCall",
        DEEPSEEK_V31,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"location": "Beijing"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>'
        '{"location": "Hangzhou"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [Call("get_weather", '{"location": "Beijing"}'), Call("get_weather", '{"location": "Hangzhou"}')],
        {"get_weather": {}},
    ),
    Published(
        "Kimi K2, docs/tool_call_guidance.md",
        KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Beijing"}<|tool_call_end|><|tool_calls_section_end|>',
        [Call("get_weather", '{"city": "Beijing"}', "functions.get_weather:0")],
        {"get_weather": {}},
    ),
    Published(
        "GLM-4.5, chat template; vLLM documentation, glm45 tool parser",
        GLM,
        "<think>The user asks for a date.</think>\n"
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Beijing</arg_value>\n"
        "<arg_key>date</arg_key>\n<arg_value>2024-06-27</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "</tool_call>",
        [
            Reasoning("The user asks for a date."),
            Call("get_weather", '{"city": "Beijing", "date": "2024-06-27", "days": 3}'),
        ],
        {"get_weather": {"city": ["string"], "date": ["string"], "days": ["integer"]}},
        THINK,
    ),
    Published(
        "OpenAI, harmony response format: receiving tool calls",
        HARMONY,
        "<|channel|>analysis<|message|>Need to use function get_weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"location":"San Francisco"}<|call|>',
        [Reasoning("Need to use function get_weather."), Call("get_weather", '{"location":"San Francisco"}')],
        {"get_weather": {}},
        HARMONY,
    ),
    Published(
        "OpenAI, harmony response format: preambles",
        HARMONY,
        "<|channel|>analysis<|message|>{long chain of thought}<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "**Action plan**:\n1. Generate an HTML file<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.generate_file <|constrain|>json<|message|>{"template": "basic_html"}<|call|>',
        [
            Reasoning("{long chain of thought}"),
            "**Action plan**:\n1. Generate an HTML file",
            Call("generate_file", '{"template": "basic_html"}'),
        ],
        {"generate_file": {}},
        HARMONY,
    ),
    Published(
        "OpenAI, harmony response format: channels",
        HARMONY,
        '<|channel|>analysis<|message|>User asks: "What is 2 + 2?" Simple arithmetic.<|end|>\n'
        "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>",
        [Reasoning('User asks: "What is 2 + 2?" Simple arithmetic.'), "2 + 2 = 4."],
        {},
        HARMONY,
    ),
    Published(
        "DeepSeek-R1, model card: the template begins the reasoning",
        NONE,
        "\nFirst, I add.\nThen I am done.\n</think>\n\nIt is **4**.",
        [Reasoning("First, I add.\nThen I am done."), "It is **4**."],
        {},
        THINK,
        opened=True,
    ),
]
