"""What candidates are worth: by drafter, workload and depth."""

from __future__ import annotations

from deploy.grafana.panels import MODEL, OURS, WORKLOAD, Dashboard, Panel, Query, rate, ratio

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
                "Verifiers whose drafters pause, by cause",
                (Query("avg by (cause) (slipstream_drafting_paused)", "{{cause}}"),),
                "price: a candidate costs what it brings; slower: no session gains as much as drafting slows it; "
                "trial: one without drafting is under way.",
                "percentunit",
                most=1,
            ),
            Panel(
                "Slowdown of steps by drafting",
                (Query("max by (job) (slipstream_drafting_slowdown)", "{{job}}"),),
                "What drafters, gateways and clients take of the verifiers' own cores; 1 where they have others. "
                "Sessions that gain less are not drafted for.",
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
                "Candidates that arrived and joined no tree.",
            ),
            Panel(
                "Candidates: drafted, sent, verified, accepted",
                (
                    Query(rate("slipstream_drafter_drafted_candidates_total"), "drafted"),
                    Query(rate("slipstream_drafter_sent_candidates_total"), "sent"),
                    Query(rate("slipstream_drafted_tokens_total"), "verified"),
                    Query(rate("slipstream_accepted_tokens_total"), "accepted"),
                    Query(rate("slipstream_rejected_tokens_total"), "rejected"),
                ),
                "Tokens a second, from the draft model to the text.",
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
