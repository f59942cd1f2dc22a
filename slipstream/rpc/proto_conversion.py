"""Conversion between protobuf messages and Slipstream's own types: one function for each direction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from slipstream.errors import InvalidArgument, SlipstreamError, code_number, from_code
from slipstream.speculation.sampling_params import MAX_LOGIT_BIAS_ENTRIES, SamplingParams, TokenLogprobs, current_rule
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.v1 import types_pb2

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


def microseconds(seconds: float) -> int:
    """As a uint32: at most 71 minutes."""
    return min(int(seconds * 1e6), _MOST_MICROSECONDS)


def sampling_to_proto(sampling: SamplingParams) -> types_pb2.Sampling:
    return types_pb2.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        seed=sampling.seed,
        acceptance=_RULES[sampling.acceptance],
    )


def sampling_from_proto(message: types_pb2.Sampling) -> SamplingParams:
    """Raises InvalidArgument for values out of range: a worker trusts no gateway."""
    check_bias(message.logit_bias)
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        seed=message.seed,
        acceptance=rule_name(message.acceptance),
    )


def check_bias(logit_bias: Mapping[int, float]) -> None:
    """Raises InvalidArgument for more entries than a session may have. Call it before the map is copied."""
    if len(logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise InvalidArgument(f"logit_bias names more than {MAX_LOGIT_BIAS_ENTRIES} tokens; send fewer.")


def rule_name(rule: types_pb2.AcceptanceRule) -> str:
    if rule not in _RULE_NAMES:
        raise InvalidArgument(f"acceptance rule number {rule} is unknown; choose one of {sorted(_RULES)}.")
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
            raise InvalidArgument("json_object is false; send true, or leave structured_output out.")
        return StructuredOutput(kind)
    return StructuredOutput(kind, getattr(message, kind))


def structure_to_proto(structure: StructuredOutput | None) -> types_pb2.StructuredOutput | None:
    if structure is None:
        return None
    message = types_pb2.StructuredOutput()
    setattr(message, structure.format, True if structure.format == "json_object" else structure.text)
    return message


def logprobs_to_proto(told: TokenLogprobs) -> types_pb2.TokenLogprobs:
    return types_pb2.TokenLogprobs(
        logprob=told.logprob,
        top_token_ids=[token for token, _ in told.top],
        top_logprobs=[logprob for _, logprob in told.top],
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
        forward_path=model.forward_path,
        forward_notice=model.forward_notice,
    )
