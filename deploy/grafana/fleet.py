"""What runs, how busy it is, and what it costs."""

from __future__ import annotations

from deploy.grafana.panels import SYSTEM, Dashboard, Panel, Query, rate, ratio, times

UNPRICED = "No prices are set: GATEWAY_VERIFIER_PRICE and GATEWAY_DRAFTER_PRICES of the gateways."
OURS = f'{SYSTEM}, deployment=~"gateway|verifier|drafter-.+"'
HPA = f'{SYSTEM}, horizontalpodautoscaler=~"keda-hpa-(gateway|verifier|drafter-model)"'
PODS = f'{SYSTEM}, pod=~"(verifier|drafter-model)-.+"'

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
            Panel(
                "Workers by forward pass",
                (
                    Query(
                        "count by (job, path, refused) (slipstream_forward_info)",
                        "{{job}} {{path}}, refused: {{refused}}",
                    ),
                ),
                "kernels and lean are fast paths; refused=1: one was tried at the start and refused.",
            ),
            Panel(
                "Verifiers by arithmetic",
                (Query("count by (model, arithmetic) (slipstream_model_info)", "{{model}} {{arithmetic}}"),),
                "Two names of one model: a rolling update, or verifiers whose CPUs differ.",
            ),
            Panel(
                "Sessions that went on with another arithmetic",
                (Query("sum(rate(slipstream_arithmetic_changes_total[5m]))", "sessions/s"),),
                "By their clients' choice or GATEWAY_MIXED_ARITHMETIC: their texts are marked.",
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
                "Blocks in use. Full is no fault while no session waits or is preempted.",
                "percentunit",
                most=1,
            ),
            Panel(
                "Open and waiting sessions",
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
                        ratio(
                            "slipstream_prefix_cache_hit_tokens_total",
                            "slipstream_prefix_cache_queried_tokens_total",
                            "",
                            "",
                        )
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
                "Replicas",
                (
                    Query(
                        f"max by (deployment) (kube_deployment_status_replicas_ready{{{OURS}}})", "{{deployment}} ready"
                    ),
                    Query(f"max by (deployment) (kube_deployment_spec_replicas{{{OURS}}})", "{{deployment}} wanted"),
                    Query(
                        f"max by (horizontalpodautoscaler) (kube_horizontalpodautoscaler_spec_max_replicas{{{HPA}}})",
                        "{{horizontalpodautoscaler}} at most",
                    ),
                ),
                "There, wanted, and at most. By kube-state-metrics.",
                nothing="kube-state-metrics is not scraped here.",
            ),
            Panel(
                "GPUs: busy",
                (Query(f"max by (pod) (DCGM_FI_DEV_GPU_UTIL{{{PODS}}}) / 100", "{{pod}}"),),
                "Share of time with a kernel running, which is no measure of work. By NVIDIA's exporter.",
                "percentunit",
                most=1,
                nothing="NVIDIA's DCGM exporter is not scraped here.",
            ),
            Panel(
                "GPUs: memory",
                (Query(f"sum by (pod) (DCGM_FI_DEV_FB_USED{{{PODS}}}) * 1048576", "{{pod}}"),),
                "Weights, KV and what is computed. By NVIDIA's exporter.",
                "bytes",
                nothing="NVIDIA's DCGM exporter is not scraped here.",
            ),
        ),
        (
            Panel(
                "Cost / hour",
                (Query("max by (role) (slipstream_cost_per_hour) > 0", "{{role}}s"),),
                "Configured prices of the workers that answer.",
                nothing=UNPRICED,
            ),
            Panel(
                "Cost of a million tokens",
                (Query("slipstream:cost_per_million_tokens:1h"),),
                "Over the last hour.",
                nothing=UNPRICED,
            ),
            Panel(
                "Re-homings / s",
                (Query(rate("slipstream_rehomings_total")),),
                "Sessions opened again after the loss of a verifier's stream.",
            ),
        ),
    ),
)
