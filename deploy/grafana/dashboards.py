"""What the dashboards show. `python -m deploy.grafana` writes them after a change."""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Panel, Query, Variable

OURS = '{model=~"$model", workload=~"$workload"}'
RATE = "[$__rate_interval]"
MODEL = Variable("model", "slipstream_rounds_total")
WORKLOAD = Variable("workload", "slipstream_rounds_total")


def rate(metric: str, by: str = "", labels: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{labels}{RATE}))"


def ratio(part: str, whole: str, by: str = "", labels: str = OURS) -> str:
    return f"{rate(part, by, labels)} / {rate(whole, by, labels)}"


def quantiles(metric: str, labels: str = "", *, exemplars: bool = False) -> tuple[Query, ...]:
    buckets = rate(f"{metric}_bucket", "le", labels)
    return tuple(
        Query(f"histogram_quantile({q}, {buckets})", f"p{round(100 * q)}", exemplars) for q in (0.5, 0.95, 0.99)
    )


def heatmap(title: str, metric: str, help: str, labels: str = OURS) -> Panel:
    query = Query(rate(f"{metric}_bucket", "le", labels), "{{le}}", exemplars=True)
    return Panel(title, (query,), help, "s", "heatmap")


def times(title: str, metric: str, help: str, labels: str = OURS, unit: str = "s") -> Panel:
    return Panel(title, quantiles(metric, labels, exemplars=labels == OURS), help, unit)


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
                (Query(rate("slipstream_requests_total", "outcome"), "{{outcome}}"),),
                "refused, unavailable and failed are ours; left, cancelled, fenced and invalid the client's.",
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
                "Errors told, by reason",
                (Query(rate("slipstream_rpc_errors_total", "reason"), "{{reason}}"),),
                "Of all roles and calls.",
                "reqps",
            ),
        ),
    ),
    (MODEL, WORKLOAD),
)

ACCEPTANCE = Dashboard(
    "acceptance",
    "Slipstream: acceptance",
    (
        (
            Panel(
                "Acceptance rate by workload",
                (
                    Query(
                        ratio("slipstream_accepted_tokens_total", "slipstream_drafted_tokens_total", "workload"),
                        "{{workload}}",
                    ),
                ),
                "Accepted of all candidates verified.",
                "percentunit",
                most=1,
            ),
            Panel(
                "Acceptance rate by drafter",
                (
                    Query(
                        ratio(
                            "slipstream_candidates_accepted_total",
                            "slipstream_candidates_verified_total",
                            "drafter, method",
                        ),
                        "{{drafter}} ({{method}})",
                    ),
                ),
                "A candidate that several sent counts for each.",
                "percentunit",
                most=1,
            ),
        ),
        (
            Panel(
                "Acceptance length",
                (
                    Query(
                        "1 + "
                        + ratio("slipstream_accepted_tokens_total", "slipstream_rounds_with_drafts_total", "workload"),
                        "{{workload}}",
                    ),
                ),
                "1 + accepted / rounds with candidates.",
            ),
            Panel(
                "Acceptance length by drafter",
                (
                    Query(
                        "1 + "
                        + ratio(
                            "slipstream_candidates_accepted_total",
                            "slipstream_candidate_rounds_total",
                            "drafter, method",
                        ),
                        "{{drafter}} ({{method}})",
                    ),
                ),
                "1 + accepted / rounds with candidates of it; what several sent counts for each.",
            ),
        ),
        (
            Panel(
                "Rounds that got so deep, by workload",
                (
                    Query(
                        f"{rate('slipstream_accepted_by_depth_total', 'workload, depth', OURS)} "
                        f"/ on (workload) group_left {rate('slipstream_rounds_with_drafts_total', 'workload', OURS)}",
                        "{{workload}} {{depth}}",
                    ),
                ),
                "Of the rounds with candidates those that accepted one at this depth.",
                "percentunit",
                most=1,
            ),
            Panel(
                "Acceptance by depth",
                (
                    Query(
                        ratio(
                            "slipstream_depth_accepted_tokens_total",
                            "slipstream_depth_drafted_tokens_total",
                            "depth",
                            "",
                        ),
                        "{{depth}}",
                    ),
                ),
                "Depth 1 is the place behind the last committed token.",
                "percentunit",
                "bargauge",
                most=1,
            ),
        ),
        (
            Panel(
                "Rounds without candidates, by cause, and hits",
                (
                    Query(
                        f"{rate('slipstream_round_misses_total', 'cause', OURS)} / ignoring(cause) group_left "
                        f"{rate('slipstream_rounds_total', '', OURS)}",
                        "{{cause}}",
                    ),
                    Query(ratio("slipstream_round_hits_total", "slipstream_rounds_total"), "hits"),
                ),
                "opening: none came yet; diverged: they were wrong; exhausted: the drafter is too far behind.",
                "percentunit",
            ),
            Panel(
                "Rollback cost",
                (
                    Query("slipstream:rollback_cost:ratio_rate5m", "of step time {{job}}"),
                    Query(
                        "1 - " + ratio("slipstream_accepted_tokens_total", "slipstream_drafted_tokens_total"),
                        "of candidates",
                    ),
                ),
                "What was verified in vain: candidates, and the time by which they made steps longer.",
                "percentunit",
                most=1,
            ),
        ),
        (
            Panel(
                "Candidates dropped, by reason",
                (Query(rate("slipstream_candidates_dropped_total", "reason"), "{{reason}}"),),
                "They came and were not taken.",
            ),
            Panel(
                "Guesses",
                (
                    Query(rate("slipstream_drafter_guessed_tokens_total"), "guessed"),
                    Query(rate("slipstream_drafter_told_tokens_total"), "told"),
                    Query(rate("slipstream_drafted_tokens_total"), "verified"),
                    Query(rate("slipstream_accepted_tokens_total"), "accepted"),
                    Query(rate("slipstream_rolled_back_tokens_total"), "rolled back"),
                ),
                "From the draft model to the text.",
            ),
            Panel(
                "Drafter failures and breakers",
                (
                    Query(rate("slipstream_drafter_failures_total", "drafter, reason"), "{{drafter}}: {{reason}}"),
                    Query("max by (drafter) (slipstream_drafter_breaker_state)", "breaker of {{drafter}}"),
                ),
                "Breaker: 0 closed, 1 half-open, 2 open.",
            ),
        ),
    ),
    (MODEL, WORKLOAD),
)

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
                    Query(f"slipstream:bad_requests:ratio_rate{window} / 0.01", window) for window in ("5m", "1h", "6h")
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
        ),
    ),
    (MODEL, WORKLOAD),
)

