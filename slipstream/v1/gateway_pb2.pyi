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

class GenerateRequest(_message.Message):
    __slots__ = ("model", "prompt", "prompt_token_ids", "chat", "sampling", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "speculation", "workload", "cache_salt", "prediction", "priority", "structured_output", "logprobs", "top_logprobs", "min_tokens", "annotation", "mixed_arithmetic", "prompt_logprobs", "shown_special_token_ids", "bad_words", "reasoning_limit", "include_stop", "show_special_tokens", "stream_interval")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANNOTATION_FIELD_NUMBER: _ClassVar[int]
    MIXED_ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SHOWN_SPECIAL_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    REASONING_LIMIT_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    SHOW_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    prompt_token_ids: _types_pb2.TokenIds
    chat: Chat
    sampling: _types_pb2.SamplingOptions
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    speculation: SpeculationOptions
    workload: str
    cache_salt: str
    prediction: Prediction
    priority: int
    structured_output: _types_pb2.StructuredOutput
    logprobs: bool
    top_logprobs: int
    min_tokens: int
    annotation: bytes
    mixed_arithmetic: bool
    prompt_logprobs: int
    shown_special_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    reasoning_limit: _types_pb2.ReasoningLimit
    include_stop: bool
    show_special_tokens: bool
    stream_interval: int
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., prompt_token_ids: _Optional[_Union[_types_pb2.TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingOptions, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., speculation: _Optional[_Union[SpeculationOptions, _Mapping]] = ..., workload: _Optional[str] = ..., cache_salt: _Optional[str] = ..., prediction: _Optional[_Union[Prediction, _Mapping]] = ..., priority: _Optional[int] = ..., structured_output: _Optional[_Union[_types_pb2.StructuredOutput, _Mapping]] = ..., logprobs: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., min_tokens: _Optional[int] = ..., annotation: _Optional[bytes] = ..., mixed_arithmetic: _Optional[bool] = ..., prompt_logprobs: _Optional[int] = ..., shown_special_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ..., reasoning_limit: _Optional[_Union[_types_pb2.ReasoningLimit, _Mapping]] = ..., include_stop: _Optional[bool] = ..., show_special_tokens: _Optional[bool] = ..., stream_interval: _Optional[int] = ...) -> None: ...

class StoredRequest(_message.Message):
    __slots__ = ("owner", "revision", "vocabulary_fingerprint", "edited_tokens", "arithmetics", "response", "moves", "follows_prompt")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EDITED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ARITHMETICS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_PROMPT_FIELD_NUMBER: _ClassVar[int]
    owner: str
    revision: int
    vocabulary_fingerprint: str
    edited_tokens: int
    arithmetics: _containers.RepeatedCompositeFieldContainer[ArithmeticSpan]
    response: bytes
    moves: int
    follows_prompt: bool
    def __init__(self, owner: _Optional[str] = ..., revision: _Optional[int] = ..., vocabulary_fingerprint: _Optional[str] = ..., edited_tokens: _Optional[int] = ..., arithmetics: _Optional[_Iterable[_Union[ArithmeticSpan, _Mapping]]] = ..., response: _Optional[bytes] = ..., moves: _Optional[int] = ..., follows_prompt: _Optional[bool] = ...) -> None: ...

class ArithmeticSpan(_message.Message):
    __slots__ = ("arithmetic", "offset")
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    arithmetic: str
    offset: int
    def __init__(self, arithmetic: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("text", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _types_pb2.TokenIds
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[_types_pb2.TokenIds, _Mapping]] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "tools_json", "template_variables_json")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_VARIABLES_JSON_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools_json: str
    template_variables_json: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools_json: _Optional[str] = ..., template_variables_json: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "fields_json")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    FIELDS_JSON_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    fields_json: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., fields_json: _Optional[str] = ...) -> None: ...

