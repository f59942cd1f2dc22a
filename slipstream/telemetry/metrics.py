"""Every metric, declared once. A role's `MetricsCollector` has a source for each metric of the role and for no other.

Names end in their unit, counters in `_total`; seconds everywhere. Labels have few values: values that
clients or peers choose go through `BoundedLabels`. `python -m slipstream.telemetry` prints the lists of
`docs/metrics.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from prometheus_client import Histogram

Role = Literal["gateway", "verifier", "drafter"]
ROLES: tuple[Role, ...] = ("gateway", "verifier", "drafter")
MODEL_ROLES: tuple[Role, ...] = ("verifier", "drafter")
REQUEST = ("model", "workload")
"""Labels of requests; another one is added here and in `gateway.telemetry.request_metrics`."""
CANDIDATES = ("model", "drafter", "method", "workload")
"""Labels of candidates."""

DEPRECATED: Mapping[str, str] = {
    "slipstream_kv_blocks_total": "slipstream_kv_blocks",
    "slipstream_work_waiting": "slipstream_text_jobs_waiting",
    "slipstream_work_seconds": "slipstream_text_job_seconds",
    "slipstream_work_failures_total": "slipstream_text_job_failures_total",
    "slipstream_store_evicts": "slipstream_store_eviction_enabled",
    "slipstream_prefix_tokens_sought_total": "slipstream_prefix_cache_queried_tokens_total",
    "slipstream_prefix_tokens_found_total": "slipstream_prefix_cache_hit_tokens_total",
    "slipstream_rolled_back_tokens_total": "slipstream_rejected_tokens_total",
    "slipstream_rolled_back_seconds_total": "slipstream_rejected_seconds_total",
    "slipstream_drafter_guessed_tokens_total": "slipstream_drafter_drafted_candidates_total",
    "slipstream_drafter_told_tokens_total": "slipstream_drafter_sent_candidates_total",
}
"""Old names of metrics and the present ones, whose numbers they have; old names go in the next release."""

# Buckets, in seconds unless they count something.
_STEPS = (0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_WHOLE = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)
_WRITE = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_SESSIONS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
_TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    """Name under which it is scraped."""
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    roles: tuple[Role, ...]
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""
    same_as: str = ""
    """Name of the metric whose numbers it has."""

    def histogram(self) -> Histogram:
        """A histogram to observe with, in no registry."""
        return Histogram(self.name, self.help, self.labels, registry=None, buckets=self.buckets)


def _gateway(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, _kind(name), help, ("gateway",), labels)


def _verifier(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, _kind(name), help, ("verifier",), labels)


def _drafter(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, _kind(name), help, ("drafter",), labels)


def _histogram(name: str, help: str, role: Role, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name, "histogram", help, (role,), labels, buckets)


def _kind(name: str) -> Literal["counter", "gauge"]:
    return "counter" if name.endswith("_total") else "gauge"


# All roles.

BUILD = Metric(
    "slipstream_build_info", "gauge", "Version of the process; always 1.", ROLES, ("role", "version", "python")
)
FORWARD = Metric(
    "slipstream_forward_info",
    "gauge",
    "Path of the model's passes: `kernels`, `lean` or `library`; on vLLM CUDA graphs of chains of any length "
    "(`full`), of equal ones (`padded`), of parts of a pass (`piecewise`), or none (`eager`); `refused` is 1 where a "
    "faster one was refused. Always 1.",
    MODEL_ROLES,
    ("path", "refused"),
)
RPC_ERRORS = Metric(
    "slipstream_rpc_errors_total",
    "counter",
    "Calls that ended with an error, refused calls and broken streams included.",
    ROLES,
    ("method", "code", "reason"),
)
LINK_BYTES = Metric(
    "slipstream_link_bytes_total",
    "counter",
    "Bytes of messages on streams to and from the role `peer`, without overhead of gRPC and TLS.",
    ROLES,
    ("peer", "direction"),
)
SPANS = Metric(
    "slipstream_spans_total",
    "counter",
    "Spans by outcome, for each exporter: `made`, and of those `sent`, which a collector or file accepted.",
    ROLES,
    ("outcome",),
)

# Gateway: rounds, as the verifiers report them.

ROUNDS = _gateway("slipstream_rounds_total", "Rounds: verifier steps of one session that committed tokens.", *REQUEST)
ROUNDS_WITH_DRAFTS = _gateway(
    "slipstream_rounds_with_drafts_total", "Rounds in which candidates were verified.", *REQUEST
)
DRAFTED = _gateway("slipstream_drafted_tokens_total", "Candidates verified.", *REQUEST)
ACCEPTED = _gateway("slipstream_accepted_tokens_total", "Candidates accepted.", *REQUEST)
PROMPT = _gateway("slipstream_prompt_tokens_total", "Tokens of the prompts of new sessions.", *REQUEST)
EMITTED = _gateway("slipstream_emitted_tokens_total", "Output tokens committed.", *REQUEST)
ACCEPTED_BY_DEPTH = _gateway(
    "slipstream_accepted_by_depth_total",
    "Rounds that accepted a candidate at this depth below the last committed token.",
    *REQUEST,
    "depth",
)
HITS = _gateway(
    "slipstream_round_hits_total", "Rounds whose candidates had arrived when the round before ended.", *REQUEST
)
MISSES = _gateway(
    "slipstream_round_misses_total", "Rounds that wanted candidates and had none in time.", *REQUEST, "cause"
)
ROUND_WAIT = _gateway("slipstream_round_wait_seconds_total", "Time between rounds, summed over sessions.", *REQUEST)
ROUND_BUBBLE = _gateway(
    "slipstream_round_bubble_seconds_total",
    "Time in which the step was held back for candidates, summed over sessions.",
    *REQUEST,
)
ROUND_VERIFY = _gateway(
    "slipstream_round_verify_seconds_total", "Duration of the steps of rounds, summed over sessions.", *REQUEST
)
CANDIDATES_VERIFIED = _gateway(
    "slipstream_candidates_verified_total",
    "Candidates verified; one from several drafters counts for each.",
    *CANDIDATES,
)
CANDIDATES_ACCEPTED = _gateway(
    "slipstream_candidates_accepted_total",
    "Candidates accepted; one from several drafters counts for each.",
    *CANDIDATES,
)
CANDIDATE_ROUNDS = _gateway(
    "slipstream_candidate_rounds_total",
    "Rounds in which candidates of the drafter were verified.",
    *CANDIDATES,
)

# Gateway: requests.

REQUESTS = _gateway(
    "slipstream_requests_total",
    "Requests: stop, length; cancelled, disconnected (the client), fenced (rolled back or taken over), invalid; "
    "unavailable, failed; refused (not started, for no fault of the client).",
    *REQUEST,
    "outcome",
)
GOOD_REQUESTS = _gateway(
    "slipstream_requests_good_total",
    "Requests that ended with stop or length within GATEWAY_SLO_TTFT_S and GATEWAY_SLO_TPOT_S (0: no objective).",
    *REQUEST,
)
LOSSY_SESSIONS = _gateway(
    "slipstream_lossy_sessions_total",
    "Sessions under the lossy acceptance rule typical.",
    *REQUEST,
)
GOOD_TOKENS = _gateway("slipstream_good_tokens_total", "Output tokens of good requests.", *REQUEST)
TTFT = _histogram(
    "slipstream_time_to_first_token_seconds",
    "Seconds from a request's arrival to its first token in the log.",
    "gateway",
    _FIRST,
    REQUEST,
)
TPOT = _histogram(
    "slipstream_time_per_output_token_seconds",
    "(E2E - TTFT) / (n - 1), for requests that ended with stop or length after n > 1 tokens.",
    "gateway",
    _TOKEN,
    REQUEST,
)
GAP = _histogram(
    "slipstream_inter_token_seconds",
    "Seconds between two rounds of a session at the gateway; a round commits one token or several.",
    "gateway",
    _TOKEN,
    REQUEST,
)
E2E = _histogram(
    "slipstream_request_seconds",
    "Seconds from a request's arrival to its end with stop or length.",
    "gateway",
    _WHOLE,
    REQUEST,
)
OBJECTIVE = _gateway("slipstream_slo_seconds", "Objective for ttft and tpot; 0 for none.", "objective")
GATEWAY_SESSIONS = _gateway("slipstream_gateway_sessions", "Sessions running.")
GATEWAY_WAITING = _gateway("slipstream_gateway_waiting_sessions", "Sessions that wait for a verifier.")

# Gateway: workers, store, cost.

ARITHMETIC_CHANGES = _gateway(
    "slipstream_arithmetic_changes_total",
    "Texts that continued with another arithmetic (GATEWAY_MIXED_ARITHMETIC).",
)
MODEL = _gateway(
    "slipstream_model_info",
    "Verifiers that answer, by the name of their arithmetic.",
    "model",
    "arithmetic",
    "promise",
)
REHOMINGS = _gateway("slipstream_rehomings_total", "Sessions opened again after their verifier's stream was lost.")
DRAFTER_FAILURES = _gateway("slipstream_drafter_failures_total", "Sessions that lost a drafter.", "drafter", "reason")
BREAKER = _gateway("slipstream_drafter_breaker_state", "Circuit breaker: 0 closed, 1 half-open, 2 open.", "drafter")
WORKERS = _gateway("slipstream_workers", "Connected workers with this name.", "role", "worker")
COST = _gateway(
    "slipstream_cost_per_hour",
    "Configured price of the connected workers.",
    "role",
)
TEXT_JOBS_WAITING = _gateway(
    "slipstream_text_jobs_waiting", "Long texts and bodies that wait for a process that reads them.", "kind"
)
TEXT_JOB_SECONDS = _histogram(
    "slipstream_text_job_seconds",
    "Seconds from the arrival of a long text or body to its result.",
    "gateway",
    _FIRST,
    ("kind",),
)
TEXT_JOB_FAILURES = _gateway(
    "slipstream_text_job_failures_total",
    "Long texts and bodies not read: refused (too many of the tenant's wait), timeout, disconnected (the client), "
    "too_costly, process_ended.",
    "kind",
    "reason",
)
STORE_SECONDS = _histogram(
    "slipstream_store_write_seconds",
    "Duration of one attempt of an operation on the session store.",
    "gateway",
    _WRITE,
    ("operation",),
)
STORE_ERRORS = _gateway(
    "slipstream_store_errors_total", "Attempts that failed or that the session store refused.", "operation", "reason"
)
STORE_USED = _gateway("slipstream_store_memory_used_bytes", "Memory of the session store in use.")
STORE_MAX = _gateway("slipstream_store_memory_max_bytes", "The session store's `maxmemory`; 0 for none.")
STORE_EVICTION = _gateway(
    "slipstream_store_eviction_enabled",
    "1 where the session store evicts sessions when it is full.",
)
STORE_LAG = _gateway("slipstream_store_lag_seconds", "Age of the oldest write that is not stored yet.")

# Gateway: the same numbers under vLLM's names, for load balancers, dashboards and load tools that use those, and under
# OpenTelemetry's (`gen_ai.server.*`, as Prometheus spells them). vLLM's histograms are not observed: `Renamed`.

_VLLM = ("model_name", "engine")
_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")


def _same(name: str, other: Metric, labels: tuple[str, ...]) -> Metric:
    return replace(other, name=name, help=f"Same as {other.name}.", labels=labels, same_as=other.name)


VLLM_RUNNING = _gateway("vllm:num_requests_running", "Sessions on a verifier.", *_VLLM)
VLLM_WAITING = _gateway("vllm:num_requests_waiting", "Sessions that wait for a verifier.", *_VLLM)
VLLM_KV = _gateway("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1: mean of the verifiers.", *_VLLM)
VLLM_SUCCESS = _gateway(
    "vllm:request_success_total", "Requests that ended with stop or length.", *_VLLM, "finished_reason"
)
VLLM_POSITIONS = _gateway(
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "Rounds that accepted a candidate at this position, from 0.",
    *_VLLM,
    "position",
)
VLLM_PROMPT = _same("vllm:prompt_tokens_total", PROMPT, _VLLM)
VLLM_GENERATED = _same("vllm:generation_tokens_total", EMITTED, _VLLM)
VLLM_DRAFTS = _same("vllm:spec_decode_num_drafts_total", ROUNDS_WITH_DRAFTS, _VLLM)
VLLM_DRAFTED = _same("vllm:spec_decode_num_draft_tokens_total", DRAFTED, _VLLM)
VLLM_ACCEPTED = _same("vllm:spec_decode_num_accepted_tokens_total", ACCEPTED, _VLLM)
VLLM_TTFT = _same("vllm:time_to_first_token_seconds", TTFT, _VLLM)
VLLM_ITL = _same("vllm:inter_token_latency_seconds", GAP, _VLLM)
VLLM_TPOT = _same("vllm:request_time_per_output_token_seconds", TPOT, _VLLM)
VLLM_E2E = _same("vllm:e2e_request_latency_seconds", E2E, _VLLM)
# With the buckets that the conventions ask for.
GEN_AI_TTFT = replace(
    _same("gen_ai_server_time_to_first_token_seconds", TTFT, _GEN_AI),
    buckets=(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
GEN_AI_TPOT = replace(
    _same("gen_ai_server_time_per_output_token_seconds", TPOT, _GEN_AI),
    buckets=(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
GEN_AI_E2E = replace(
    _same("gen_ai_server_request_duration_seconds", E2E, _GEN_AI),
    buckets=tuple(0.01 * 2**power for power in range(14)),
)

# Verifier.

VERIFIER_SESSIONS = _verifier("slipstream_verifier_sessions", "Open sessions, those that wait for KV blocks included.")
VERIFIER_WAITING = _verifier("slipstream_verifier_waiting_sessions", "Sessions that wait for KV blocks.")
KV_TOTAL = _verifier("slipstream_kv_blocks", "KV blocks in total.")
KV_USED = _verifier("slipstream_kv_blocks_used", "KV blocks held by sessions.")
PREEMPTIONS = _verifier("slipstream_preemptions_total", "Times that a session gave up its KV blocks to another one.")
PREFIX_QUERIED = _verifier(
    "slipstream_prefix_cache_queried_tokens_total",
    "Tokens looked up in the prefix cache.",
)
PREFIX_HIT = _verifier("slipstream_prefix_cache_hit_tokens_total", "Tokens whose KV the prefix cache held.")
STEP_SECONDS = _histogram(
    "slipstream_verifier_step_seconds", "Duration of a step of the target model.", "verifier", _STEPS
)
STEP_SESSIONS = _histogram("slipstream_verifier_step_sessions", "Sessions in a step.", "verifier", _SESSIONS)
STEP_TOKENS = _histogram(
    "slipstream_verifier_step_tokens", "Tokens in a step: pending ones, prompts and candidates.", "verifier", _TOKENS
)
COMMITTED = _verifier("slipstream_verifier_committed_tokens_total", "Tokens committed.")
STEP_FAULTS = _verifier(
    "slipstream_step_faults_total",
    "Faults in steps: split, a pass that was run again in parts; memory, one that lacked memory; session, one that "
    "failed in every pass and was ended; device, a step after which no pass ran.",
    "kind",
)
DRAFT_WAIT = _verifier(
    "slipstream_draft_wait_seconds_total", "Time in which steps were held back for candidates or masks (the bubble)."
)
DRAFTING_PAUSED = _verifier(
    "slipstream_drafting_paused",
    "1 while drafters pause: price, a candidate costs as much as it gains; slower, no session gains as much as "
    "drafting slows it; trial, steps without drafting are being measured.",
    "cause",
)
DRAFTING_SLOWDOWN = _verifier(
    "slipstream_drafting_slowdown",
    "Time of steps with drafting over that without, candidates aside. Sessions that gain less are not drafted for.",
)
DEPTH_DRAFTED = _verifier(
    "slipstream_depth_drafted_tokens_total", "Candidates verified, by depth below the last committed token.", "depth"
)
DEPTH_ACCEPTED = _verifier("slipstream_depth_accepted_tokens_total", "Candidates accepted, by depth.", "depth")
REJECTED = _verifier("slipstream_rejected_tokens_total", "Candidates verified and not accepted.")
REJECTED_SECONDS = _verifier(
    "slipstream_rejected_seconds_total",
    "Time that rejected candidates added to steps, by the measured cost curve.",
)
DROPPED = _verifier(
    "slipstream_candidates_dropped_total",
    "Candidates received and dropped: stale, orphan, diverged, duplicate, full, deep, forbidden, invalid; "
    "unknown_session: for an older epoch or an unknown session.",
    "reason",
)

# Drafter.

DRAFTER_SESSIONS = _drafter("slipstream_drafter_sessions", "Open sessions.")
DRAFTER_BUSY = _drafter("slipstream_drafter_busy_seconds_total", "Time in which the draft model or the index computed.")
DRAFTER_NEEDED = _drafter(
    "slipstream_drafter_needed_seconds_total",
    "Time of passes, weighted for each session with the probability that its text needs the candidate; the rate is "
    "the number of sessions that need the drafter.",
)
PASS_SECONDS = _histogram(
    "slipstream_drafter_pass_seconds", "Duration of a pass of the draft model.", "drafter", _STEPS
)
PASS_SESSIONS = _histogram("slipstream_drafter_pass_sessions", "Sessions in a pass.", "drafter", _SESSIONS)
PASS_TOKENS = _histogram(
    "slipstream_drafter_pass_tokens",
    "Tokens in a pass: committed ones, and nodes of draft trees.",
    "drafter",
    _TOKENS,
)
DRAFTED_CANDIDATES = _drafter("slipstream_drafter_drafted_candidates_total", "Candidates drafted.")
SENT_CANDIDATES = _drafter("slipstream_drafter_sent_candidates_total", "Candidates sent to verifiers.")

_PRESENT = {value.name: value for value in list(globals().values()) if isinstance(value, Metric)}
DECLARED: tuple[Metric, ...] = (
    *_PRESENT.values(),
    *(replace(_PRESENT[new], name=old, help=f"Old name of {new}.", same_as=new) for old, new in DEPRECATED.items()),
)