FLEET = Dashboard(
    "fleet",
    "Slipstream: fleet and capacity",
    (
        (
            Panel(
                "Verifiers: busy",
                (
                    Query("slipstream:verifier_busy:ratio_rate5m", "{{instance}}"),
                    Query("slipstream:bubble:ratio_rate5m", "bubble {{job}}"),
                ),
                "Share of time in steps, and of time held back for candidates.",
                "percentunit",
                most=1,
            ),
            Panel(
                "Drafters: busy",
                (Query("slipstream:drafter_busy:ratio_rate5m", "{{instance}}"),),
                "Share of time in passes: near 1 while there is any session, for they guess ahead.",
                "percentunit",
                most=1,
            ),
        ),
        (
            times("Step of the target", "slipstream_verifier_step_seconds", "Duration.", ""),
            Panel(
                "A step holds",
                (
                    Query(
                        ratio(
                            "slipstream_verifier_step_sessions_sum", "slipstream_verifier_step_sessions_count", "", ""
                        ),
                        "sessions",
                    ),
                    Query(
                        ratio("slipstream_verifier_step_tokens_sum", "slipstream_verifier_step_tokens_count", "", ""),
                        "tokens",
                    ),
                ),
                "On average.",
            ),
            times("Pass of the draft model", "slipstream_drafter_pass_seconds", "Duration.", ""),
            Panel(
                "A pass holds",
                (
                    Query(
                        ratio("slipstream_drafter_pass_sessions_sum", "slipstream_drafter_pass_sessions_count", "", ""),
                        "sessions",
                    ),
                    Query(
                        ratio("slipstream_drafter_pass_tokens_sum", "slipstream_drafter_pass_tokens_count", "", ""),
                        "tokens",
                    ),
                ),
                "On average.",
            ),
        ),
        (
            Panel(
                "KV memory",
                (Query("slipstream:kv_used:ratio", "{{instance}}"),),
                "Blocks in use. Full is no fault while nobody waits or gives way.",
                "percentunit",
                most=1,
            ),
            Panel(
                "Sessions and who waits",
                (
                    Query("slipstream_verifier_sessions", "{{instance}}"),
                    Query("slipstream_verifier_waiting_sessions", "{{instance}} waiting"),
                    Query(rate("slipstream_preemptions_total"), "preemptions / s"),
                ),
                "Of verifiers.",
            ),
            Panel(
                "Prefix tokens found",
                (
                    Query(
                        ratio("slipstream_prefix_tokens_found_total", "slipstream_prefix_tokens_sought_total", "", "")
                    ),
                ),
                "Of the tokens of sessions that got KV, those whose KV was there.",
                "percentunit",
                most=1,
            ),
        ),
        (
            Panel(
                "Sessions of drafters",
                (
                    Query("slipstream_drafter_sessions", "{{instance}}"),
                    Query("slipstream:drafter_needed:rate5m", "{{instance}} in need"),
                ),
                "That they guess for, and how many of them need it at a time: what drafters are scaled by.",
            ),
            Panel(
                "Workers that answer",
                (Query("max by (role, worker) (slipstream_workers)", "{{role}} {{worker}}"),),
                "As gateways see them.",
            ),
            Panel(
                "Between roles",
                (Query(rate("slipstream_link_bytes_total", "peer, direction"), "{{direction}}, peer is a {{peer}}"),),
                "Frames; each byte is seen at both ends.",
                "Bps",
            ),
        ),
        (
            Panel(
                "Cost / hour",
                (Query("max by (role) (slipstream_cost_per_hour)", "{{role}}s"),),
                "Configured prices of the workers that answer.",
            ),
            Panel(
                "Cost of a million tokens",
                (Query("slipstream:cost_per_million_tokens:1h"),),
                "Over the last hour.",
            ),
            Panel(
                "Re-homings / s",
                (Query(rate("slipstream_rehomings_total")),),
                "Sessions opened again after the loss of a verifier's stream.",
            ),
        ),
    ),
)

DASHBOARDS = (OVERVIEW, ACCEPTANCE, LATENCY, FLEET)
