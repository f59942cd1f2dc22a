"""Every metric, declared once. A role's `Meter` has a source for each that the role is to tell, and for no other.

Names end in their unit, counters in `_total`; seconds everywhere. Labels have few values: what clients or peers choose
goes through `labels.Names` first. `python -m slipstream.telemetry` prints the table of `docs/metrics.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prometheus_client import Histogram

Role = Literal["gateway", "verifier", "drafter"]
ROLES: tuple[Role, ...] = ("gateway", "verifier", "drafter")
REQUEST = ("model", "workload")
"""What requests are told apart by. One more way to tell them apart is one more name here and in
`gateway.telemetry.request_metrics`."""

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
    """As it is scraped."""
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    roles: tuple[Role, ...]
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds, of a histogram."""

    def histogram(self) -> Histogram:
        """One to observe with; it is in no registry."""
        return Histogram(self.name, self.help, self.labels, registry=None, buckets=self.buckets)


def _gateway(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, _kind(name), help, ("gateway",), labels)


def _verifier(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, _kind(name), help, ("verifier",), labels)


def _drafter(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, _kind(name), help, ("drafter",), labels)


def _kind(name: str) -> Literal["counter", "gauge"]:
    return "counter" if name.endswith("_total") and name != "slipstream_kv_blocks_total" else "gauge"


# All roles.

RPC_ERRORS = Metric(
    "slipstream_rpc_errors_total",
    "counter",
    "Calls that ended with an error, refused or broken off, by what the caller was told.",
    ROLES,
    ("method", "code", "reason"),
)
LINK_BYTES = Metric(
    "slipstream_link_bytes_total",
    "counter",
    "Bytes of frames on streams between roles, without what gRPC and TLS add; `peer` is the other end's role.",
    ROLES,
    ("peer", "direction"),
)
SPANS = Metric(
    "slipstream_spans_total",
    "counter",
    "Spans of traces, for each place that they go to: `made`, and of those `sent`, which a collector or a file took; "
    "but for the last second's the others are lost.",
    ROLES,
    ("outcome",),
)

# Gateway: rounds, as the verifiers tell of them.

ROUNDS = _gateway("slipstream_rounds_total", "Rounds: verifier steps of one session that committed tokens.", *REQUEST)
ROUNDS_WITH_DRAFTS = _gateway(
    "slipstream_rounds_with_drafts_total", "Rounds in which candidates were verified.", *REQUEST
)
DRAFTED = _gateway("slipstream_drafted_tokens_total", "Candidates verified.", *REQUEST)
ACCEPTED = _gateway("slipstream_accepted_tokens_total", "Candidates accepted.", *REQUEST)
EMITTED = _gateway("slipstream_emitted_tokens_total", "Output tokens committed.", *REQUEST)
ACCEPTED_BY_DEPTH = _gateway(
    "slipstream_accepted_by_depth_total",
    "Rounds that accepted a candidate at this depth below the last committed token; over "
    "slipstream_rounds_with_drafts_total the share that got so far.",
    *REQUEST,
    "depth",
)
HITS = _gateway(
    "slipstream_round_hits_total", "Rounds whose candidates were there when the round before ended.", *REQUEST
)
MISSES = _gateway(
    "slipstream_round_misses_total", "Rounds that wanted candidates and had none in time, by cause.", *REQUEST, "cause"
)
ROUND_WAIT = _gateway(
    "slipstream_round_wait_seconds_total", "Time between rounds of a session, summed over sessions.", *REQUEST
)
ROUND_BUBBLE = _gateway(
    "slipstream_round_bubble_seconds_total",
    "Of that, time in which the step was held back for candidates, summed over sessions.",
    *REQUEST,
)
ROUND_VERIFY = _gateway(
    "slipstream_round_verify_seconds_total", "Time of the steps that rounds were part of, over sessions.", *REQUEST
)
CANDIDATES_VERIFIED = _gateway(
    "slipstream_candidates_verified_total",
    "Candidates verified, of each drafter; one that several sent counts for each.",
    "model",
    "drafter",
    "method",
    "workload",
)
CANDIDATES_ACCEPTED = _gateway(
    "slipstream_candidates_accepted_total",
    "Candidates accepted, of each drafter; one that several sent counts for each.",
    "model",
    "drafter",
    "method",
    "workload",
)
CANDIDATE_ROUNDS = _gateway(
    "slipstream_candidate_rounds_total",
    "Rounds in which candidates of a drafter were verified; one of several drafters counts for each.",
    "model",
    "drafter",
    "method",
    "workload",
)

