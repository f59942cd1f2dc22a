"""Conversion between protobuf messages and Slipstream's own types: one function for each direction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from slipstream.errors import (
    FIELD_INVALID,
    FIELDS_CONFLICT,
    VALUE_UNKNOWN,
    InvalidArgument,
    SlipstreamError,
    code_number,
    from_code,
)
from slipstream.speculation.sampling_params import (
    MAX_TOP_LOGPROBS,
    SamplingParams,
    TokenLogprobs,
    check_named_tokens,
    current_rule,
)
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2

MAX_FAILURE_CHARACTERS = 1024
MAX_ID_CHARACTERS = 64
"""Characters of a session's id."""
MAX_LABEL_BYTES = 64
"""Bytes of a workload and of a cache salt."""
_MOST_MICROSECONDS = 2**32 - 1
_STEPS = 32
"""Steps of a confidence's byte for each nat: 3 % apart, down to 0.03 %."""
_LOG_PROBS = tuple(-step / _STEPS for step in range(256))

_RULES = {
    "coupled": types_pb2.ACCEPTANCE_RULE_COUPLED,
    "rejection": types_pb2.ACCEPTANCE_RULE_REJECTION,
    "typical": types_pb2.ACCEPTANCE_RULE_TYPICAL,
}
_RULE_NAMES = {
    types_pb2.ACCEPTANCE_RULE_UNSPECIFIED: "coupled",
    types_pb2.ACCEPTANCE_RULE_BLOCK: "rejection",
    types_pb2.ACCEPTANCE_RULE_RECURSIVE: "rejection",
} | {rule: name for name, rule in _RULES.items()}


MAX_PROMPT_LOGPROBS = 1 << 15
"""Most log-probabilities of one prompt: a quarter of a megabyte of a verifier's message."""
SAMPLING_FIELDS = tuple(types_pb2.SamplingOptions.DESCRIPTOR.fields_by_name)
"""All parameters; `SamplingParams` has attributes of these names."""
_TOKEN_FIELDS = tuple(field.name for field in types_pb2.SamplingOptions.DESCRIPTOR.fields if field.is_repeated)
"""Those that name tokens: maps by token id, lists, and lists of sequences."""
_SEQUENCES = tuple(
    field.name
    for field in types_pb2.SamplingOptions.DESCRIPTOR.fields
    if field.message_type is types_pb2.TokenIds.DESCRIPTOR
)


def microseconds(seconds: float) -> int:
    """As a uint32: at most 71 minutes."""
    return min(int(seconds * 1e6), _MOST_MICROSECONDS)


def sampling_to_proto(sampling: SamplingParams) -> types_pb2.SamplingOptions:
    """Resolved parameters, for workers and for records: what is 0 is left out unless a client means another value by
    that."""
    values = {name: getattr(sampling, name) for name in SAMPLING_FIELDS}
    values["acceptance"] = _RULES[sampling.acceptance]
    for name in _SEQUENCES:
        values[name] = [types_pb2.TokenIds(token_ids=each) for each in values[name]]
    return types_pb2.SamplingOptions(
        **{name: value for name, value in values.items() if value or name in ("temperature", "seed")}
    )


def sampling_from_proto(message: types_pb2.SamplingOptions) -> SamplingParams:
    """Converts a worker's sampling options: all fields, 0 where unset. Raises InvalidArgument for values out of range:
    a worker trusts no gateway."""
    return _sampling(message, {name: getattr(message, name) for name in SAMPLING_FIELDS})


def sampling_of_client(message: types_pb2.SamplingOptions, seed: Callable[[], int]) -> SamplingParams:
    """Converts a client's sampling options, with defaults for unset fields. `seed`: draws one. Raises
    InvalidArgument."""
    given = {field.name: value for field, value in message.ListFields()}
    return _sampling(message, given if "seed" in given else given | {"seed": seed()})


def _sampling(message: types_pb2.SamplingOptions, given: dict[str, Any]) -> SamplingParams:
    check_sizes(message)
    for name in _TOKEN_FIELDS:
        if name in given:
            given[name] = _copied(given[name])
    return SamplingParams(**given | {"acceptance": rule_name(message.acceptance)})


def _copied(tokens: Any) -> Any:
    if isinstance(tokens, Mapping):
        return dict(tokens)
    return tuple(tuple(each.token_ids) if isinstance(each, types_pb2.TokenIds) else each for each in tokens)


def check_sizes(message: types_pb2.SamplingOptions) -> None:
    """Raises InvalidArgument for more tokens than a field may name. Call it before they are copied."""
    for name in _TOKEN_FIELDS:
        named = getattr(message, name)
        check_named_tokens(name, len(named))  # first: a message has room for a million sequences without tokens
        if name in _SEQUENCES:
            check_named_tokens(name, sum(len(each.token_ids) for each in named))


def highest_tokens(message: types_pb2.SamplingOptions) -> dict[str, int]:
    """The highest token id in each field that names any."""
    return {name: highest for name in _TOKEN_FIELDS if (highest := _highest(name, getattr(message, name))) is not None}


def _highest(name: str, tokens: Any) -> int | None:
    if name in _SEQUENCES:
        tokens = [token for each in tokens for token in each.token_ids]
    return max(tokens, default=None)


def rule_name(rule: types_pb2.AcceptanceRule) -> str:
    if rule not in _RULE_NAMES:
        raise InvalidArgument(
            f"acceptance rule number {rule} is unknown; choose one of {sorted(_RULES)}.",
            reason=VALUE_UNKNOWN,
            field="sampling.acceptance",
        )
    return _RULE_NAMES[rule]


