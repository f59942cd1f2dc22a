"""The example of an InferencePool fits the gateways of the overlay that it stands on, and their metrics."""

from __future__ import annotations

import kubernetes_validate
import yaml

from slipstream.telemetry.metrics import DECLARED
from tests.manifests.reachability import Place, may_reach, pods
from tests.manifests.rendering import K8S, ROOT, find, render, roles
from tests.manifests.test_schemas import VERSIONS

TEXT = (ROOT / "examples" / "inference_pool.yaml").read_text("utf-8")
EXAMPLE = list(yaml.safe_load_all(TEXT))
PICKED_BY = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")
"""What an endpoint picker reads where it is told nothing else."""


def test_the_pool_selects_the_gateways_and_their_http_port() -> None:
    pool, route, *policies = EXAMPLE
    documents = render(K8S / "overlays" / "standalone")
    selected = [w for w in roles(documents) if pool["spec"]["selector"]["matchLabels"].items() <= w.labels.items()]
    assert [workload.name for workload in selected] == ["gateway"]
    ports = {each["name"]: each["containerPort"] for each in selected[0].spec["containers"][0]["ports"]}
    assert [each["number"] for each in pool["spec"]["targetPorts"]] == [ports["http"]]
    assert f"--model-server-metrics-port={ports['metrics']}" in TEXT
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["group"], backend["kind"]) == (pool["apiVersion"].partition("/")[0], pool["kind"])
    assert backend["name"] == pool["metadata"]["name"]
    assert {each["metadata"]["namespace"] for each in EXAMPLE} == {
        find(documents, "Deployment", "gateway")["metadata"]["namespace"]
    }
    for policy in policies:
        kubernetes_validate.validate(policy, VERSIONS[0], strict=True)


def test_the_picker_reaches_the_metrics_that_it_reads() -> None:
    documents = render(K8S / "overlays" / "standalone")
    picker, gateway = Place("10.244.9.9", "slipstream", {"inferencepool": "slipstream-epp"}), pods(documents)["gateway"]
    assert not may_reach(documents, picker, gateway, (9464, "TCP"))
    assert may_reach([*documents, *EXAMPLE[2:]], picker, gateway, (9464, "TCP"))
    declared = {metric.name for metric in DECLARED}
    assert {name for name in PICKED_BY if name not in declared and name.removesuffix("_total") not in declared} == set()
