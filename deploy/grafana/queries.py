"""PromQL that several panels ask in the same way."""

from __future__ import annotations

from deploy.grafana.panels import Panel, Query, Variable

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
