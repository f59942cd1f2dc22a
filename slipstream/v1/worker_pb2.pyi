from slipstream.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
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

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model", "role", "method", "costs", "started_unix_ms")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    model: _types_pb2.ModelInfo
    role: _types_pb2.Role
    method: str
    costs: CostTable
    started_unix_ms: int
    def __init__(self, model: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ..., role: _Optional[_Union[_types_pb2.Role, str]] = ..., method: _Optional[str] = ..., costs: _Optional[_Union[CostTable, _Mapping]] = ..., started_unix_ms: _Optional[int] = ...) -> None: ...

class CostTable(_message.Message):
    __slots__ = ("tokens", "sessions", "seconds")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    sessions: _containers.RepeatedScalarFieldContainer[int]
    seconds: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., sessions: _Optional[_Iterable[int]] = ..., seconds: _Optional[_Iterable[float]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
