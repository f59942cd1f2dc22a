"""The collector's and Jaeger's configurations fit together, and speak of attributes that there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.telemetry.kept_traces import SALT, remarkable
from slipstream.telemetry import spans
from slipstream.telemetry.span_exporters import TraceConfig

ROOT = Path(__file__).resolve().parents[3]
KINDS = ("receivers", "processors", "exporters")


def configuration(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / name).read_text())
    return read


POLICIES = configuration("otel/collector.yaml")["processors"]["tail_sampling"]["policies"]


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


def test_jaegers_page_listens_on_this_machine_alone_except_in_a_container() -> None:
    query = configuration("jaeger/jaeger.yaml")["extensions"]["jaeger_query"]
    assert query["http"]["endpoint"] == "${env:JAEGER_LISTEN_HOST:-127.0.0.1}:16686"
    assert query["grpc"]["endpoint"].startswith("127.0.0.1:")
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["jaeger"]
    assert compose["environment"]["JAEGER_LISTEN_HOST"] == "0.0.0.0"
    assert compose["ports"] == ["127.0.0.1:16686:16686"]


def test_the_collector_sends_to_a_port_that_jaeger_listens_on() -> None:
    [(_, port)] = [
        configuration("otel/collector.yaml")["exporters"]["otlp_grpc"]["endpoint"].rstrip("}").rsplit(":", 1)
    ]
    assert configuration("jaeger/jaeger.yaml")["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].endswith(port)


def test_the_collector_judges_requests_by_attributes_that_they_have_and_no_other_span() -> None:
    """A policy looks at every span of a trace: what a draft says of itself must not count as the request's."""
    policies = list(flat(POLICIES))
    for policy in policies:
        assert policy["type"] in policy, f"{policy['name']} has no settings of its type"
    keys = {policy[policy["type"]]["key"] for policy in policies if policy["type"].endswith("_attribute")}
    requests = spans.SPANS[spans.GENERATE] & spans.SPANS[spans.RESUME]
    others = [spans.SPANS[name] for name in set(spans.SPANS) - {spans.GENERATE, spans.RESUME}]
    assert spans.ASKED in keys
    assert keys <= requests.difference(*others)
    # Batches are made of what was kept, never the other way round.
    assert configuration("otel/collector.yaml")["service"]["pipelines"]["traces"]["processors"][-1] == "batch"


requests = st.fixed_dictionaries(
    {},
    optional={
        spans.LATE: st.just(True),
        spans.REJECTED: st.integers(40, 60),
        spans.REJECTED_PERCENT: st.integers(70, 100),
        spans.REHOMED: st.integers(0, 3),
    },
)


@settings(deadline=None)
@given(requests, st.booleans())
@example({spans.REJECTED: 48, spans.REJECTED_PERCENT: 75}, False)
@example({spans.REHOMED: 1}, False)
@example({spans.LATE: True}, False)
@example({}, True)
def test_gateway_and_collector_find_the_same_requests_remarkable(attributes: dict[str, int], failed: bool) -> None:
    judging = [policy for policy in POLICIES if policy["type"] != "probabilistic"]
    assert remarkable(attributes, failed) == any(keeps(policy, attributes, failed) for policy in judging)


def keeps(policy: dict[str, Any], attributes: dict[str, int], failed: bool) -> bool:
    """What the collector's documentation says that a policy does."""
    asks = policy[policy["type"]]
    match policy["type"]:
        case "and":
            return all(keeps(each, attributes, failed) for each in asks["and_sub_policy"])
        case "status_code":
            return failed and asks["status_codes"] == ["ERROR"]
        case "latency" | "bytes_limiting":  # a short trace, and not many
            return policy["type"] == "bytes_limiting"
        case "boolean_attribute":
            return attributes.get(asks["key"]) is asks["value"]
        case "numeric_attribute":
            value = attributes.get(asks["key"])
            return value is not None and asks["min_value"] <= value <= asks["max_value"]
    raise AssertionError(f"nobody judges by {policy['type']} here")


def test_a_request_that_the_decision_does_not_wait_for_is_kept_by_its_length() -> None:
    """Its own span, by which the others are judged, comes when it ends."""
    tail = configuration("otel/collector.yaml")["processors"]["tail_sampling"]
    [length_ms] = (policy["latency"]["threshold_ms"] for policy in flat(POLICIES) if policy["type"] == "latency")
    wait_ms = 1000 * int(tail["decision_wait"].removesuffix("s"))
    assert 0.9 * wait_ms <= length_ms < wait_ms


def test_one_machine_keeps_every_trace_and_a_fleet_one_in_a_hundred() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["collector"]
    [kept] = (
        policy["probabilistic"]["sampling_percentage"] for policy in POLICIES if policy["type"] == "probabilistic"
    )
    variable = re.fullmatch(r"\$\{env:(\w+):-(\d+)\}", kept)
    assert variable is not None
    assert variable[2] == "1"
    assert compose["environment"] == {variable[1]: "100"}


def test_gateways_and_the_collector_keep_the_same_traces_of_the_rest() -> None:
    """Else their exemplars name traces that are not there."""
    [rest] = (policy["probabilistic"] for policy in POLICIES if policy["type"] == "probabilistic")
    assert rest["hash_salt"] == SALT.decode()
    tracing = ROOT / "k8s/components/tracing"

    def variable(file: str, name: str) -> str:
        documents = yaml.safe_load_all((tracing / file).read_text())
        pods = [each["spec"]["template"]["spec"] for each in documents if each["kind"] == "Deployment"]
        [value] = [each["value"] for pod in pods for each in pod["containers"][0]["env"] if each["name"] == name]
        return str(value)

    assert variable("gateway.yaml", "SLIPSTREAM_TRACE_KEEP_PERCENT") == variable("collector.yaml", "KEEP_PERCENT")
    # On one machine the collector keeps all, as a gateway believes that is not told.
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert services["collector"]["environment"]["KEEP_PERCENT"] == f"{TraceConfig().keep_percent:g}"


def flat(policies: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for policy in policies:
        yield policy
        yield from flat(policy.get("and", {}).get("and_sub_policy", []))


def test_the_document_explains_every_span_event_and_attribute_and_no_other() -> None:
    text = (ROOT / "docs" / "tracing.md").read_text()
    named = re.findall(r"^\| ((?:`[^`|]+`(?:, )?)+) \|", text, flags=re.MULTILINE)
    explained = set(re.findall(r"`([^`]+)`", " ".join(named)))
    declared = {*spans.SPANS, *spans.EVENTS}.union(*spans.SPANS.values(), *spans.EVENTS.values())
    assert explained == declared
