from slipstream.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union
from slipstream.v1.types_pb2 import SessionKey as SessionKey
from slipstream.v1.types_pb2 import Prefix as Prefix
from slipstream.v1.types_pb2 import SamplingOptions as SamplingOptions
from slipstream.v1.types_pb2 import TokenIds as TokenIds
from slipstream.v1.types_pb2 import ReasoningLimit as ReasoningLimit
from slipstream.v1.types_pb2 import StructuredOutput as StructuredOutput
from slipstream.v1.types_pb2 import TokenLogprobs as TokenLogprobs
from slipstream.v1.types_pb2 import Distribution as Distribution
from slipstream.v1.types_pb2 import Candidates as Candidates
from slipstream.v1.types_pb2 import TraceContext as TraceContext
from slipstream.v1.types_pb2 import DraftMark as DraftMark
from slipstream.v1.types_pb2 import ModelInfo as ModelInfo
from slipstream.v1.types_pb2 import Failure as Failure
from slipstream.v1.types_pb2 import DrafterShare as DrafterShare
from slipstream.v1.types_pb2 import DraftSpan as DraftSpan
from slipstream.v1.types_pb2 import WatchResponse as WatchResponse
from slipstream.v1.types_pb2 import AcceptanceRule as AcceptanceRule
from slipstream.v1.types_pb2 import RoundReason as RoundReason
from slipstream.v1.types_pb2 import FinishReason as FinishReason
from slipstream.v1.types_pb2 import Role as Role

DESCRIPTOR: _descriptor.FileDescriptor
ACCEPTANCE_RULE_UNSPECIFIED: _types_pb2.AcceptanceRule
ACCEPTANCE_RULE_COUPLED: _types_pb2.AcceptanceRule
ACCEPTANCE_RULE_REJECTION: _types_pb2.AcceptanceRule
ACCEPTANCE_RULE_BLOCK: _types_pb2.AcceptanceRule
ACCEPTANCE_RULE_RECURSIVE: _types_pb2.AcceptanceRule
ACCEPTANCE_RULE_TYPICAL: _types_pb2.AcceptanceRule
ROUND_REASON_UNSPECIFIED: _types_pb2.RoundReason
ROUND_REASON_FIRST: _types_pb2.RoundReason
ROUND_REASON_SLOW: _types_pb2.RoundReason
ROUND_REASON_MISSED: _types_pb2.RoundReason
ROUND_REASON_REJECTED: _types_pb2.RoundReason
ROUND_REASON_FAILED: _types_pb2.RoundReason
ROUND_REASON_ASKED: _types_pb2.RoundReason
FINISH_REASON_UNSPECIFIED: _types_pb2.FinishReason
FINISH_REASON_STOP: _types_pb2.FinishReason
FINISH_REASON_LENGTH: _types_pb2.FinishReason
FINISH_REASON_CANCELLED: _types_pb2.FinishReason
FINISH_REASON_ERROR: _types_pb2.FinishReason
ROLE_UNSPECIFIED: _types_pb2.Role
ROLE_DRAFTER: _types_pb2.Role
ROLE_VERIFIER: _types_pb2.Role

class MissCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_CAUSE_UNSPECIFIED: _ClassVar[MissCause]
    MISS_CAUSE_NO_DRAFTER: _ClassVar[MissCause]
    MISS_CAUSE_OPENING: _ClassVar[MissCause]
    MISS_CAUSE_DIVERGED: _ClassVar[MissCause]
    MISS_CAUSE_EXHAUSTED: _ClassVar[MissCause]
    MISS_CAUSE_NOT_WANTED: _ClassVar[MissCause]
MISS_CAUSE_UNSPECIFIED: MissCause
MISS_CAUSE_NO_DRAFTER: MissCause
MISS_CAUSE_OPENING: MissCause
MISS_CAUSE_DIVERGED: MissCause
MISS_CAUSE_EXHAUSTED: MissCause
MISS_CAUSE_NOT_WANTED: MissCause

class DecodeRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[DecodeCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[DecodeCommand, _Mapping]]] = ...) -> None: ...

class DecodeCommand(_message.Message):
    __slots__ = ("session", "epoch", "open", "attach", "credit", "close")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    open: DecodeOpen
    attach: DecodeAttach
    credit: DecodeCredit
    close: DecodeClose
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., open: _Optional[_Union[DecodeOpen, _Mapping]] = ..., attach: _Optional[_Union[DecodeAttach, _Mapping]] = ..., credit: _Optional[_Union[DecodeCredit, _Mapping]] = ..., close: _Optional[_Union[DecodeClose, _Mapping]] = ...) -> None: ...

