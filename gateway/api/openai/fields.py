"""Fields that several OpenAI requests share, and the GenerateRequest that they make.

JSON types are strict. Unknown fields are ignored, with one log line for each name: clients of other servers send them.
Those that are known to change an answer are refused.
"""

from __future__ import annotations

import json
import logging
import re
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidatorFunctionWrapHandler, WrapValidator, field_validator

from gateway.requests.answers import AnswerPlan
from gateway.requests.texts import RequestText, Room, Texts, part_of
from gateway.text.tokenizer import Tokenizer
from slipstream.errors import FIELD_INVALID, FIELD_MISSING, FIELDS_CONFLICT, NOT_UNICODE, InvalidArgument
from slipstream.rpc import proto_conversion
from slipstream.rpc.proto_conversion import structure_from_proto, structure_to_proto
from slipstream.tokenizer.structured_output import OPTIONS_KEY, StructuredOutput, choice_grammar, whitespace_options
from slipstream.v1 import gateway_pb2, types_pb2

log = logging.getLogger(__name__)

MOST_SEED = 2**64
_MOST = 2**32 - 1
_LOGGED: set[str] = set()
_MOST_LOGGED = 256
_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
_TOKEN_ID = re.compile(r"[0-9]{1,10}")

_INSTEAD = {
    "guided_json": "send structured_outputs.json",
    "guided_regex": "send structured_outputs.regex",
    "guided_choice": "send structured_outputs.choice",
    "guided_grammar": "send structured_outputs.grammar",
    "functions": "ask /v1/chat/completions, or send tools",
    "function_call": "ask /v1/chat/completions, or send tool_choice",
    "truncate_prompt_tokens": "ask /v1/completions or /v1/chat/completions, or shorten the prompt yourself",
    "truncation_side": "ask /v1/completions or /v1/chat/completions",
    "prompt_embeds": "send a text or token ids",
    "prompt_logprobs": "ask /v1/completions for them",
    "logits_processors": "leave it out",
    "include_stop_str_in_output": "ask an API of OpenAI's, or append the stop string yourself",
    "use_beam_search": "leave it out",
    "length_penalty": "leave it out",
    "skip_special_tokens": "ask an API of OpenAI's",
    "detokenize": "ask for return_token_ids",
    "modalities": "ask for text alone",
    "audio": "leave it out",
    "web_search_options": "leave it out",
    "echo": "ask /v1/completions, or put the prompt before the answer yourself",
    "add_special_tokens": "send the prompt as token ids to /v1/completions",
    "include_reasoning": "leave out what stands in reasoning yourself",
    "return_tokens_as_token_ids": "ask for return_token_ids",
    "thinking_token_budget": "ask /v1/chat/completions, or /v1/messages with thinking.budget_tokens",
    "logprob_token_ids": "ask for top_logprobs",
    "prompt_logprob_token_ids": "ask for prompt_logprobs",
    "repetition_detection": "send repetition_penalty or frequency_penalty",
    "watermarking": "leave it out",
    "regex": "send structured_outputs.regex",
    "ebnf": "send structured_outputs.grammar",
    "grammar": "send structured_outputs.grammar",
    "json_schema": "send structured_outputs.json",
    "guided_decoding": "send structured_outputs",
    "structural_tag": "send structured_outputs",
    "stop_regex": "send stop",
    "no_stop_trim": "send include_stop_str_in_output",
    "custom_logit_processor": "leave it out",
    "repeat_penalty": "send repetition_penalty",
    "n_predict": "send max_tokens",
    "num_predict": "send max_tokens",
    "typical_p": "send top_p or min_p",
    "top_a": "send min_p",
    "tfs_z": "send top_p or min_p",
    "mirostat": "send temperature and top_p",
    "xtc_probability": "leave it out",
    "dry_multiplier": "send repetition_penalty",
    "dynatemp_range": "send temperature",
    "conversation": "send previous_response_id, or the whole conversation as input",
    "mcp_servers": "send tools, and call the servers yourself",
}
"""Fields of OpenAI, Anthropic, vLLM, SGLang and llama.cpp that change an answer and are not served, with what to do
instead."""
_HARMLESS: dict[str, Any] = {
    "skip_special_tokens": True,
    "detokenize": True,
    "modalities": ["text"],
    "length_penalty": 1,
    "function_call": "none",
    "include_reasoning": True,
    "repeat_penalty": 1,
    "typical_p": 1,
    "tfs_z": 1,
}
"""Values of them that ask for what happens anyway, besides null, false and empty ones."""
_ON = frozenset({"skip_special_tokens", "detokenize", "include_reasoning"})
"""Those whose false asks for something else."""

