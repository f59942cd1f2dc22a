"""The collector's and Jaeger's configurations fit together, and speak of attributes that there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.telemetry import spans

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("receivers", "processors", "exporters")


def configuration(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / name).read_text())
    return read


@pytest.mark.parametrize("name", ["otel/collector.yaml", "jaeger/jaeger.yaml"])
def test_pipelines_use_what_is_declared_and_all_of_it(name: str) -> None:
    known = configuration(name)
    pipelines = known["service"]["pipelines"].values()
    for kind in KINDS:
        assert {each for pipeline in pipelines for each in pipeline[kind]} == set(known[kind])
    assert set(known["service"]["extensions"]) == set(known["extensions"])


def test_jaeger_writes_where_it_reads() -> None:
    known = configuration("jaeger/jaeger.yaml")
    stores = set(known["extensions"]["jaeger_storage"]["backends"])
    assert stores == {known["exporters"]["jaeger_storage_exporter"]["trace_storage"]}
    assert stores == {known["extensions"]["jaeger_query"]["storage"]["traces"]}


def test_the_collector_sends_to_a_port_that_jaeger_listens_on() -> None:
    [(_, port)] = [configuration("otel/collector.yaml")["exporters"]["otlp"]["endpoint"].rstrip("}").rsplit(":", 1)]
    assert configuration("jaeger/jaeger.yaml")["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].endswith(port)


def test_the_collector_judges_requests_by_attributes_that_they_have() -> None:
    sampling = configuration("otel/collector.yaml")["processors"]["tail_sampling"]
    policies = list(flat(sampling["policies"]))
    for policy in policies:
        assert policy["type"] in policy, f"{policy['name']} has no settings of its type"
    keys = {policy["numeric_attribute"]["key"] for policy in policies if policy["type"] == "numeric_attribute"}
    assert keys
    assert keys <= spans.SPANS[spans.GENERATE]
    # Batches are made of what was kept, never the other way round.
    assert configuration("otel/collector.yaml")["service"]["pipelines"]["traces"]["processors"][-1] == "batch"


def flat(policies: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for policy in policies:
        yield policy
        yield from flat(policy.get("and", {}).get("and_sub_policy", []))


def test_the_document_explains_every_span_event_and_attribute_and_no_other() -> None:
    text = (ROOT / "docs" / "tracing.md").read_text()
    explained = set(re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE))
    declared = {*spans.SPANS, *spans.EVENTS}.union(*spans.SPANS.values(), *spans.EVENTS.values())
    assert explained == declared