def rule_number(name: str) -> types_pb2.AcceptanceRule:
    """The number of a rule; a deprecated name has that of `rejection`. Raises InvalidArgument for an unknown name."""
    return _RULES[current_rule(name)]


def structure_from_proto(message: types_pb2.StructuredOutput) -> StructuredOutput | None:
    """None where no format is set. Raises InvalidArgument as `StructuredOutput` does."""
    kind = message.WhichOneof("format")
    if kind is None:
        return None
    if kind == "json_object":
        if not message.json_object:
            raise InvalidArgument(
                "json_object is false; send true, or leave structured_output out.",
                reason=FIELD_INVALID,
                field="structured_output.json_object",
            )
        return StructuredOutput(kind)
    return StructuredOutput(kind, getattr(message, kind))


def structure_to_proto(structure: StructuredOutput | None) -> types_pb2.StructuredOutput | None:
    if structure is None:
        return None
    message = types_pb2.StructuredOutput()
    setattr(message, structure.format, True if structure.format == "json_object" else structure.text)
    return message


def logprobs_to_proto(logprobs: TokenLogprobs) -> types_pb2.TokenLogprobs:
    return types_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top_token_ids=[token for token, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def check_prompt_logprobs(top: int, prompt: int) -> None:
    """Raises InvalidArgument for more than a prompt of so many tokens may have, with `top` likeliest ones each."""
    if top > MAX_TOP_LOGPROBS:
        raise InvalidArgument(
            f"prompt_logprobs is {top}; ask for at most {MAX_TOP_LOGPROBS}.",
            reason="PROMPT_LOGPROBS",
            field="prompt_logprobs",
            numbers={"least": 0, "most": MAX_TOP_LOGPROBS},
        )
    if prompt * (1 + top) > MAX_PROMPT_LOGPROBS:
        raise InvalidArgument(
            f"{1 + top} log-probabilities of each of the prompt's {prompt} tokens are asked for, and a request has "
            f"{MAX_PROMPT_LOGPROBS} in all; ask for fewer, or send a shorter prompt.",
            reason="PROMPT_LOGPROBS",
            field="prompt_logprobs",
            numbers={"numbers": prompt * (1 + top), "limit": MAX_PROMPT_LOGPROBS},
        )


def check_reasoning_limit(request: gateway_pb2.GenerateRequest | verifier_pb2.DecodeOpen) -> None:
    """Raises InvalidArgument for one mark that begins and ends reasoning, and beside a structured output, which says
    itself what may stand before it."""
    if not request.HasField("reasoning_limit"):
        return
    limit = request.reasoning_limit
    if limit.begin_token_id == limit.end_token_id:
        raise InvalidArgument(
            "reasoning_limit has one token as both marks; name the two that the model writes.",
            reason=FIELD_INVALID,
            field="reasoning_limit",
        )
    allowed = request.sampling.allowed_token_ids
    if allowed and limit.end_token_id not in allowed:
        raise InvalidArgument(
            "allowed_token_ids does not have the token that ends reasoning; allow it, or leave reasoning_limit out.",
            reason=FIELDS_CONFLICT,
            field="reasoning_limit",
        )
    if request.HasField("structured_output"):
        raise InvalidArgument(
            "reasoning_limit and a structured output exclude each other; leave one out.",
            reason=FIELDS_CONFLICT,
            field="reasoning_limit",
        )


def confidences_to_proto(log_probs: Iterable[float]) -> bytes:
    """Natural logarithms of confidences as a byte each; one above zero by rounding counts as zero."""
    return bytes(min(255, max(0, round(-_STEPS * max(value, _LOG_PROBS[-1])))) for value in log_probs)


def confidences_from_proto(confidences: bytes) -> tuple[float, ...]:
    return tuple([_LOG_PROBS[step] for step in confidences])


def failure_to_proto(error: SlipstreamError) -> types_pb2.Failure:
    return types_pb2.Failure(code=code_number(error), message=error.message, reason=error.reason)


def failure_from_proto(message: types_pb2.Failure) -> SlipstreamError:
    """Cut to a bounded length and to one line: a peer's failure is passed on to others, and logged."""
    return from_code(message.code, _line(message.message[:MAX_FAILURE_CHARACTERS]), _line(message.reason[:64]))


def _line(text: str) -> str:
    return text if text.isprintable() else "".join(one if one.isprintable() else " " for one in text)


class Model(Protocol):
    """The model information of an engine."""

    @property
    def name(self) -> str: ...
    @property
    def revision(self) -> str: ...
    @property
    def vocabulary_size(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def max_length(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def parameters(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def chat_template(self) -> str: ...
    @property
    def arithmetic(self) -> str: ...
    @property
    def batch_invariant(self) -> bool: ...
    @property
    def forward_path(self) -> str: ...
    @property
    def forward_notice(self) -> str: ...


def model_to_proto(model: Model) -> types_pb2.ModelInfo:
    return types_pb2.ModelInfo(
        name=model.name,
        revision=model.revision,
        vocabulary_size=model.vocabulary_size,
        vocabulary_fingerprint=model.fingerprint,
        max_length=model.max_length,
        eos_token_ids=model.eos_token_ids,
        parameter_count=model.parameters,
        dtype=model.dtype,
        chat_template_fingerprint=model.chat_template,
        arithmetic=model.arithmetic,
        batch_invariant=model.batch_invariant,
        forward_path=model.forward_path,
        forward_notice=model.forward_notice,
    )