class SpeculationOptions(_message.Message):
    __slots__ = ("disabled", "max_draft_tokens", "drafters", "rounds")
    DISABLED_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    disabled: bool
    max_draft_tokens: int
    drafters: _containers.RepeatedScalarFieldContainer[str]
    rounds: bool
    def __init__(self, disabled: _Optional[bool] = ..., max_draft_tokens: _Optional[int] = ..., drafters: _Optional[_Iterable[str]] = ..., rounds: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "delta", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    delta: Delta
    finished: Finished
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("session_id", "seed", "prompt_token_ids", "model", "revision")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    seed: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    model: str
    revision: int
    def __init__(self, session_id: _Optional[str] = ..., seed: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., model: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("offset", "token_ids", "text", "logprobs", "rounds", "prompt_logprobs")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    offset: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[Logprob]
    rounds: _containers.RepeatedCompositeFieldContainer[RoundDetails]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[Logprob]
    def __init__(self, offset: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[Logprob, _Mapping]]] = ..., rounds: _Optional[_Iterable[_Union[RoundDetails, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[Logprob, _Mapping]]] = ...) -> None: ...

class RoundDetails(_message.Message):
    __slots__ = ("number", "offset", "texts", "drafted", "accepted", "bonus", "drafters", "drafts", "wait_us", "verify_us", "bubble_us", "at_us")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    BONUS_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    WAIT_US_FIELD_NUMBER: _ClassVar[int]
    VERIFY_US_FIELD_NUMBER: _ClassVar[int]
    BUBBLE_US_FIELD_NUMBER: _ClassVar[int]
    AT_US_FIELD_NUMBER: _ClassVar[int]
    number: int
    offset: int
    texts: _containers.RepeatedScalarFieldContainer[str]
    drafted: int
    accepted: int
    bonus: bool
    drafters: _containers.RepeatedCompositeFieldContainer[_types_pb2.DrafterShare]
    drafts: _containers.RepeatedCompositeFieldContainer[_types_pb2.DraftSpan]
    wait_us: int
    verify_us: int
    bubble_us: int
    at_us: int
    def __init__(self, number: _Optional[int] = ..., offset: _Optional[int] = ..., texts: _Optional[_Iterable[str]] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., bonus: _Optional[bool] = ..., drafters: _Optional[_Iterable[_Union[_types_pb2.DrafterShare, _Mapping]]] = ..., drafts: _Optional[_Iterable[_Union[_types_pb2.DraftSpan, _Mapping]]] = ..., wait_us: _Optional[int] = ..., verify_us: _Optional[int] = ..., bubble_us: _Optional[int] = ..., at_us: _Optional[int] = ...) -> None: ...

class Logprob(_message.Message):
    __slots__ = ("token", "logprob", "top")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token: TokenText
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, token: _Optional[_Union[TokenText, _Mapping]] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token", "logprob")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token: TokenText
    logprob: float
    def __init__(self, token: _Optional[_Union[TokenText, _Mapping]] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenText(_message.Message):
    __slots__ = ("token_id", "text", "bytes")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    text: str
    bytes: bytes
    def __init__(self, token_id: _Optional[int] = ..., text: _Optional[str] = ..., bytes: _Optional[bytes] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "stop", "output_tokens", "statistics", "stop_token_id")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    reason: _types_pb2.FinishReason
    stop: str
    output_tokens: int
    statistics: Statistics
    stop_token_id: int
    def __init__(self, reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., stop: _Optional[str] = ..., output_tokens: _Optional[int] = ..., statistics: _Optional[_Union[Statistics, _Mapping]] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class Statistics(_message.Message):
    __slots__ = ("rounds", "rounds_with_drafts", "drafted", "accepted", "ttft_s", "e2e_s", "wait_s", "verify_s", "rehomed", "hits", "misses", "bubble_s", "accepted_prediction_tokens", "rejected_prediction_tokens", "drafters", "emitted", "accepted_lengths", "max_draft_tokens", "cached_prompt_tokens", "step_drafted", "step_accepted", "lossy", "arithmetics")
    class MissesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_WITH_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    E2E_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    REHOMED_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    BUBBLE_S_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    STEP_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    ARITHMETICS_FIELD_NUMBER: _ClassVar[int]
    rounds: int
    rounds_with_drafts: int
    drafted: int
    accepted: int
    ttft_s: float
    e2e_s: float
    wait_s: float
    verify_s: float
    rehomed: int
    hits: int
    misses: _containers.ScalarMap[str, int]
    bubble_s: float
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    drafters: _containers.RepeatedCompositeFieldContainer[DrafterStatistics]
    emitted: int
    accepted_lengths: _containers.RepeatedScalarFieldContainer[int]
    max_draft_tokens: int
    cached_prompt_tokens: int
    step_drafted: _containers.RepeatedScalarFieldContainer[int]
    step_accepted: _containers.RepeatedScalarFieldContainer[int]
    lossy: bool
    arithmetics: _containers.RepeatedCompositeFieldContainer[ArithmeticSpan]
    def __init__(self, rounds: _Optional[int] = ..., rounds_with_drafts: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., ttft_s: _Optional[float] = ..., e2e_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., verify_s: _Optional[float] = ..., rehomed: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[_Mapping[str, int]] = ..., bubble_s: _Optional[float] = ..., accepted_prediction_tokens: _Optional[int] = ..., rejected_prediction_tokens: _Optional[int] = ..., drafters: _Optional[_Iterable[_Union[DrafterStatistics, _Mapping]]] = ..., emitted: _Optional[int] = ..., accepted_lengths: _Optional[_Iterable[int]] = ..., max_draft_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., step_drafted: _Optional[_Iterable[int]] = ..., step_accepted: _Optional[_Iterable[int]] = ..., lossy: _Optional[bool] = ..., arithmetics: _Optional[_Iterable[_Union[ArithmeticSpan, _Mapping]]] = ...) -> None: ...

class DrafterStatistics(_message.Message):
    __slots__ = ("name", "drafted", "accepted", "rounds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    drafted: int
    accepted: int
    rounds: int
    def __init__(self, name: _Optional[str] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., rounds: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("session_id", "offset", "characters", "revision", "mixed_arithmetic", "stream_interval")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHARACTERS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MIXED_ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    offset: int
    characters: int
    revision: int
    mixed_arithmetic: bool
    stream_interval: int
    def __init__(self, session_id: _Optional[str] = ..., offset: _Optional[int] = ..., characters: _Optional[int] = ..., revision: _Optional[int] = ..., mixed_arithmetic: _Optional[bool] = ..., stream_interval: _Optional[int] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("started", "delta", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    delta: Delta
    finished: Finished
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("session_id", "output_tokens", "text", "token_ids", "seed", "max_tokens", "branch")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    output_tokens: int
    text: str
    token_ids: _types_pb2.TokenIds
    seed: int
    max_tokens: int
    branch: bool
    def __init__(self, session_id: _Optional[str] = ..., output_tokens: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_types_pb2.TokenIds, _Mapping]] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., branch: _Optional[bool] = ...) -> None: ...

class RollbackResponse(_message.Message):
    __slots__ = ("key", "output_tokens", "revision")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    key: _types_pb2.SessionKey
    output_tokens: int
    revision: int
    def __init__(self, key: _Optional[_Union[_types_pb2.SessionKey, _Mapping]] = ..., output_tokens: _Optional[int] = ..., revision: _Optional[int] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class GetSessionResponse(_message.Message):
    __slots__ = ("key", "model", "seed", "prompt_token_ids", "output_token_ids", "finish_reason", "statistics", "annotation", "arithmetics", "revision")
    KEY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    ANNOTATION_FIELD_NUMBER: _ClassVar[int]
    ARITHMETICS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    key: _types_pb2.SessionKey
    model: str
    seed: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _types_pb2.FinishReason
    statistics: Statistics
    annotation: bytes
    arithmetics: _containers.RepeatedCompositeFieldContainer[ArithmeticSpan]
    revision: int
    def __init__(self, key: _Optional[_Union[_types_pb2.SessionKey, _Mapping]] = ..., model: _Optional[str] = ..., seed: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., statistics: _Optional[_Union[Statistics, _Mapping]] = ..., annotation: _Optional[bytes] = ..., arithmetics: _Optional[_Iterable[_Union[ArithmeticSpan, _Mapping]]] = ..., revision: _Optional[int] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "store")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ServedModel]
    store: SessionStoreState
    def __init__(self, models: _Optional[_Iterable[_Union[ServedModel, _Mapping]]] = ..., store: _Optional[_Union[SessionStoreState, _Mapping]] = ...) -> None: ...

class SessionStoreState(_message.Message):
    __slots__ = ("kind", "answers")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    answers: bool
    def __init__(self, kind: _Optional[str] = ..., answers: _Optional[bool] = ...) -> None: ...

class ServedModel(_message.Message):
    __slots__ = ("model", "verifiers", "drafters", "paused_verifiers", "arithmetics", "sampling_defaults", "verifiers_away", "pause_causes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    ARITHMETICS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    VERIFIERS_AWAY_FIELD_NUMBER: _ClassVar[int]
    PAUSE_CAUSES_FIELD_NUMBER: _ClassVar[int]
    model: _types_pb2.ModelInfo
    verifiers: int
    drafters: _containers.RepeatedCompositeFieldContainer[ServedDrafter]
    paused_verifiers: int
    arithmetics: _containers.RepeatedCompositeFieldContainer[ServedArithmetic]
    sampling_defaults: _types_pb2.SamplingOptions
    verifiers_away: int
    pause_causes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ..., verifiers: _Optional[int] = ..., drafters: _Optional[_Iterable[_Union[ServedDrafter, _Mapping]]] = ..., paused_verifiers: _Optional[int] = ..., arithmetics: _Optional[_Iterable[_Union[ServedArithmetic, _Mapping]]] = ..., sampling_defaults: _Optional[_Union[_types_pb2.SamplingOptions, _Mapping]] = ..., verifiers_away: _Optional[int] = ..., pause_causes: _Optional[_Iterable[str]] = ...) -> None: ...

class ServedArithmetic(_message.Message):
    __slots__ = ("arithmetic", "verifiers", "batch_invariant", "newest")
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    arithmetic: str
    verifiers: int
    batch_invariant: bool
    newest: bool
    def __init__(self, arithmetic: _Optional[str] = ..., verifiers: _Optional[int] = ..., batch_invariant: _Optional[bool] = ..., newest: _Optional[bool] = ...) -> None: ...

class ServedDrafter(_message.Message):
    __slots__ = ("name", "model", "mismatch", "warning", "away", "replicas", "replicas_away")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MISMATCH_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    AWAY_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_AWAY_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: _types_pb2.ModelInfo
    mismatch: str
    warning: str
    away: bool
    replicas: int
    replicas_away: int
    def __init__(self, name: _Optional[str] = ..., model: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ..., mismatch: _Optional[str] = ..., warning: _Optional[str] = ..., away: _Optional[bool] = ..., replicas: _Optional[int] = ..., replicas_away: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GetFleetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetFleetResponse(_message.Message):
    __slots__ = ("workers", "sessions")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[FleetWorker]
    sessions: int
    def __init__(self, workers: _Optional[_Iterable[_Union[FleetWorker, _Mapping]]] = ..., sessions: _Optional[int] = ...) -> None: ...

class FleetWorker(_message.Message):
    __slots__ = ("role", "name", "address", "model", "present", "problem", "warning", "load")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    role: _types_pb2.Role
    name: str
    address: str
    model: _types_pb2.ModelInfo
    present: bool
    problem: str
    warning: str
    load: _types_pb2.WatchResponse
    def __init__(self, role: _Optional[_Union[_types_pb2.Role, str]] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., model: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ..., present: _Optional[bool] = ..., problem: _Optional[str] = ..., warning: _Optional[str] = ..., load: _Optional[_Union[_types_pb2.WatchResponse, _Mapping]] = ...) -> None: ...

class GetExperimentRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetExperimentResponse(_message.Message):
    __slots__ = ("name", "arms_setting", "arms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARMS_SETTING_FIELD_NUMBER: _ClassVar[int]
    ARMS_FIELD_NUMBER: _ClassVar[int]
    name: str
    arms_setting: str
    arms: _containers.RepeatedCompositeFieldContainer[ExperimentArm]
    def __init__(self, name: _Optional[str] = ..., arms_setting: _Optional[str] = ..., arms: _Optional[_Iterable[_Union[ExperimentArm, _Mapping]]] = ...) -> None: ...

class ExperimentArm(_message.Message):
    __slots__ = ("name", "begun", "finished", "samples")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    name: str
    begun: int
    finished: int
    samples: _containers.RepeatedCompositeFieldContainer[SessionSample]
    def __init__(self, name: _Optional[str] = ..., begun: _Optional[int] = ..., finished: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[SessionSample, _Mapping]]] = ...) -> None: ...

class SessionSample(_message.Message):
    __slots__ = ("priority", "tokens", "served", "shadows", "ttft_s", "e2e_s", "verifier_s", "drafter_s")
    class ShadowsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: DraftSample
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[DraftSample, _Mapping]] = ...) -> None: ...
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    SHADOWS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    E2E_S_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_S_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_S_FIELD_NUMBER: _ClassVar[int]
    priority: int
    tokens: int
    served: DraftSample
    shadows: _containers.MessageMap[str, DraftSample]
    ttft_s: float
    e2e_s: float
    verifier_s: float
    drafter_s: float
    def __init__(self, priority: _Optional[int] = ..., tokens: _Optional[int] = ..., served: _Optional[_Union[DraftSample, _Mapping]] = ..., shadows: _Optional[_Mapping[str, DraftSample]] = ..., ttft_s: _Optional[float] = ..., e2e_s: _Optional[float] = ..., verifier_s: _Optional[float] = ..., drafter_s: _Optional[float] = ...) -> None: ...

class DraftSample(_message.Message):
    __slots__ = ("rounds", "rounds_with_drafts", "drafted", "accepted", "reached")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_WITH_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    rounds: int
    rounds_with_drafts: int
    drafted: int
    accepted: int
    reached: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rounds: _Optional[int] = ..., rounds_with_drafts: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., reached: _Optional[_Iterable[int]] = ...) -> None: ...