TokenId = Annotated[int, Field(ge=0, le=_MOST)]


def _checked_ids(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Ids that were checked and packed beside the event loop are not looked at again."""
    return value if isinstance(value, array) else check(value)


TokenIds = Annotated[list[TokenId], Field(fail_fast=True), WrapValidator(_checked_ids)]
Strings = Annotated[list[str], Field(fail_fast=True)]


class Fields(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        """A whole number that is written as 16.0, as clients whose language has one kind of numbers do."""
        return int(value) if type(value) is float and value.is_integer() else value


class RequestFields(Fields):
    """A whole request, which keeps what is unknown until `log_unknown` forgets it."""

    model_config = ConfigDict(extra="allow")
    special_tokens: ClassVar[bool] = False
    """Whether the prompt gets those that the tokenizer puts around a text: a chat template writes its own."""


class StreamOptions(Fields):
    include_usage: bool | None = None
    """One more chunk at the end, without choices, with `usage` and `metrics`."""
    continuous_usage_stats: bool | None = None
    """`usage` in every chunk."""


class TextPart(Fields):
    type: Literal["text"]
    text: str


class PredictionField(Fields):
    """Output that is expected: it is guessed from, and changes nothing but speed."""

    type: Literal["content"] = "content"
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class SpeculationField(Fields):
    """Slipstream's extension: how this request speculates. No other server has it, so what is unknown is a slip."""

    model_config = ConfigDict(extra="forbid")

    drafters: Strings | None = None
    max_draft_tokens: int | None = Field(None, ge=0, le=_MOST)
    disabled: bool = False
    acceptance: str | None = None
    rounds: bool = False
    """Chunks of a stream have `speculation.rounds`: where each token came from, and when."""


class JsonSchemaField(Fields):
    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaField | None = None


class StructuredOutputs(Fields):
    """One of these, as vLLM names them."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    """The output is one of these texts."""
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    """Regular expression of the whitespace that is allowed between JSON's tokens; default: as `json.dumps` writes."""


class SamplingFields(RequestFields):
    """Fields of a request about its output, besides the prompt."""

    model: str | None = ""
    """Empty or null: the only model."""
    max_tokens: int | None = Field(None, ge=1, le=_MOST)
    """Most output tokens; default: what the model's length leaves, of completions 16; `GATEWAY_MAX_TOKENS_DEFAULT`."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=-1, le=_MOST)
    """-1 and 0 keep all tokens."""
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=1024)
    allowed_token_ids: TokenIds | None = None
    """The output has these tokens alone."""
    bad_words: Strings | None = None
    """The output has none of these, as far as single tokens can say: the last token of a word cannot follow the
    others."""
    seed: int | None = Field(None, ge=-(2**63), lt=MOST_SEED)
    """Requests of one seed get one text. Choice i of several has seed + i."""
    n: int | None = Field(None, ge=1, le=128)
    stop: str | Strings | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    """The text ends behind the stop string, not before it; a special token that ends it is shown too, where special
    tokens are."""
    skip_special_tokens: bool | None = None
    """False: special tokens stand in the text as they are written."""
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=_MOST)
    """Output tokens before which no stop token ends the text."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Adds `token_ids` to choices, and `prompt_token_ids`."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prediction: PredictionField | None = None
    speculation: SpeculationField | None = None
    cache_salt: str | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    mixed_arithmetic: bool | None = None
    """Slipstream's extension: whether the text may go on, marked, where no verifier is left that computes as the one
    that began it."""
    workload: str | None = None
    """Kind of work: acceptance is learned, and rules are set, for each kind apart."""
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def to_generate(
        self, prompt: str | None, index: int, plan: AnswerPlan | None = None
    ) -> gateway_pb2.GenerateRequest:
        """The request of the session for choice `index`. `prompt`: None leaves it and the prediction to `texts`.
        `plan`: of the answer; None: it is held to the request's own structure, and is text. Raises InvalidArgument for
        what a message cannot hold; all limits are checked where every protocol's are."""
        try:
            request = gateway_pb2.GenerateRequest(
                model=self.model or "",
                sampling=self._sampling(index),
                max_tokens=self.max_tokens,
                stop=[self.stop] if isinstance(self.stop, str) else self.stop or (),
                stop_token_ids=self.stop_token_ids or (),
                ignore_eos=bool(self.ignore_eos),
                min_tokens=self.min_tokens or 0,
                bad_words=self.bad_words or (),
                include_stop=bool(self.include_stop_str_in_output),
                show_special_tokens=self.skip_special_tokens is False,
                speculation=self._speculation(),
                workload=self.workload or "",
                cache_salt=self.cache_salt or "",
                priority=self.priority or 0,
                mixed_arithmetic=self.mixed_arithmetic,
                structured_output=structure_to_proto(self.structure() if plan is None else plan.structure),
                shown_special_token_ids=() if plan is None else plan.shown,
                reasoning_limit=None if plan is None else plan.reasoning_limit,
            )
            if prompt is not None:
                request.prompt = prompt
                if self.prediction is not None:
                    request.prediction.text = self.prediction.text
        except (ValueError, TypeError) as error:  # a lone surrogate
            raise InvalidArgument(
                "The request holds text that is not Unicode, or a number out of range.", reason=NOT_UNICODE
            ) from error
        return request

    def texts(self, prompts: Sequence[RequestText], tokenizer: Tokenizer) -> list[Texts]:
        """The texts of each choice of each prompt. Raises InvalidArgument for a prediction that is too long."""
        predicted = part_of(tokenizer, self.prediction.text) if self.prediction and self.prediction.text else None
        room = Room(len(prompts) * self.choices)
        return [Texts(prompt, predicted, self.choices, room) for prompt in prompts for _ in range(self.choices)]

    def _sampling(self, index: int) -> gateway_pb2.SamplingOptions:
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            raise InvalidArgument(
                "allowed_token_ids is empty, and an output has tokens; name some, or leave it out.",
                reason="NO_TOKENS",
                field="allowed_token_ids",
            )
        given = {name: getattr(self, name, None) for name in proto_conversion.SAMPLING_FIELDS}
        return gateway_pb2.SamplingOptions(
            **given
            | {
                "top_k": None if self.top_k is None else max(0, self.top_k),
                "logit_bias": _bias(self.logit_bias or {}),
                "seed": None if self.seed is None else (self.seed + index) % MOST_SEED,
                "acceptance": self._acceptance(),
            }
        )

    def _acceptance(self) -> types_pb2.AcceptanceRule:
        rule = self.speculation.acceptance if self.speculation else None
        return types_pb2.ACCEPTANCE_RULE_UNSPECIFIED if rule is None else proto_conversion.rule_number(rule)

    def _speculation(self) -> gateway_pb2.SpeculationOptions | None:
        asked = self.speculation
        if asked is None:
            return None
        return gateway_pb2.SpeculationOptions(
            disabled=asked.disabled,
            max_draft_tokens=asked.max_draft_tokens,
            drafters=asked.drafters or (),
            rounds=asked.rounds,
        )

    def structure(self) -> StructuredOutput | None:
        """Returns the structure that the request's own fields name. Raises InvalidArgument for two of them, and for too
        long ones."""
        found = [each for each in (_format(self.response_format), _outputs(self.structured_outputs)) if each]
        if len(found) > 1:
            raise InvalidArgument(
                "response_format and structured_outputs exclude each other; send one.",
                reason=FIELDS_CONFLICT,
                field="response_format",
            )
        return structure_from_proto(found[0]) if found else None


class CutPromptFields(SamplingFields):
    """Fields of requests whose prompt may be cut to a length."""

    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=2**63 - 1)
    """Most tokens of the prompt, as vLLM has it; -1: as many as the model and the API key take."""
    truncation_side: Literal["left", "right"] | None = None
    """Where tokens are cut off; default: left, so that the end of the prompt stays."""

    def cut(self, prompt: RequestText) -> RequestText:
        """The prompt, cut if the request says so."""
        if self.truncate_prompt_tokens is None:
            return prompt
        return prompt.cut(self.truncate_prompt_tokens, at_the_end=self.truncation_side == "right")


