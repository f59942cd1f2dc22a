"""What an operator looks at first."""

from __future__ import annotations

from deploy.grafana.panels import MODEL, OURS, WORKLOAD, Dashboard, Panel, Query, rate, ratio, times

OVERVIEW = Dashboard(
    "overview",
    "Slipstream: overview",
    (
        (
            Panel(
                "Tokens / s",
                (Query(rate("slipstream_emitted_tokens_total", labels=OURS)),),
                "Committed.",
                "short",
                "stat",
            ),
            Panel(
                "Acceptance rate",
                (Query(ratio("slipstream_accepted_tokens_total", "slipstream_drafted_tokens_total")),),
                "Accepted of all candidates verified.",
                "percentunit",
                "stat",
            ),
            Panel(
                "Acceptance length",
                (Query("1 + " + ratio("slipstream_accepted_tokens_total", "slipstream_rounds_with_drafts_total")),),
                "Tokens of a round with candidates: 1 + accepted / rounds.",
                "short",
                "stat",
            ),
            Panel(
                "Good requests",
                (Query("1 - slipstream:bad_requests:ratio_rate5m"),),
                "Ended well and met the objectives, of all that did not end by the client's wish.",
                "percentunit",
                "stat",
            ),
            Panel(
                "Cost of a million tokens",
                (Query("slipstream:cost_per_million_tokens:1h"),),
                "Configured prices of the workers that answer, over the tokens of the last hour.",
                "short",
                "stat",
            ),
            Panel(
                "Sessions",
                (Query("sum(slipstream_gateway_sessions)"),),
                "That gateways run now.",
                "short",
                "stat",
            ),
        ),
        (
            Panel(
                "Tokens / s by workload",
                (
                    Query(rate("slipstream_emitted_tokens_total", "workload", OURS), "{{workload}}"),
                    Query(rate("slipstream_good_tokens_total", "workload", OURS), "{{workload}}, good"),
                ),
                "Throughput, and goodput: what requests got that met the objectives, at their end.",
            ),
            Panel(
                "Requests / s by outcome",
                (
                    Query(rate("slipstream_requests_total", "outcome"), "{{outcome}}"),
                    Query(rate("slipstream_lossy_sessions_total", "model"), "{{model}}, lossy rule"),
                ),
                "refused, unavailable and failed are ours; disconnected, cancelled, fenced and invalid the client's.",
                "reqps",
            ),
        ),
        (
            times("Time to first token", "slipstream_time_to_first_token_seconds", "Points lead to traces."),
            times("Time per output token", "slipstream_time_per_output_token_seconds", "(E2E - TTFT) / (n - 1)."),
        ),
        (
            Panel(
                "Waiting",
                (
                    Query("sum(slipstream_gateway_waiting_sessions)", "for a verifier"),
                    Query("sum(slipstream_verifier_waiting_sessions)", "for KV"),
                ),
                "Sessions that wait for a place.",
            ),
            Panel(
                "Errors returned, by reason",
                (Query(rate("slipstream_rpc_errors_total", "reason"), "{{reason}}"),),
                "Of all roles and calls.",
                "reqps",
            ),
        ),
    ),
    (MODEL, WORKLOAD),
)
