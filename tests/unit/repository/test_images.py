"""The Dockerfile and compose.yaml as data: what they promise about users, privileges, settings and signals."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from packaging.utils import canonicalize_name

from drafter_svc.config import DrafterConfig
from gateway.config import GatewayConfig
from slipstream.config import from_env
from slipstream.telemetry.metrics import DECLARED
from tools.lock import EXTRAS, closure, for_cuda, wanted
from verifier_svc.config import VerifierConfig

ROOT = Path(__file__).resolve().parents[3]
LOCK = ROOT / "docker" / "constraints.txt"
CUDA_LOCK = ROOT / "docker" / "constraints-cu130.txt"
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\w+:-(.*?)\}", r"\1", (ROOT / "compose.yaml").read_text()))[
    "services"
]
"""With every variable at its default."""
GPU: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.gpu.yaml").read_text())["services"]
ROLES: dict[str, type[Any]] = {"gateway": GatewayConfig, "drafter": DrafterConfig, "verifier": VerifierConfig}
OURS = {
    name: found[1] for name, service in COMPOSE.items() if (found := re.match(r"slipstream/(\w+):", service["image"]))
}
"""Our services by their names, with the image that each runs, which is named after its role."""


def stages(dockerfile: str) -> dict[str, str]:
    """The instructions of each stage by its name."""
    found = re.split(r"^FROM +(\S+) +AS +(\S+)$", dockerfile, flags=re.MULTILINE)
    return dict(zip(found[2::3], found[3::3], strict=True))


def settings(stage: str) -> dict[str, str]:
    return dict(
        re.findall(r"\b([A-Z][A-Z_]*)=(\S+)", "\n".join(re.findall(r"^ENV(?:.*\\\n)*.*$", stage, re.MULTILINE)))
    )


def environment(name: str) -> dict[str, str]:
    """What the service's process sees: the image's settings, then compose's."""
    return settings(stages(DOCKERFILE)[OURS[name]]) | COMPOSE[name]["environment"]


def config(name: str) -> Any:
    """Of the service's role."""
    return from_env(ROLES[OURS[name]], f"{OURS[name].upper()}_", environment(name))


def test_the_dockerfile_is_lint_free() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "hadolint", ROOT / "docker" / "Dockerfile"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("role", ROLES)
def test_a_role_runs_without_root_and_receives_signals_itself(role: str) -> None:
    found = stages(DOCKERFILE)
    assert "USER 10001:10001" in found["role"] and "USER" not in found[role]
    assert re.search(r'^ENTRYPOINT \["python", "-m", "\w+"\]$', found[role], re.MULTILINE)
    assert re.search(r'^HEALTHCHECK .*CMD \["healthcheck",', found[role], re.MULTILINE)
    assert "apt-get" not in found["role"] + found[role]  # no more than the base has


def test_images_for_gpus_alone_have_a_compiler() -> None:
    """Triton needs one at the first kernel that it launches."""
    found = stages(DOCKERFILE)
    assert [name for name in found if "apt-get" in found[name]] == ["wheel", "worker"]  # the first is in no image
    (command,) = re.findall(r"^RUN (case .*? esac)$", found["worker"], re.MULTILINE | re.DOTALL)
    for index, installs in (("whl/cpu", False), ("whl/cu130", True)):
        script = f"apt-get() {{ echo $*; }}; rm() {{ :; }}\n{command}"
        asked = subprocess.run(
            ["bash", "-c", script], env={"TORCH_INDEX": index}, capture_output=True, text=True, check=True
        )
        assert ("gcc" in asked.stdout) is installs


@pytest.mark.parametrize(("image", "venv"), [("gateway", "gateway-venv"), ("drafter-lookup", "lookup-venv")])
def test_images_of_roles_without_a_model_are_made_without_torch(image: str, venv: str) -> None:
    found = stages(DOCKERFILE)
    assert f"--from={venv}" in found[image] and "--from=worker-venv" not in found[image]
    assert "torch" not in found[venv]


def test_a_wheel_goes_to_the_python_that_made_it() -> None:
    """Its compiled modules fit no other, and vLLM's image has another one."""
    found = re.findall(r"^FROM +(\S+) +AS +(\S+)$", DOCKERFILE, flags=re.MULTILINE)
    parents = {name: base for base, name in found}

    def root(stage: str) -> str:
        return root(parents[stage]) if stage in parents else stage

    taken = {
        name: re.findall(r"^COPY --from=(\S+) /wheels", text, re.MULTILINE) for name, text in stages(DOCKERFILE).items()
    }
    made = {name for name, text in stages(DOCKERFILE).items() if "pip wheel" in text}
    assert {each for builders in taken.values() for each in builders} == made == {"wheel", "wheel-vllm"}
    for stage, builders in taken.items():
        assert all(root(builder) == root(stage) for builder in builders), stage


