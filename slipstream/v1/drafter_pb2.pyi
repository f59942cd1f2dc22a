from slipstream.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[DraftCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[DraftCommand, _Mapping]]] = ...) -> None: ...

class DraftCommand(_message.Message):
    __slots__ = ("session", "epoch", "open", "commit", "policy", "close")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    open: DraftOpen
    commit: DraftCommit
    policy: DraftPolicy
    close: DraftClose
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., open: _Optional[_Union[DraftOpen, _Mapping]] = ..., commit: _Optional[_Union[DraftCommit, _Mapping]] = ..., policy: _Optional[_Union[DraftPolicy, _Mapping]] = ..., close: _Optional[_Union[DraftClose, _Mapping]] = ...) -> None: ...

class DraftOpen(_message.Message):
    __slots__ = ("key", "prefix", "sampling", "target", "policy", "max_length", "prediction_token_ids", "cache_salt", "structured_output", "trace", "tenant")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    key: _types_pb2.SessionKey
    prefix: _types_pb2.Prefix
    sampling: _types_pb2.SamplingOptions
    target: _types_pb2.ModelInfo
    policy: DraftPolicy
    max_length: int
    prediction_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    structured_output: _types_pb2.StructuredOutput
    trace: _types_pb2.TraceContext
    tenant: str
    def __init__(self, key: _Optional[_Union[_types_pb2.SessionKey, _Mapping]] = ..., prefix: _Optional[_Union[_types_pb2.Prefix, _Mapping]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingOptions, _Mapping]] = ..., target: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ..., policy: _Optional[_Union[DraftPolicy, _Mapping]] = ..., max_length: _Optional[int] = ..., prediction_token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ..., structured_output: _Optional[_Union[_types_pb2.StructuredOutput, _Mapping]] = ..., trace: _Optional[_Union[_types_pb2.TraceContext, _Mapping]] = ..., tenant: _Optional[str] = ...) -> None: ...

class DraftCommit(_message.Message):
    __slots__ = ("base_length", "token_ids", "traced")
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TRACED_FIELD_NUMBER: _ClassVar[int]
    base_length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    traced: bool
    def __init__(self, base_length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., traced: _Optional[bool] = ...) -> None: ...

class DraftPolicy(_message.Message):
    __slots__ = ("max_nodes", "min_path_probability")
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    MIN_PATH_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    max_nodes: int
    min_path_probability: float
    def __init__(self, max_nodes: _Optional[int] = ..., min_path_probability: _Optional[float] = ...) -> None: ...

class DraftClose(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("candidates", "refusals")
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    candidates: _containers.RepeatedCompositeFieldContainer[_types_pb2.Candidates]
    refusals: _containers.RepeatedCompositeFieldContainer[DraftRefusal]
    def __init__(self, candidates: _Optional[_Iterable[_Union[_types_pb2.Candidates, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[DraftRefusal, _Mapping]]] = ...) -> None: ...

class DraftRefusal(_message.Message):
    __slots__ = ("session", "epoch", "failure")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    failure: _types_pb2.Failure
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., failure: _Optional[_Union[_types_pb2.Failure, _Mapping]] = ...) -> None: ...
