"""The names of all spans, events and attributes; `docs/tracing.md` explains each.

Durations are seconds of one process's monotonic clock. Names that begin with `gen_ai.`, `rpc.`, `error.` and `server.`
are OpenTelemetry's conventions, written out here because its package calls most of them unstable.
"""

from __future__ import annotations

SERVICES = ("slipstream-gateway", "slipstream-verifier", "slipstream-drafter")

# A client's request, at the gateway.
GENERATE = "generate"
RESUME = "resume"
# A session's rounds.
PREFILL = "prefill"
ROUND = "round"
DRAFT = "draft"
VERIFY = "verify"
COMMIT = "commit"
# The rounds of one segment: sums.
ROUNDS_SUM = "rounds"
VERIFY_SUM = "verify rounds"
DRAFT_SUM = "draft rounds"
# A verifier's pass over many sessions: a trace of its own.
STEP = "step"

UNSENT_PARENT_KEY, UNSENT_PARENT_VALUE = "slipstream", "unsent"
UNSENT_PARENT = f"{UNSENT_PARENT_KEY}={UNSENT_PARENT_VALUE}"
"""The `tracestate` of a client that names a parent, because a `traceparent` has one, and sends no spans."""

TEXT_COMPLETION = "text_completion"
CHAT = "chat"
PROVIDER_NAME = "slipstream"

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
CONVERSATION = "gen_ai.conversation.id"
REQUEST_MODEL = "gen_ai.request.model"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"
TOP_P = "gen_ai.request.top_p"
TOP_K = "gen_ai.request.top_k"
SEED = "gen_ai.request.seed"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
METHOD = "rpc.method"
STATUS = "rpc.response.status_code"
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
ERROR = "error.type"
ADDRESS = "server.address"

ASKED = "slipstream.asked"
UNSAMPLED = "slipstream.unsampled"
LATE = "slipstream.late"
ARM = "slipstream.arm"
WORKLOAD = "slipstream.workload"
TENANT = "slipstream.tenant"
"""Name of the API key."""
ROUNDS = "slipstream.rounds"
INDEX = "slipstream.round"
EPOCH = "slipstream.epoch"
LENGTH = "slipstream.base_length"
TOKENS = "slipstream.tokens"
CACHED = "slipstream.cached_tokens"
DRAFTED = "slipstream.drafted"
ACCEPTED = "slipstream.accepted"
REJECTED = "slipstream.rejected"
REJECTED_PERCENT = "slipstream.rejected_percent"
OLD_REJECTED = "slipstream.rolled_back"
OLD_REJECTED_PERCENT = "slipstream.rolled_back_percent"
"""Until the next release, beside the present names."""
REHOMED = "slipstream.rehomed"
ARITHMETIC = "slipstream.arithmetic"
"""Which arithmetic wrote the text; of a mixed one each, with the offset of its first output token."""
LOSSY = "slipstream.lossy"
MISS = "slipstream.miss"
DRAFTER = "slipstream.drafter"
DRAFTERS = "slipstream.drafters"
DEPTH = "slipstream.depth"
BUDGET = "slipstream.budget"
BYTES = "slipstream.bytes"
FRAMES = "slipstream.frames"
SENT = "slipstream.sent"
DROPPED = "slipstream.dropped"
DISCARDED = "slipstream.discarded"
PASSES = "slipstream.passes"
SESSIONS = "slipstream.sessions"
STEP_NUMBER = "slipstream.step"
MISSES = "slipstream.misses"
BY_DRAFTER = "slipstream.accepted_by_drafter"
SLOWEST = "slipstream.slowest_s"
REASON = "slipstream.reason"
NAME = "slipstream.span"
WAIT = "slipstream.wait_s"
QUEUE = "slipstream.queue_s"
BUBBLE = "slipstream.bubble_s"
COMPUTE = "slipstream.compute_s"
WIRE = "slipstream.wire_s"
COMMITTING = "slipstream.commit_s"

_REQUEST = (
    *(OPERATION, PROVIDER, CONVERSATION, RESPONSE_ID, RESPONSE_MODEL, FINISH_REASONS, FIRST_CHUNK),
    *(INPUT_TOKENS, OUTPUT_TOKENS, ERROR, SEED, ROUNDS, DRAFTED, ACCEPTED),
    *(REJECTED, REJECTED_PERCENT, OLD_REJECTED, OLD_REJECTED_PERCENT),
    *(REHOMED, ARITHMETIC, ASKED, UNSAMPLED, LATE, ARM, TENANT, WAIT, BUBBLE),
    *(COMPUTE, NAME, LOSSY, MISSES, BY_DRAFTER, METHOD, STATUS, HTTP_METHOD, HTTP_ROUTE, HTTP_STATUS),
)
SPANS: dict[str, frozenset[str]] = {
    GENERATE: frozenset({*_REQUEST, REQUEST_MODEL, MAX_TOKENS, TEMPERATURE, TOP_P, TOP_K, WORKLOAD}),
    RESUME: frozenset(_REQUEST),
    PREFILL: frozenset({EPOCH, TOKENS, CACHED, PASSES, QUEUE, COMPUTE}),
    ROUND: frozenset(
        {INDEX, EPOCH, LENGTH, TOKENS, DRAFTED, ACCEPTED, MISS, DRAFTERS, DISCARDED, REASON}
        | {WAIT, QUEUE, BUBBLE, COMPUTE, WIRE, COMMITTING}
    ),
    DRAFT: frozenset({NAME, DRAFTER, EPOCH, LENGTH, PASSES, DRAFTED, SENT, BYTES, DROPPED, DISCARDED, COMPUTE}),
    VERIFY: frozenset(
        {DRAFTED, ACCEPTED, DEPTH, BUDGET, FRAMES, BYTES, WIRE, DISCARDED, STEP_NUMBER, SESSIONS, TOKENS}
    ),
    COMMIT: frozenset({ROUNDS, TOKENS, ERROR}),
    ROUNDS_SUM: frozenset(
        {INDEX, ROUNDS, EPOCH, LENGTH, TOKENS, DRAFTED, ACCEPTED, MISSES, BY_DRAFTER, SLOWEST}
        | {WAIT, QUEUE, BUBBLE, COMPUTE, WIRE, COMMITTING}
    ),
    VERIFY_SUM: frozenset({ROUNDS, EPOCH, DRAFTED, ACCEPTED, DEPTH, FRAMES, BYTES, WIRE, SLOWEST, COMPUTE}),
    DRAFT_SUM: frozenset({NAME, DRAFTER, EPOCH, LENGTH, ROUNDS, PASSES, DRAFTED, SENT, BYTES, DROPPED, COMPUTE}),
    STEP: frozenset({INDEX, SESSIONS, TOKENS, DRAFTED, BUBBLE}),
}
"""Attributes of each span."""

OPENED = "opened"
LOST = "lost"
ARITHMETIC_CHANGED = "arithmetic.changed"
DRAFTER_LOST = "drafter.lost"
DRAFTER_RESTORED = "drafter.restored"
EVENTS: dict[str, frozenset[str]] = {
    OPENED: frozenset({ADDRESS, EPOCH, LENGTH}),
    LOST: frozenset({ADDRESS, EPOCH, ERROR}),
    ARITHMETIC_CHANGED: frozenset({ARITHMETIC, LENGTH}),
    DRAFTER_LOST: frozenset({DRAFTER, ERROR}),
    DRAFTER_RESTORED: frozenset({DRAFTER}),
}
"""Events of a request, with their attributes."""