@pytest.mark.parametrize("cuda", ["", "cu130", "cu126"])
def test_make_builds_every_image_and_those_for_gpus_with_their_cuda(cuda: str) -> None:
    command = ["make", "-s", "images", "ENGINE=echo", "REGISTRY=r", "VERSION=9", f"CUDA={cuda}", "PUSH=1"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    built = dict(re.findall(r"--target (\S+) -t (\S+)", "\n".join(lines)))
    workers = "-cuda" if cuda else ""
    expected = {"gateway": "r/gateway:9", "drafter-lookup": "r/drafter-lookup:9"}
    expected |= {role: f"r/{role}:9{workers}" for role in ("drafter", "verifier")}
    expected |= {f"{role}-vllm": f"r/{role}-vllm:9" for role in ("drafter", "verifier") if cuda}
    assert built == expected
    assert set(built) <= set(stages(DOCKERFILE))
    indexed = {re.findall(r"--target (\S+)", line)[0] for line in lines if f"/whl/{cuda} " in line and cuda}
    assert indexed == ({"drafter", "verifier"} if cuda else set())
    assert [line.split()[1] for line in lines if line.startswith("push")] == list(built.values())


@pytest.mark.parametrize("role", ROLES)
def test_an_image_is_built_by_one_service_and_found_by_the_others(role: str) -> None:
    services = [COMPOSE[name] for name in OURS if OURS[name] == role]
    assert [service["build"]["target"] for service in services if "build" in service] == [role]
    assert all(service.get("pull_policy") == "never" for service in services if "build" not in service)
    assert len({service["image"] for service in services}) == 1


def test_images_are_made_of_every_package_that_is_installed() -> None:
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    copied = re.findall(r"^COPY (\w+) \1$", stages(DOCKERFILE)["sources"], re.MULTILINE)
    let_through = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert {name.removesuffix("*") for name in packaged} == set(copied) <= set(let_through)


def test_whatever_a_stage_copies_reaches_the_engine() -> None:
    """A file that .dockerignore keeps back ends the build."""
    let_through = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    copies = [line.split()[1:] for line in re.findall(r"^COPY .*$", DOCKERFILE, re.MULTILINE) if "--from=" not in line]
    sources = {word for words in copies for word in words[:-1] if not word.startswith("--")}
    assert {"setup.py", "slipstream", "docker/healthcheck", "docker/constraints.txt"} <= sources
    kept_back = {source for source in sources if not any(fnmatch(source, pattern) for pattern in let_through)}
    assert not kept_back
    assert all(list(ROOT.glob(source)) for source in sources)


def pins(file: Path) -> dict[str, str]:
    """Versions by name."""
    return dict(line.split("==") for line in file.read_text().splitlines() if not line.startswith("#"))


def test_images_are_built_of_versions_that_were_tested() -> None:
    """Each package that the roles require has one, and torch's index may not bring another."""
    locked = pins(LOCK)
    for needed in wanted():
        assert needed.specifier.contains(locked[canonicalize_name(needed.name)]), needed
    assert set(locked) >= {name for name in closure(wanted()) if not for_cuda(name)}
    others = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    assert all(locked.get(name, version) == version for name, version in others)
    installs = re.findall(r"pip install .*?(?=&&|\n\n|\nRUN|\nCOPY)", DOCKERFILE, re.DOTALL)
    assert len(installs) == 6
    assert all("-c /constraints.txt" in install for install in installs)
    assert set(EXTRAS) == {name for extras in re.findall(r"whl\)\[(.*?)\]", DOCKERFILE) for name in extras.split(",")}


def test_only_images_for_gpus_are_held_to_versions_of_cuda() -> None:
    """An image for CPUs takes torch's CPU build, which requires none of them."""
    assert not [name for name in pins(LOCK) if for_cuda(name)]
    assert pins(CUDA_LOCK) and all(map(for_cuda, pins(CUDA_LOCK)))
    if torch.version.cuda is not None:  # PyPI's build for Linux; elsewhere its libraries are not there to be compared
        assert set(pins(CUDA_LOCK)) == {name for name in closure(wanted()) if for_cuda(name)}


@pytest.mark.parametrize(("index", "held"), [("whl/cpu", False), ("whl/cu130", True), ("whl/cu126", False)])
def test_an_image_takes_the_versions_of_its_own_cuda(index: str, held: bool, tmp_path: Path) -> None:
    (command,) = re.findall(r"^RUN (touch .*)$", stages(DOCKERFILE)["worker-venv"], re.MULTILINE)
    for file in (LOCK, CUDA_LOCK):
        shutil.copy(file, tmp_path)
    script = command.replace("/constraints", f"{tmp_path}/constraints")
    subprocess.run(["sh", "-c", script], env={"TORCH_INDEX": f"host/{index}"}, check=True)
    found = pins(tmp_path / "constraints.txt")
    assert found == (pins(LOCK) | pins(CUDA_LOCK) if held else pins(LOCK))


@pytest.mark.parametrize("name", OURS)
def test_a_service_of_ours_can_read_its_settings(name: str) -> None:
    """Unknown names are errors, as are values that make no sense."""
    port = config(name).health_listen.rpartition(":")[2]
    assert f'"127.0.0.1:{port}"' in stages(DOCKERFILE)[OURS[name]]


@pytest.mark.parametrize("name", OURS)
def test_a_service_of_ours_has_time_to_end(name: str) -> None:
    read = config(name)
    least = read.grace_s + (read.store_grace_s if isinstance(read, GatewayConfig) else 0.0)
    assert float(COMPOSE[name]["stop_grace_period"].removesuffix("s")) > least


def test_clients_reach_the_gateway_by_grpc_and_http() -> None:
    read = config("gateway")
    ports = [address.rpartition(":")[2] for address in (read.listen, read.http)]
    assert COMPOSE["gateway"]["ports"] == [f"127.0.0.1:{port}:{port}" for port in ports]
    exposed = re.findall(r"^EXPOSE (.+)$", stages(DOCKERFILE)["gateway"], re.MULTILINE)[0].split()
    assert set(ports) < set(exposed)


def test_the_gateway_asks_for_services_that_are_there() -> None:
    given = environment("gateway")
    named = [*given["GATEWAY_VERIFIERS"].split(","), *re.findall(r"=([^,]+)", given["GATEWAY_DRAFTERS"])]
    for host, port in (address.split(":") for address in named):
        assert config(host).listen.endswith(f":{port}")


@pytest.mark.parametrize("name", COMPOSE)
def test_every_service_runs_with_as_little_as_it_can(name: str) -> None:
    service = COMPOSE[name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert re.search(r"\d[gm]\}?$", service["mem_limit"])
    assert re.search(r":v?\d" if name in OURS else r":v?\d.*@sha256:[0-9a-f]{64}$", service["image"])


@pytest.mark.parametrize("name", GPU)
def test_a_service_on_a_gpu_can_read_its_settings_and_load_what_it_compiles(name: str) -> None:
    given, role = environment(name) | GPU[name]["environment"], OURS[name]
    assert from_env(ROLES[role], f"{role.upper()}_", given).device == "cuda"
    assert GPU[name]["tmpfs"] == ["/tmp:exec"] and "whl/cu" in GPU[name]["build"]["args"]["TORCH_INDEX"]
    (device,) = GPU[name]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"] and COMPOSE[name]["volumes"] == ["models:/models"]


def test_the_base_of_our_images_is_named_by_digest() -> None:
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.11\.\d+-slim@sha256:[0-9a-f]{64}$", DOCKERFILE, re.MULTILINE)


def test_manifests_and_compose_name_one_version_of_others_images() -> None:
    texts = [file.read_text() for file in (ROOT / "k8s").rglob("*.yaml")]
    named = set(re.findall(r"image: (\S+@sha256:\w+)", "\n".join(texts)))
    assert len(named) == 3 and named < {service["image"] for service in COMPOSE.values()}


def test_prometheus_scrapes_every_service_of_ours_and_its_targets_have_no_label_of_a_metric() -> None:
    """It would rename the metric's."""
    scraped = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yaml").read_text())["scrape_configs"]
    groups = [group for config in scraped for group in config["static_configs"]]
    ports = {name: config(name).metrics_listen.rpartition(":")[2] for name in OURS}
    assert sorted(t for g in groups for t in g["targets"]) == sorted(f"{name}:{port}" for name, port in ports.items())
    taken = {label for metric in DECLARED for label in metric.labels}
    assert not taken & {label for group in groups for label in group.get("labels", {})}
    assert not taken & {rule.get("target_label") for each in scraped for rule in each.get("relabel_configs", [])}


def test_every_file_that_is_mounted_is_there() -> None:
    mounts = [volume for service in COMPOSE.values() for volume in service.get("volumes", [])]
    missing = [volume for volume in mounts if volume.startswith("./") and not (ROOT / volume.split(":")[0]).exists()]
    assert not missing


def test_the_workflow_publishes_what_make_builds() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "images.yaml").read_text())
    publish = workflow["jobs"]["publish"]
    [command] = [step["run"] for step in publish["steps"] if "run" in step]
    built: set[str] = set()
    for cuda in publish["strategy"]["matrix"]["cuda"]:
        environment = os.environ | {"REGISTRY": "r", "CUDA": cuda, "GITHUB_REF_NAME": "v9.1.0"}
        dry = command.replace("'docker buildx'", "echo") + " -s"
        printed = subprocess.run(
            ["bash", "-c", dry], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        assert all("--push --sbom=true" in line for line in printed.stdout.splitlines())
        built.update(re.findall(r" -t (\S+)", printed.stdout))
    roles = {"gateway", "drafter", "drafter-lookup", "verifier", "drafter-vllm", "verifier-vllm"}
    assert built == {f"r/{role}:9.1.0" for role in roles} | {f"r/{role}:9.1.0-cuda" for role in ("drafter", "verifier")}
