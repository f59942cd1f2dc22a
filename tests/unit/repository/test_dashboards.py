"""Dashboards and rules ask for what is told: every metric in them is declared, every query can be read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana.__main__ import DASHBOARDS
from slipstream.telemetry.__main__ import listed, same_numbers
from slipstream.telemetry.metrics import BUILD, DECLARED, DEPRECATED, MODEL_ROLES, ROLES
from tests.support.prometheus import promtool

ROOT = Path(__file__).resolve().parents[3]
GRAFANA, PROMETHEUS = ROOT / "deploy" / "grafana", ROOT / "deploy" / "prometheus"
DOCUMENT = (ROOT / "docs" / "metrics.md").read_text("utf-8")
NAME = re.compile(r"\b(?:slipstream|vllm)[:_][a-zA-Z0-9_:]+")
RULES = [
    rule
    for file in ("recording.yaml", "alerts.yaml")
    for group in yaml.safe_load((PROMETHEUS / file).read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
ALERTS = {rule["alert"] for rule in RULES if "alert" in rule}
VALUES = {"outcome": "stop", "role": "drafter", "cause": "exhausted", "objective": "tpot", "operation": "append"}
"""Of labels that queries select by."""
HPA = 'horizontalpodautoscaler="keda-hpa-verifier"'
ELSEWHERE = {
    "kube_deployment_status_replicas_ready": 'deployment="verifier"',
    "kube_deployment_spec_replicas": 'deployment="verifier"',
    "kube_horizontalpodautoscaler_spec_max_replicas": HPA,
    "kube_horizontalpodautoscaler_status_desired_replicas": HPA,
    "kube_pod_status_unschedulable": 'pod="verifier-1"',
    "keda_scaled_object_errors_total": 'scaledObject="verifier"',
    "certmanager_certificate_renewal_timestamp_seconds": 'name="gateway"',
    "DCGM_FI_DEV_GPU_UTIL": 'pod="verifier-1"',
    "DCGM_FI_DEV_FB_USED": 'pod="verifier-1"',
}
"""Series of kube-state-metrics, KEDA, cert-manager and NVIDIA's exporter, with a label that is asked for."""
THEIRS = re.compile(r"\b(?:kube|keda|certmanager|DCGM)_\w+")
Json = dict[str, Any]
FILES: list[Json] = [json.loads(path.read_text("utf-8")) for path in sorted(GRAFANA.glob("*.json"))]


def told() -> set[str]:
    """Names of time series."""
    endings = {"histogram": ("_bucket", "_sum", "_count")}
    return {metric.name + ending for metric in DECLARED for ending in endings.get(metric.kind, ("",))}


def labels_of(series: str) -> set[str]:
    names = {series, *(series.removesuffix(ending) for ending in ("_bucket", "_sum", "_count"))}
    metric = next(each for each in DECLARED if each.name in names)
    return {*metric.labels, "le"}


def queries() -> Iterator[tuple[str, str]]:
    for dashboard in FILES:
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                yield f"{dashboard['title']}: {panel['title']}", target["expr"]
        for annotation in dashboard["annotations"]["list"]:
            yield f"{dashboard['title']}: {annotation['name']}", annotation["expr"]
    for rule in RULES:
        yield rule.get("record") or rule["alert"], rule["expr"]


def expressions(dashboard: Json) -> list[str]:
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    return [each["expr"] for each in (*targets, *dashboard["annotations"]["list"])]


