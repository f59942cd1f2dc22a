"""Where the time of requests and rounds goes."""

from __future__ import annotations

from deploy.grafana.panels import MODEL, OURS, WORKLOAD, Dashboard, Panel, Query, heatmap, quantiles, rate, times

LATENCY = Dashboard(
    "latency",
    "Slipstream: latency",
    (
        (
            times(
                "Time to first token", "slipstream_time_to_first_token_seconds", "From arrival; points lead to traces."
            ),
            heatmap("Time to first token", "slipstream_time_to_first_token_seconds", "All requests."),
        ),
        (
            times("Time per output token", "slipstream_time_per_output_token_seconds", "(E2E - TTFT) / (n - 1)."),
            times("Between two rounds", "slipstream_inter_token_seconds", "As clients see output arrive."),
        ),
        (
            times("Request", "slipstream_request_seconds", "End to end."),
            Panel(
                "Where a session's time goes",
                (
                    Query(rate("slipstream_round_verify_seconds_total", labels=OURS), "verification"),
                    Query(rate("slipstream_round_bubble_seconds_total", labels=OURS), "waiting for candidates"),
                    Query(
                        f"{rate('slipstream_round_wait_seconds_total', labels=OURS)} - "
                        f"{rate('slipstream_round_bubble_seconds_total', labels=OURS)}",
                        "waiting for a step",
                    ),
                ),
                "Seconds a second, over all sessions.",
                "s",
            ),
        ),
        (
            Panel(
                "Error budget burn",
                tuple(
                    Query(f"slipstream:bad_requests:ratio_rate{window} / 0.01", f"{window} {{{{namespace}}}}")
                    for window in ("5m", "1h", "6h")
                ),
                "1: what the budget of 1 % bears for ever; 14.4 for an hour pages.",
            ),
            Panel(
                "Session store",
                (
                    *quantiles("slipstream_store_write_seconds", '{operation="append"}'),
                    Query("max(slipstream_store_lag_seconds)", "lag"),
                ),
                "Appends, which strict sessions wait for, and the age of the oldest write.",
                "s",
            ),
            Panel(
                "Memory of the session store",
                (
                    Query("max(slipstream_store_memory_used_bytes)", "in use"),
                    Query("max(slipstream_store_memory_max_bytes)", "maxmemory"),
                ),
                "As Redis counts it. A full store takes no tokens.",
                "bytes",
            ),
            Panel(
                "Long texts and bodies",
                (
                    *quantiles("slipstream_text_job_seconds"),
                    Query("sum by (kind) (slipstream_text_jobs_waiting)", "{{kind}} waiting"),
                    Query(rate("slipstream_text_job_failures_total", "reason"), "{{reason}} a second"),
                ),
                "Read in processes that API keys share in turns; what waits or is refused is often one key's.",
                "s",
            ),
        ),
    ),
    (MODEL, WORKLOAD),
)