# Gateway: requests.

REQUESTS = _gateway(
    "slipstream_requests_total",
    "Requests by outcome: stop, length; cancelled, left (its clients did), fenced (rolled back, taken over), invalid; "
    "unavailable, failed, and refused: never began, by no fault of the client.",
    *REQUEST,
    "outcome",
)
GOOD_REQUESTS = _gateway(
    "slipstream_requests_good_total",
    "Requests that ended with stop or length and met the objectives (GATEWAY_SLO_TTFT_S, GATEWAY_SLO_TPOT_S).",
    *REQUEST,
)
GOOD_TOKENS = _gateway("slipstream_good_tokens_total", "Output tokens of those requests.", *REQUEST)
TTFT = Metric(
    "slipstream_time_to_first_token_seconds",
    "histogram",
    "From a request's arrival to the first round that brought it tokens.",
    ("gateway",),
    REQUEST,
    _FIRST,
)
TPOT = Metric(
    "slipstream_time_per_output_token_seconds",
    "histogram",
    "(E2E - TTFT) / (n - 1) of requests that ended with stop or length and n > 1 tokens.",
    ("gateway",),
    REQUEST,
    _TOKEN,
)
GAP = Metric(
    "slipstream_inter_token_seconds",
    "histogram",
    "Between two rounds of a session, as they reached the gateway; each brings one token or several.",
    ("gateway",),
    REQUEST,
    _TOKEN,
)
E2E = Metric(
    "slipstream_request_seconds",
    "histogram",
    "From a request's arrival to its end, of those that ended with stop or length.",
    ("gateway",),
    REQUEST,
    _WHOLE,
)
OBJECTIVE = _gateway("slipstream_slo_seconds", "The configured objective for ttft and tpot; 0: none.", "objective")
GATEWAY_SESSIONS = _gateway("slipstream_gateway_sessions", "Sessions that this gateway runs.")
GATEWAY_WAITING = _gateway(
    "slipstream_gateway_waiting_sessions", "Sessions of this gateway that wait for a verifier to open them on."
)

# Gateway: workers, store, cost.

REHOMINGS = _gateway("slipstream_rehomings_total", "Sessions opened again after the loss of their verifier's stream.")
DRAFTER_FAILURES = _gateway(
    "slipstream_drafter_failures_total", "Sessions that lost a drafter, by reason.", "drafter", "reason"
)
BREAKER = _gateway("slipstream_drafter_breaker_state", "0: closed, 1: half-open, 2: open.", "drafter")
WORKERS = _gateway("slipstream_workers", "Workers of a name that answer this gateway; 0: nobody.", "role", "worker")
COST = _gateway(
    "slipstream_cost_per_hour",
    "Configured price of the workers that answer (GATEWAY_VERIFIER_PRICE, GATEWAY_DRAFTER_PRICES).",
    "role",
)
STORE_SECONDS = Metric(
    "slipstream_store_write_seconds",
    "histogram",
    "One try of an operation on the session store, whatever came of it.",
    ("gateway",),
    ("operation",),
    _WRITE,
)
STORE_ERRORS = _gateway(
    "slipstream_store_errors_total", "Tries that the session store failed or refused.", "operation", "reason"
)
STORE_LAG = _gateway(
    "slipstream_store_lag_seconds", "Age of the oldest write that is on its way or (relaxed) left behind; 0: none."
)

# Gateway: the same under vLLM's names, for dashboards and load tools that know those.

VLLM_DRAFTS = _gateway(
    "vllm:spec_decode_num_drafts_total", "slipstream_rounds_with_drafts_total.", "model_name", "engine"
)
VLLM_DRAFTED = _gateway(
    "vllm:spec_decode_num_draft_tokens_total", "slipstream_drafted_tokens_total.", "model_name", "engine"
)
VLLM_ACCEPTED = _gateway(
    "vllm:spec_decode_num_accepted_tokens_total", "slipstream_accepted_tokens_total.", "model_name", "engine"
)
VLLM_POSITIONS = _gateway(
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "Rounds that accepted a candidate at this position of the path, from 0.",
    "model_name",
    "engine",
    "position",
)