def log_unknown(fields: RequestFields) -> None:
    """Log, once for each, the names of fields that this server does not know; forget their values. Raises
    InvalidArgument for one that would change the answer."""
    unknown = fields.model_extra or {}
    if unknown.get("add_special_tokens") == fields.special_tokens:
        del unknown["add_special_tokens"]
    for name, instead in _INSTEAD.items():
        if name in unknown and _changes(name, unknown[name]):
            raise InvalidArgument(f"{name} is not served; {instead}.", reason="FIELD_NOT_SERVED", field=name)
    for name in unknown:
        if name not in _LOGGED and len(_LOGGED) < _MOST_LOGGED and _NAME.fullmatch(name):
            _LOGGED.add(name)
            log.info("requests have a field that is unknown here and ignored: %s", name)
    unknown.clear()


def reasoning_variables(effort: str | None) -> dict[str, Any]:
    """Template variables for a reasoning effort: gpt-oss's templates read the effort, Qwen's and DeepSeek's whether to
    reason at all."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | (thinking_variables(on=False) if effort == "none" else {})


def thinking_variables(*, on: bool) -> dict[str, Any]:
    """By the two names that templates have for it."""
    return {"enable_thinking": on, "thinking": on}


def _changes(name: str, value: Any) -> bool:
    """Whether this value of a field that is not served asks for anything else than what happens."""
    if value is None or (name in _HARMLESS and value == _HARMLESS[name]):
        return False
    return name in _ON or name == "add_special_tokens" or bool(value)


def _bias(given: dict[str, float]) -> dict[int, float]:
    bias = {int(token): value for token, value in given.items() if _TOKEN_ID.fullmatch(token)}
    if len(bias) != len(given) or not all(token <= _MOST for token in bias):
        raise InvalidArgument(
            "logit_bias maps token ids to numbers; write the ids as whole numbers.",
            reason=FIELD_INVALID,
            field="logit_bias",
        )
    return bias


def _format(asked: ResponseFormat | None) -> types_pb2.StructuredOutput | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return types_pb2.StructuredOutput(json_object=True)
    if asked.json_schema is None:
        raise InvalidArgument(
            "response_format json_schema has no json_schema; send {name, schema}.",
            reason=FIELD_MISSING,
            field="response_format",
        )
    return types_pb2.StructuredOutput(json_schema=json.dumps(asked.json_schema.schema_))


def _outputs(asked: StructuredOutputs | None) -> types_pb2.StructuredOutput | None:
    if asked is None:
        return None
    named: dict[str, list[Any]] = {
        "json_schema": [asked.json_, {"type": "object"} if asked.json_object else None],
        "regex": [asked.regex],
        "grammar": [asked.grammar, None if asked.choice is None else choice_grammar(asked.choice)],
    }
    given = [(name, value) for name, values in named.items() for value in values if value is not None]
    if len(given) != 1:
        raise InvalidArgument(
            "structured_outputs holds one of json, regex, grammar, choice and json_object.",
            reason=FIELDS_CONFLICT if given else FIELD_MISSING,
            field="structured_outputs",
        )
    ((name, value),) = given
    if asked.whitespace_pattern is not None:
        value = _spaced(name, value, asked.whitespace_pattern)
    structure = types_pb2.StructuredOutput()
    setattr(structure, name, value if isinstance(value, str) else json.dumps(value))
    return structure


def _spaced(name: str, schema: Any, pattern: str) -> Any:
    """`schema` with its own whitespace. Raises InvalidArgument for what is no schema."""
    if name != "json_schema":
        raise InvalidArgument(
            "structured_outputs.whitespace_pattern is for json and json_object.",
            reason=FIELDS_CONFLICT,
            field="structured_outputs",
        )
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(
                f"structured_outputs.json is not JSON: {error}.", reason="BAD_GRAMMAR", field="structured_outputs"
            ) from error
    if not isinstance(schema, dict):
        raise InvalidArgument(
            "structured_outputs.whitespace_pattern needs a schema that is an object.",
            reason="BAD_GRAMMAR",
            field="structured_outputs",
        )
    return {OPTIONS_KEY: whitespace_options(pattern), **schema}