def lost(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Paths of what the first has and the second has not, or otherwise."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [each for key in ours for each in lost(ours[key], theirs.get(key), f"{path}/{key}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [
            each
            for at, (one, other) in enumerate(zip(ours, theirs, strict=True))
            for each in lost(one, other, f"{path}/{at}")
        ]
    return [] if ours == theirs else [path]


def test_the_dashboards_in_the_repository_are_those_that_are_described() -> None:
    assert {f"{dashboard.name}.json" for dashboard in DASHBOARDS} == {path.name for path in GRAFANA.glob("*.json")}
    for dashboard in DASHBOARDS:
        written = (GRAFANA / f"{dashboard.name}.json").read_text("utf-8")
        assert written == dashboard.text(), "run `python -m deploy.grafana`"


def test_a_dashboard_is_whole() -> None:
    assert len({dashboard["uid"] for dashboard in FILES}) == len(FILES) == 4
    for dashboard in FILES:
        variables = [variable["name"] for variable in dashboard["templating"]["list"]]
        assert variables[:3] == ["datasource", "cluster", "namespace"]
        panels = dashboard["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        taken: set[tuple[int, int]] = set()
        for panel in panels:
            place, references = panel["gridPos"], [target["refId"] for target in panel["targets"]]
            cells = {(x, place["y"]) for x in range(place["x"], place["x"] + place["w"])}
            assert place["x"] + place["w"] <= 24 and not cells & taken
            taken |= cells
            assert panel["title"] and panel["description"] and panel["datasource"]["uid"] == "${datasource}"
            assert references and len(set(references)) == len(references)
            used = set(re.findall(r"\$(\w+)", " ".join(target["expr"] for target in panel["targets"])))
            assert used <= {*variables, "__rate_interval"}


@pytest.mark.parametrize(("where", "expr"), list(queries()))
def test_every_metric_in_a_query_is_exposed(where: str, expr: str) -> None:
    names, theirs = set(NAME.findall(expr)), set(THEIRS.findall(expr))
    assert names | theirs and names <= told() | RECORDED and theirs <= set(ELSEWHERE), where
    for series, selector in re.findall(rf"({NAME.pattern})\{{([^}}]*)\}}", expr):
        asked = set(re.findall(r"(\w+)\s*=", selector))
        assert series in RECORDED or asked <= labels_of(series) | {"cluster", "namespace"}, where


def test_every_metric_is_in_a_dashboard_or_a_rule() -> None:
    shown = {name for _, expr in queries() for name in NAME.findall(expr)}
    hidden = {
        metric.name for metric in DECLARED if not {metric.name, metric.name + "_bucket", metric.name + "_sum"} & shown
    }
    assert hidden == {metric.name for metric in DECLARED if metric.name.startswith(("vllm:", "gen_ai_"))} | {
        *DEPRECATED,
        "slipstream_prompt_tokens_total",
        "slipstream_spans_total",
        "slipstream_verifier_committed_tokens_total",
    }


def settled(expr: str) -> str:
    """The query as Grafana sends it, everything being chosen."""
    return re.sub(r"\$\w+", ".*", expr.replace("$__rate_interval", "5m"))


@pytest.mark.parametrize("system", ['namespace="a", cluster="x", ', ""], ids=["labelled", "alone"])
def test_prometheus_answers_every_query_of_a_dashboard(tmp_path: Path, system: str) -> None:
    """On series with the labels that are declared: a join of two that have no labels in common answers nothing."""
    series = []
    for metric in DECLARED:
        labels = ", ".join(f'{label}="{VALUES.get(label, "v")}"' for label in metric.labels)
        where = f'{system}job="j", instance="i"{", " if labels else ""}{labels}'
        names = [f"{metric.name}{{{where}}}"]
        if metric.kind == "histogram":
            buckets = [f'{metric.name}_bucket{{{where}, le="{bound}"}}' for bound in ("0.1", "+Inf")]
            names = [f"{metric.name}_sum{{{where}}}", f"{metric.name}_count{{{where}}}", *buckets]
        began = "_x60 " if metric is BUILD else ""  # a rollout, an hour ago
        series += [
            {"series": name, "values": began + ("1x90" if metric.kind == "gauge" else "0+60x90")} for name in names
        ]
    series += [{"series": f"{name}{{{system}{label}}}", "values": "1x90"} for name, label in ELSEWHERE.items()]
    asked = [
        {"expr": f"count({settled(expr)}) > bool 0", "eval_time": "61m", "exp_samples": [{"value": 1}]}
        for dashboard in FILES
        for expr in expressions(dashboard)
    ]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": asked}
    rules = {"rule_files": [str(PROMETHEUS / "recording.yaml")], "tests": [test]}
    (tmp_path / "answers.yaml").write_text(yaml.safe_dump(rules))
    assert "SUCCESS" in promtool("test", "rules", str(tmp_path / "answers.yaml"))


def test_every_series_of_a_dashboard_is_of_the_chosen_systems() -> None:
    for dashboard in FILES:
        for expr in expressions(dashboard):
            names = NAME.findall(expr) + THEIRS.findall(expr)
            assert len(names) == expr.count('{cluster=~"$cluster", namespace=~"$namespace"'), expr


@pytest.mark.parametrize("dashboard", FILES, ids=lambda each: each["uid"])
def test_grafanas_own_types_accept_every_field_of_a_dashboard(dashboard: Json) -> None:
    """Its generated models drop what they do not know: nothing of ours goes but what its Prometheus source reads."""
    models = import_module("grafana_foundation_sdk.models.dashboard")
    encoder = import_module("grafana_foundation_sdk.cog.encoder").JSONEncoder
    written = json.loads(json.dumps(models.Dashboard.from_json(dashboard), cls=encoder))
    for annotation in dashboard["annotations"]["list"]:
        annotation = {key: annotation[key] for key in annotation if key not in ("titleFormat", "textFormat", "step")}
        written["annotations"]["list"] = [annotation]
        assert annotation == {key: written["annotations"]["list"][0][key] for key in annotation}
    kept = dashboard | {"annotations": written["annotations"]}
    assert lost(kept, written) == []
    assert lost(kept | {"refreshh": "5s"}, written) == ["/refreshh"]


def test_promtool_reads_every_rule_and_every_query_of_a_dashboard(tmp_path: Path) -> None:
    asked = [{"record": f"q:{number}", "expr": settled(expr)} for number, (_, expr) in enumerate(queries())]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": asked}]}))
    rules = [str(PROMETHEUS / name) for name in ("recording.yaml", "alerts.yaml")]
    said = promtool("check", "rules", str(tmp_path / "queries.yaml"), *rules)
    assert said.count("SUCCESS") == 3 and f"{len(asked)} rules found" in said
    (tmp_path / "queries.yaml").write_text("groups: [{name: q, rules: [{record: 'q:1', expr: 'sum(('}]}]")
    with pytest.raises(AssertionError, match="unclosed left parenthesis"):
        promtool("check", "rules", str(tmp_path / "queries.yaml"))


def test_alerts_fire_when_they_should_and_not_else() -> None:
    tests = sorted((PROMETHEUS / "tests").glob("*.yaml"))
    assert "SUCCESS" in promtool("test", "rules", *map(str, tests))
    fired: dict[str, set[bool]] = {}
    for path in tests:
        for test in yaml.safe_load(path.read_text("utf-8"))["tests"]:
            for case in test.get("alert_rule_test", ()):
                fired.setdefault(case["alertname"], set()).add(bool(case.get("exp_alerts")))
    assert set(fired) == ALERTS
    for alert, cases in fired.items():
        assert True in cases and (False in cases), f"{alert} is to be tested both ways"


def test_every_alert_has_a_summary_a_description_and_a_runbook() -> None:
    headings = {heading.lower() for heading in re.findall(r"^### (\w+)$", DOCUMENT, re.MULTILINE)}
    for rule in RULES:
        if "alert" in rule:
            told = rule["annotations"]
            page, _, anchor = told["runbook_url"].partition("#")
            assert page == "{{ $externalLabels.docs_url }}docs/metrics.md" and anchor in headings
            assert rule["labels"]["severity"] in ("critical", "warning") and told["summary"] and told["description"]
            assert "absent(" not in rule["expr"], "it hides every system but the last"


def test_alerts_name_their_labels_and_runbooks_name_existing_panels() -> None:
    for rule in RULES:
        if "alert" in rule:
            assert "{{ $labels." in rule["annotations"]["summary"], rule["alert"]
    runbooks = DOCUMENT.partition("## Alerts")[2].partition("## Logs")[0]
    named = {name.replace("\n", " ") for name in re.findall(r"\*([A-Z][^*]+)\*", runbooks)}
    panels = {panel["title"] for dashboard in FILES for panel in dashboard["panels"]}
    assert len(named) > 9 and named - {"Slanted"} <= panels


@pytest.mark.parametrize("roles", [ROLES, MODEL_ROLES, *((role,) for role in ROLES)], ids=str)
def test_the_document_has_every_metric_with_its_meaning(roles: Any) -> None:
    assert f"\n{listed(roles)}\n" in DOCUMENT and same_numbers() in DOCUMENT, "run `python -m slipstream.telemetry`"


def test_no_query_names_a_deprecated_metric() -> None:
    endings = ("_bucket", "_sum", "_count")
    for where, expr in queries():
        for name in NAME.findall(expr):
            assert name not in DEPRECATED and not {name.removesuffix(each) for each in endings} & set(DEPRECATED), where


def test_the_document_names_no_metric_that_is_not_there() -> None:
    named = {name.rstrip("_:") for name in NAME.findall(DOCUMENT)}
    known = told() | RECORDED | {metric.name for metric in DECLARED}
    assert not {name for name in named if name not in known and not any(each.startswith(name) for each in known)}