class DecodeOpen(_message.Message):
    __slots__ = ("key", "prefix", "sampling", "max_length", "stop_token_ids", "policy", "drafters", "credit", "prediction_token_ids", "cache_salt", "workload", "priority", "structured_output", "top_logprobs", "trace", "min_length", "round_details", "arithmetic", "tenant", "prompt_logprobs", "reasoning_limit")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    MIN_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ROUND_DETAILS_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REASONING_LIMIT_FIELD_NUMBER: _ClassVar[int]
    key: _types_pb2.SessionKey
    prefix: _types_pb2.Prefix
    sampling: _types_pb2.SamplingOptions
    max_length: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    policy: DecodePolicy
    drafters: _containers.RepeatedCompositeFieldContainer[DrafterAddress]
    credit: int
    prediction_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    workload: str
    priority: int
    structured_output: _types_pb2.StructuredOutput
    top_logprobs: int
    trace: _types_pb2.TraceContext
    min_length: int
    round_details: bool
    arithmetic: str
    tenant: str
    prompt_logprobs: int
    reasoning_limit: _types_pb2.ReasoningLimit
    def __init__(self, key: _Optional[_Union[_types_pb2.SessionKey, _Mapping]] = ..., prefix: _Optional[_Union[_types_pb2.Prefix, _Mapping]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingOptions, _Mapping]] = ..., max_length: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., policy: _Optional[_Union[DecodePolicy, _Mapping]] = ..., drafters: _Optional[_Iterable[_Union[DrafterAddress, _Mapping]]] = ..., credit: _Optional[int] = ..., prediction_token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ..., workload: _Optional[str] = ..., priority: _Optional[int] = ..., structured_output: _Optional[_Union[_types_pb2.StructuredOutput, _Mapping]] = ..., top_logprobs: _Optional[int] = ..., trace: _Optional[_Union[_types_pb2.TraceContext, _Mapping]] = ..., min_length: _Optional[int] = ..., round_details: _Optional[bool] = ..., arithmetic: _Optional[str] = ..., tenant: _Optional[str] = ..., prompt_logprobs: _Optional[int] = ..., reasoning_limit: _Optional[_Union[_types_pb2.ReasoningLimit, _Mapping]] = ...) -> None: ...

class DrafterAddress(_message.Message):
    __slots__ = ("address", "name", "trusted", "shadow")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TRUSTED_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    address: str
    name: str
    trusted: bool
    shadow: bool
    def __init__(self, address: _Optional[str] = ..., name: _Optional[str] = ..., trusted: _Optional[bool] = ..., shadow: _Optional[bool] = ...) -> None: ...

class DecodeAttach(_message.Message):
    __slots__ = ("drafters",)
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    drafters: _containers.RepeatedCompositeFieldContainer[DrafterAddress]
    def __init__(self, drafters: _Optional[_Iterable[_Union[DrafterAddress, _Mapping]]] = ...) -> None: ...

class DecodePolicy(_message.Message):
    __slots__ = ("max_draft_tokens",)
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_draft_tokens: int
    def __init__(self, max_draft_tokens: _Optional[int] = ...) -> None: ...

class DecodeCredit(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    def __init__(self, tokens: _Optional[int] = ...) -> None: ...

class DecodeClose(_message.Message):
    __slots__ = ("length",)
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    length: int
    def __init__(self, length: _Optional[int] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("rounds", "drafter_events", "ends")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_EVENTS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    rounds: _containers.RepeatedCompositeFieldContainer[Round]
    drafter_events: _containers.RepeatedCompositeFieldContainer[DrafterEvent]
    ends: _containers.RepeatedCompositeFieldContainer[SessionEnd]
    def __init__(self, rounds: _Optional[_Iterable[_Union[Round, _Mapping]]] = ..., drafter_events: _Optional[_Iterable[_Union[DrafterEvent, _Mapping]]] = ..., ends: _Optional[_Iterable[_Union[SessionEnd, _Mapping]]] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("session", "epoch", "base_length", "token_ids", "drafted", "accepted", "wait_us", "verify_us", "miss", "bubble_us", "drafters", "logprobs", "ended_unix_nano", "cost_us", "shadows", "cached_tokens", "bonus", "drafts", "traced", "prompt_logprobs")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    WAIT_US_FIELD_NUMBER: _ClassVar[int]
    VERIFY_US_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    BUBBLE_US_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENDED_UNIX_NANO_FIELD_NUMBER: _ClassVar[int]
    COST_US_FIELD_NUMBER: _ClassVar[int]
    SHADOWS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BONUS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    TRACED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    base_length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    drafted: int
    accepted: int
    wait_us: int
    verify_us: int
    miss: MissCause
    bubble_us: int
    drafters: _containers.RepeatedCompositeFieldContainer[_types_pb2.DrafterShare]
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    ended_unix_nano: int
    cost_us: int
    shadows: _containers.RepeatedCompositeFieldContainer[ShadowScore]
    cached_tokens: int
    bonus: bool
    drafts: _containers.RepeatedCompositeFieldContainer[_types_pb2.DraftSpan]
    traced: _types_pb2.RoundReason
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., base_length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., wait_us: _Optional[int] = ..., verify_us: _Optional[int] = ..., miss: _Optional[_Union[MissCause, str]] = ..., bubble_us: _Optional[int] = ..., drafters: _Optional[_Iterable[_Union[_types_pb2.DrafterShare, _Mapping]]] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ..., ended_unix_nano: _Optional[int] = ..., cost_us: _Optional[int] = ..., shadows: _Optional[_Iterable[_Union[ShadowScore, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., bonus: _Optional[bool] = ..., drafts: _Optional[_Iterable[_Union[_types_pb2.DraftSpan, _Mapping]]] = ..., traced: _Optional[_Union[_types_pb2.RoundReason, str]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class ShadowScore(_message.Message):
    __slots__ = ("drafter", "drafted", "accepted")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    drafted: int
    accepted: int
    def __init__(self, drafter: _Optional[str] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ...) -> None: ...

class DrafterEvent(_message.Message):
    __slots__ = ("session", "epoch", "drafter", "failure")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    drafter: str
    failure: _types_pb2.Failure
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., drafter: _Optional[str] = ..., failure: _Optional[_Union[_types_pb2.Failure, _Mapping]] = ...) -> None: ...

class SessionEnd(_message.Message):
    __slots__ = ("session", "epoch", "reason", "failure")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    reason: _types_pb2.FinishReason
    failure: _types_pb2.Failure
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., failure: _Optional[_Union[_types_pb2.Failure, _Mapping]] = ...) -> None: ...
