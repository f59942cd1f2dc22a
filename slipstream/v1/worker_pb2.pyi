from slipstream.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_DRAFTER: _ClassVar[Role]
    ROLE_VERIFIER: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_DRAFTER: Role
ROLE_VERIFIER: Role

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
    role: Role
    method: str
    costs: CostTable
    started_unix_ms: int
    def __init__(self, model: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ..., role: _Optional[_Union[Role, str]] = ..., method: _Optional[str] = ..., costs: _Optional[_Union[CostTable, _Mapping]] = ..., started_unix_ms: _Optional[int] = ...) -> None: ...

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
