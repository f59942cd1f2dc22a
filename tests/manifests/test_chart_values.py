"""Values of the Helm chart: ordinary ones have a place and are seen in the objects; what nothing reads is refused."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.manifests.charts import ONE_POOL, comparable, helm, rendered, template
from tests.manifests.ordinary_values import CACHED, PRODUCTION, STANDALONE, Value
from tests.manifests.policies import certificates_prove_roles
from tests.manifests.rendering import K8S, find, workloads
from tests.manifests.test_schemas import VERSIONS, is_custom

POOLS = {"registry": "registry.example/x", "pool_label": "pool", "verifier_pool": "h100", "drafter_pool": "l4"}
SETS = {"standalone": STANDALONE, "production": PRODUCTION, "cached": CACHED}


def merged(into: dict[str, Any], given: dict[str, Any]) -> None:
    for name, value in given.items():
        there = into.setdefault(name, value)
        if isinstance(there, dict) and there is not value:
            merged(there, value)
        elif isinstance(there, list) and there != value:
            there += value


@cache
def objects(chart: Path, which: str) -> dict[tuple[str, str], Any]:
    """With all values of a set."""
    values: dict[str, Any] = {"overlay": "standalone" if which == "cached" else which, "settings": dict(POOLS)}
    for each in SETS[which]:
        merged(values, copy.deepcopy(yaml.safe_load(each.given)))
    documents = template(chart, values)
    for document in documents:
        if not is_custom(document) and "networking.k8s.io" not in document["apiVersion"].removeprefix(
            "networking.k8s.io/"
        ):
            kubernetes_validate.validate(document, VERSIONS[1], strict=True)
    return comparable(documents)


def at(document: Any, way: str) -> Any:
    """Fields by name, entries by position or by what names them; names may have dots in them."""
    while way:
        if isinstance(document, list):
            position, _, rest = way.partition(".")
            if position.isdigit():
                document, way = document[int(position)], rest
                continue
            keys = ("name", "key", "topologyKey")
            known = {
                str(each[key]): each for each in document for key in keys if isinstance(each, dict) and key in each
            }
        else:
            known = document
        name = max((each for each in known if way == each or way.startswith(f"{each}.")), key=len)
        document, way = known[name], way.removeprefix(name).removeprefix(".")
    return document


def check(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        for name, value in expected.items():
            if value == "absent":
                assert name not in found
            else:
                check(found[name], value)
    else:
        assert found == expected


@pytest.mark.parametrize(("which", "value"), [(which, each) for which, values in SETS.items() for each in values])
def test_an_ordinary_value_is_accepted_and_appears_in_the_objects(chart: Path, which: str, value: Value) -> None:
    key, _, way = value.seen.partition(" ")
    kind, name = key.split("/")
    document = objects(chart, which).get((kind, name))
    expected = yaml.safe_load(value.expected)
    if expected == "absent":
        assert document is None
    elif str(expected).startswith("absent "):
        assert expected.removeprefix("absent ") not in {each["name"] for each in at(document, way)}
    else:
        check(at(document, way), expected)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("overlay=laptop", "overlay"),
        ("components.monitor=true", "monitor"),
        ("components.monitoring=yes-please", "monitoring"),
        ("components.pull-secret=false", "pull-secret"),
        ("components.multi-node-verifier=true", "multi-node-verifier"),
        ("drafters.medusa=true", "medusa"),
        ("setting.registry=x", "setting"),
        ("settings.regstry=x", "regstry"),
        ("settings.proxy=proxy:3128", "proxy"),
        ("settings.target_storage=big", "target_storage"),
        ("models.target_revision=main", "target_revision"),
        ("deployments.verifier.replicas=many", "replicas"),
        ("deployments.verifier.affinity=x", "affinity"),
        ("deployments.verifier.resource.limits.cpu=1", "resource"),
        ("deployments.verifier.env.A.value=1", "env"),
        ("drain.balancers_s=0", "balancers_s"),
        ("drain.clients_s=1", "clients_s"),
        ("service.type=External", "type"),
        ("autoscaling.gateway.maxReplicaCount=3", "maxReplicaCount"),
        ("nameOverride=foo", "nameOverride"),
        ("overrides.verifier.spec=x", "overrides"),
        # What the schema cannot know, with the sentence's beginning.
        ("deployments.verfier.replicas=2", "deployments.verfier: the overlay standalone has no such"),
        ("overrides.Deployment/verfier.a=b", "the overlay standalone has no such object; it has "),
        ("autoscaling.gateway.maxReplicas=3", "autoscaling.gateway: components.autoscaling=true"),
        ("components.autoscaling=true", "components.autoscaling needs components.monitoring=true"),
        ("components.public-certificate=true", "components.public-certificate stands on mtls"),
        ("components.mtls=true,components.client-certificate=true", "mtls and client-certificate exclude each other"),
        ("secrets.gateway-store.existingSecret=x", "secrets.gateway-store: nothing of the overlay standalone reads it"),
        ("existingClaims.models=x", "existingClaims.models: nothing"),
        ("podMonitor.labels.a=b", "podMonitor.labels: components.monitoring=true"),
        ("components.clients=false,service.type=NodePort", "service: components.clients=false"),
        ("deployments.verifier.terminationGracePeriodSeconds=30", "its pods need 70 s to end"),
        ("overlay=local,components.multi-gpu-verifier=true", "components.multi-gpu-verifier stands on gpu-verifier"),
        ("vllm.tensorParallel=2", "vllm: components.multi-gpu-verifier=true"),
    ],
)  # fmt: skip
def test_values_that_nothing_reads_or_that_cannot_work_are_refused(chart: Path, given: str, named: str) -> None:
    done = rendered(chart, {}, "slipstream", "--values", ONE_POOL, "--set", given)
    assert done.returncode != 0 and named in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("registry", "settings.registry"),
        ("pool_label", "settings.pool_label and settings."),
        ("verifier_pool", "settings.verifier_pool"),
        ("drafter_pool", "settings.drafter_pool"),
    ],
)
def test_an_overlay_for_gpus_asks_for_registry_and_pools(chart: Path, missing: str, named: str) -> None:
    """Without pools the scheduler puts drafters on verifiers' nodes, which then have no GPU left for a verifier."""
    done = rendered(chart, {"overlay": "gpu", "settings": POOLS | {missing: ""}})
    assert done.returncode != 0 and named in done.stderr
    assert rendered(chart, {"overlay": "local"}).returncode == 0