# Verifier.

VERIFIER_SESSIONS = _verifier("slipstream_verifier_sessions", "Sessions here, those that wait for KV included.")
VERIFIER_WAITING = _verifier("slipstream_verifier_waiting_sessions", "Sessions here that wait for KV.")
KV_TOTAL = _verifier("slipstream_kv_blocks_total", "Blocks of KV memory. A gauge, whatever its ending.")
KV_USED = _verifier("slipstream_kv_blocks_used", "Blocks that sessions hold.")
PREEMPTIONS = _verifier("slipstream_preemptions_total", "Times that a session gave up its KV to another one.")
PREFIX_SOUGHT = _verifier("slipstream_prefix_tokens_sought_total", "Tokens of sessions that got KV.")
PREFIX_FOUND = _verifier("slipstream_prefix_tokens_found_total", "Those of them whose KV was there already.")
STEP_SECONDS = Metric(
    "slipstream_verifier_step_seconds", "histogram", "A step of the target model.", ("verifier",), (), _STEPS
)
STEP_SESSIONS = Metric(
    "slipstream_verifier_step_sessions", "histogram", "Sessions in a step.", ("verifier",), (), _SESSIONS
)
STEP_TOKENS = Metric(
    "slipstream_verifier_step_tokens",
    "histogram",
    "Tokens in a step: pending ones, prompts and candidates.",
    ("verifier",),
    (),
    _TOKENS,
)
COMMITTED = _verifier("slipstream_verifier_committed_tokens_total", "Tokens committed.")
DRAFT_WAIT = _verifier(
    "slipstream_draft_wait_seconds_total", "The bubble: time in which steps were held back for candidates."
)
DEPTH_DRAFTED = _verifier(
    "slipstream_depth_drafted_tokens_total", "Candidates verified, by depth below the last committed token.", "depth"
)
DEPTH_ACCEPTED = _verifier("slipstream_depth_accepted_tokens_total", "Candidates accepted, by depth.", "depth")
ROLLED_BACK = _verifier("slipstream_rolled_back_tokens_total", "Candidates verified and not accepted.")
ROLLED_BACK_SECONDS = _verifier(
    "slipstream_rolled_back_seconds_total", "Time by which those made steps longer, by the measured cost curve."
)
DROPPED = _verifier(
    "slipstream_candidates_dropped_total",
    "Candidates that came and were not taken: stale, orphan, diverged, duplicate, full, deep, forbidden; nobody: of an "
    "older epoch or an unknown session; invalid: of a frame that cost the session its drafter.",
    "reason",
)

# Drafter.

DRAFTER_SESSIONS = _drafter("slipstream_drafter_sessions", "Sessions that this drafter guesses for.")
DRAFTER_BUSY = _drafter("slipstream_drafter_busy_seconds_total", "Time in which the draft model, or the index, works.")
DRAFTER_NEEDED = _drafter(
    "slipstream_drafter_needed_seconds_total",
    "Time of passes, of each session in one by the chance that its text needs the guess: its rate is how many sessions "
    "need the drafter at a time.",
)
PASS_SECONDS = Metric(
    "slipstream_drafter_pass_seconds", "histogram", "A pass of the draft model.", ("drafter",), (), _STEPS
)
PASS_SESSIONS = Metric(
    "slipstream_drafter_pass_sessions", "histogram", "Sessions in a pass.", ("drafter",), (), _SESSIONS
)
PASS_TOKENS = Metric(
    "slipstream_drafter_pass_tokens",
    "histogram",
    "Tokens in a pass: committed ones that are read, and nodes of trees.",
    ("drafter",),
    (),
    _TOKENS,
)
GUESSED = _drafter("slipstream_drafter_guessed_tokens_total", "Guesses made.")
TOLD = _drafter("slipstream_drafter_told_tokens_total", "Guesses that verifiers were told.")

DECLARED: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
