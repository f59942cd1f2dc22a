from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AcceptanceRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCEPTANCE_RULE_UNSPECIFIED: _ClassVar[AcceptanceRule]
    ACCEPTANCE_RULE_COUPLED: _ClassVar[AcceptanceRule]
    ACCEPTANCE_RULE_REJECTION: _ClassVar[AcceptanceRule]
    ACCEPTANCE_RULE_BLOCK: _ClassVar[AcceptanceRule]
    ACCEPTANCE_RULE_RECURSIVE: _ClassVar[AcceptanceRule]
    ACCEPTANCE_RULE_TYPICAL: _ClassVar[AcceptanceRule]

class RoundReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROUND_REASON_UNSPECIFIED: _ClassVar[RoundReason]
    ROUND_REASON_FIRST: _ClassVar[RoundReason]
    ROUND_REASON_SLOW: _ClassVar[RoundReason]
    ROUND_REASON_MISSED: _ClassVar[RoundReason]
    ROUND_REASON_REJECTED: _ClassVar[RoundReason]
    ROUND_REASON_FAILED: _ClassVar[RoundReason]
    ROUND_REASON_ASKED: _ClassVar[RoundReason]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_DRAFTER: _ClassVar[Role]
    ROLE_VERIFIER: _ClassVar[Role]
ACCEPTANCE_RULE_UNSPECIFIED: AcceptanceRule
ACCEPTANCE_RULE_COUPLED: AcceptanceRule
ACCEPTANCE_RULE_REJECTION: AcceptanceRule
ACCEPTANCE_RULE_BLOCK: AcceptanceRule
ACCEPTANCE_RULE_RECURSIVE: AcceptanceRule
ACCEPTANCE_RULE_TYPICAL: AcceptanceRule
ROUND_REASON_UNSPECIFIED: RoundReason
ROUND_REASON_FIRST: RoundReason
ROUND_REASON_SLOW: RoundReason
ROUND_REASON_MISSED: RoundReason
ROUND_REASON_REJECTED: RoundReason
ROUND_REASON_FAILED: RoundReason
ROUND_REASON_ASKED: RoundReason
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_ERROR: FinishReason
ROLE_UNSPECIFIED: Role
ROLE_DRAFTER: Role
ROLE_VERIFIER: Role

class SessionKey(_message.Message):
    __slots__ = ("id", "epoch")
    ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    id: str
    epoch: int
    def __init__(self, id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Prefix(_message.Message):
    __slots__ = ("token_ids", "prompt_length")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ...) -> None: ...

class SamplingOptions(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "acceptance", "allowed_token_ids", "bad_words_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    acceptance: AcceptanceRule
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words_ids: _containers.RepeatedCompositeFieldContainer[TokenIds]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., acceptance: _Optional[_Union[AcceptanceRule, str]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words_ids: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReasoningLimit(_message.Message):
    __slots__ = ("max_tokens", "begin_token_id", "end_token_id")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    begin_token_id: int
    end_token_id: int
    def __init__(self, max_tokens: _Optional[int] = ..., begin_token_id: _Optional[int] = ..., end_token_id: _Optional[int] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("json_schema", "regex", "grammar", "json_object")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    grammar: str
    json_object: bool
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., json_object: _Optional[bool] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Distribution(_message.Message):
    __slots__ = ("token_ids", "weights")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[int]] = ...) -> None: ...

class Candidates(_message.Message):
    __slots__ = ("session", "epoch", "base_length", "generation", "first_node", "token_ids", "parents", "confidences", "distributions", "mark")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_NODE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    base_length: int
    generation: int
    first_node: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    confidences: bytes
    distributions: _containers.RepeatedCompositeFieldContainer[Distribution]
    mark: DraftMark
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., base_length: _Optional[int] = ..., generation: _Optional[int] = ..., first_node: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., confidences: _Optional[bytes] = ..., distributions: _Optional[_Iterable[_Union[Distribution, _Mapping]]] = ..., mark: _Optional[_Union[DraftMark, _Mapping]] = ...) -> None: ...

class TraceContext(_message.Message):
    __slots__ = ("trace_id", "span_id", "sent_unix_nano", "receiver", "segment_tokens")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    SENT_UNIX_NANO_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    trace_id: bytes
    span_id: int
    sent_unix_nano: int
    receiver: str
    segment_tokens: int
    def __init__(self, trace_id: _Optional[bytes] = ..., span_id: _Optional[int] = ..., sent_unix_nano: _Optional[int] = ..., receiver: _Optional[str] = ..., segment_tokens: _Optional[int] = ...) -> None: ...

class DraftMark(_message.Message):
    __slots__ = ("length", "held_us")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    HELD_US_FIELD_NUMBER: _ClassVar[int]
    length: int
    held_us: int
    def __init__(self, length: _Optional[int] = ..., held_us: _Optional[int] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "revision", "vocabulary_size", "vocabulary_fingerprint", "max_length", "eos_token_ids", "parameter_count", "dtype", "chat_template_fingerprint", "arithmetic", "batch_invariant", "forward_path", "forward_notice")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_COUNT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    FORWARD_PATH_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NOTICE_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision: str
    vocabulary_size: int
    vocabulary_fingerprint: str
    max_length: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    parameter_count: int
    dtype: str
    chat_template_fingerprint: str
    arithmetic: str
    batch_invariant: bool
    forward_path: str
    forward_notice: str
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., vocabulary_fingerprint: _Optional[str] = ..., max_length: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., parameter_count: _Optional[int] = ..., dtype: _Optional[str] = ..., chat_template_fingerprint: _Optional[str] = ..., arithmetic: _Optional[str] = ..., batch_invariant: _Optional[bool] = ..., forward_path: _Optional[str] = ..., forward_notice: _Optional[str] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message", "reason")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    reason: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class DrafterShare(_message.Message):
    __slots__ = ("drafter", "drafted", "accepted", "accepted_places")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PLACES_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    drafted: int
    accepted: int
    accepted_places: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, drafter: _Optional[str] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., accepted_places: _Optional[_Iterable[int]] = ...) -> None: ...

class DraftSpan(_message.Message):
    __slots__ = ("drafter", "began_us", "ended_us", "candidates")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    BEGAN_US_FIELD_NUMBER: _ClassVar[int]
    ENDED_US_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    began_us: int
    ended_us: int
    candidates: int
    def __init__(self, drafter: _Optional[str] = ..., began_us: _Optional[int] = ..., ended_us: _Optional[int] = ..., candidates: _Optional[int] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("sessions", "kv_blocks_total", "kv_blocks_free", "draining", "steps", "waiting", "preemptions", "prefix_tokens_sought", "prefix_tokens_found", "drafting_paused")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_SOUGHT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FOUND_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_PAUSED_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    kv_blocks_total: int
    kv_blocks_free: int
    draining: bool
    steps: int
    waiting: int
    preemptions: int
    prefix_tokens_sought: int
    prefix_tokens_found: int
    drafting_paused: str
    def __init__(self, sessions: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., kv_blocks_free: _Optional[int] = ..., draining: _Optional[bool] = ..., steps: _Optional[int] = ..., waiting: _Optional[int] = ..., preemptions: _Optional[int] = ..., prefix_tokens_sought: _Optional[int] = ..., prefix_tokens_found: _Optional[int] = ..., drafting_paused: _Optional[str] = ...) -> None: ...
