"""Grafana's JSON from short descriptions: a dashboard is rows of panels, a panel is queries and a unit."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

WIDTH, HEIGHT = 24, 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
Json = dict[str, Any]
SERIES = re.compile(r"\b((?:slipstream|vllm)[:_][a-zA-Z0-9_:]+)(\{)?")
SYSTEM = 'cluster=~"$cluster", namespace=~"$namespace"'
"""Selects the series of the chosen systems; a Prometheus of one system may have neither label."""


def of_system(expr: str) -> str:
    """The query, every series of it restricted to the chosen systems."""
    return SERIES.sub(lambda found: f"{found[1]}{{{SYSTEM}{', ' if found[2] else '}'}", expr)


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""
    exemplars: bool = False
    """Whether points lead to traces."""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    queries: tuple[Query, ...]
    help: str
    unit: str = "short"
    kind: Literal["timeseries", "stat", "bargauge", "heatmap"] = "timeseries"
    most: float | None = None
    """Upper end of the axis; None for an open one."""
    nothing: str = ""
    """Shown where no query has data; empty for Grafana's own words."""

    def json(self, number: int, place: Json) -> Json:
        instant = self.kind in ("stat", "bargauge")
        targets = [_target(query, "ABCDEFGH"[at], instant, self.kind) for at, query in enumerate(self.queries)]
        defaults = {"unit": self.unit, "min": 0} | ({} if self.most is None else {"max": self.most})
        defaults |= {"noValue": self.nothing} if self.nothing else {}
        panel = {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.help,
            "datasource": SOURCE,
            "gridPos": place,
            "targets": targets,
            "fieldConfig": {"defaults": defaults, "overrides": []},
        }
        if self.kind == "timeseries":
            panel["options"] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
        if self.kind == "heatmap":
            panel["options"] = {"calculate": False, "yAxis": {"unit": self.unit}, "exemplars": {"color": "orange"}}
        return panel


@dataclass(frozen=True, slots=True)
class Variable:
    """A selector at the top of a dashboard: values of a metric's label, by default all."""

    name: str
    metric: str
    scoped: bool = True
    """Whether only values of the chosen systems are offered."""

    def json(self) -> Json:
        return {
            "name": self.name,
            "type": "query",
            "datasource": SOURCE,
            "query": {
                "query": f"label_values({of_system(self.metric) if self.scoped else self.metric}, {self.name})",
                "refId": self.name,
            },
            "includeAll": True,
            "multi": True,
            "allValue": ".*",  # an empty label too
            "current": {"text": "All", "value": "$__all"},
            "refresh": 2,
            "sort": 1,
        }


CLUSTER = Variable("cluster", "slipstream_build_info", scoped=False)
NAMESPACE = Variable("namespace", 'slipstream_build_info{cluster=~"$cluster"}', scoped=False)
ROLLOUTS = {
    "name": "Rollouts",
    "datasource": SOURCE,
    "enable": True,
    "iconColor": "blue",
    "expr": of_system(
        "group by (namespace, role, version) (slipstream_build_info)"
        " unless group by (namespace, role, version) (slipstream_build_info offset 2m)"
    ),
    "titleFormat": "{{role}} {{version}}",
    "textFormat": "first seen in {{namespace}}",
    "step": "60s",
}
"""Marks when a version of a role appeared."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    name: str
    title: str
    rows: tuple[tuple[Panel, ...], ...]
    """Panels of one row share its width."""
    variables: tuple[Variable, ...] = ()

    def json(self) -> Json:
        panels: list[Json] = []
        for y, row in enumerate(self.rows):
            width = WIDTH // len(row)
            for x, panel in enumerate(row):
                place = {"x": x * width, "y": y * HEIGHT, "w": width, "h": HEIGHT}
                panels.append(panel.json(len(panels) + 1, place))
        source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
        return {
            "uid": f"slipstream-{self.name}",
            "title": self.title,
            "tags": ["slipstream"],
            "schemaVersion": 39,
            "version": 1,
            "editable": True,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "templating": {"list": [source, *(variable.json() for variable in (CLUSTER, NAMESPACE, *self.variables))]},
            "annotations": {"list": [ROLLOUTS]},
            "links": [{"type": "dashboards", "title": "Slipstream", "tags": ["slipstream"], "asDropdown": True}],
            "panels": panels,
        }

    def text(self) -> str:
        return json.dumps(self.json(), indent=1) + "\n"


def _target(query: Query, name: str, instant: bool, kind: str) -> Json:
    target: Json = {
        "refId": name,
        "datasource": SOURCE,
        "expr": of_system(query.expr),
        "legendFormat": query.legend or "__auto",
    }
    if instant:
        target |= {"instant": True, "range": False}
    if kind == "heatmap":
        target |= {"format": "heatmap"}
    return target | ({"exemplar": True} if query.exemplars else {})


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