def test_pods_may_be_placed_by_selectors_of_ones_own_instead_of_pools(chart: Path) -> None:
    placed = {"verifier": {"nodeSelector": {"gpu": "h100"}}, "drafter-model": {"pod": {"nodeSelector": {"gpu": "l4"}}}}
    documents = template(chart, {"settings": POOLS | {"pool_label": ""}, "deployments": placed})
    for name, gpu in (("verifier", "h100"), ("drafter-model", "l4")):
        spec = find(documents, "Deployment", name)["spec"]["template"]["spec"]
        assert spec["nodeSelector"] == {"gpu": gpu} and "affinity" not in spec


def test_clients_inside_find_the_release_s_namespace_in_the_certificate(chart: Path) -> None:
    documents = template(chart, {"overlay": "production"}, "c")
    names = find(documents, "Certificate", "gateway-clients")["spec"]["dnsNames"]
    assert names == ["gateway", "gateway.c.svc", "gateway.c.svc.cluster.local"]
    assert list(certificates_prove_roles(documents)) == []


def test_installing_the_charts_source_fails_and_names_make_chart() -> None:
    done = helm("template", "slipstream", K8S / "chart", "--kube-version", "1.32.0")
    assert done.returncode != 0 and "make chart" in done.stderr and "nil pointer" not in done.stderr


def test_an_override_removes_fields_and_entries_and_touches_no_other_object(chart: Path) -> None:
    patch = {
        "metadata": {"labels": {"slipstream/pool": None}},
        "spec": {
            "template": {
                "spec": {
                    "containers": [{"name": "verifier", "env": [{"name": "VERIFIER_THREADS", "$patch": "delete"}]}],
                    "volumes": [{"name": "shm", "$patch": "delete"}],
                }
            }
        },
    }
    former = comparable(template(chart, {}))
    changed = comparable(template(chart, {"overrides": {"Deployment/verifier": patch}}))
    assert {key for key, each in changed.items() if each != former[key]} == {("Deployment", "verifier")}
    (pod,) = workloads([changed["Deployment", "verifier"]])
    (before,) = workloads([former["Deployment", "verifier"]])
    assert "slipstream/pool" not in changed["Deployment", "verifier"]["metadata"]["labels"]
    assert {each["name"] for each in before.spec["volumes"]} - {each["name"] for each in pod.spec["volumes"]} == {"shm"}
    variables = [[each["name"] for each in which.containers[-1]["env"]] for which in (before, pod)]
    assert variables[1] == [name for name in variables[0] if name != "VERIFIER_THREADS"]


def test_a_variable_that_stands_in_others_is_written_before_them(chart: Path) -> None:
    """Kubernetes replaces `$(NAME)` by what stands above it alone."""
    given = {"envFull": [{"name": "A", "value": "1"}, {"name": "VERIFIER_THREADS", "value": "$(A)"}]}
    documents = template(chart, {"deployments": {"verifier": given}})
    entries = find(documents, "Deployment", "verifier")["spec"]["template"]["spec"]["containers"][0]["env"]
    names = [each["name"] for each in entries]
    assert names.index("A") < names.index("VERIFIER_THREADS") and len(set(names)) == len(names)


def test_larger_targets_have_larger_volumes(chart: Path) -> None:
    sizes = {}
    for on in (False, True):
        documents = template(chart, {"components": {"multi-gpu-verifier": on}})
        volumes = find(documents, "Deployment", "verifier")["spec"]["template"]["spec"]["volumes"]
        (claim,) = (each["ephemeral"]["volumeClaimTemplate"] for each in volumes if each["name"] == "models")
        sizes[on] = claim["spec"]["resources"]["requests"]["storage"]
    assert sizes == {False: "60Gi", True: "300Gi"}
