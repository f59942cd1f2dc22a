"""The stubs that are checked in are those the contract generates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2, worker_pb2

ROOT = Path(__file__).resolve().parents[2]


def generate(out: Path, protos: list[Path], *outputs: str) -> None:
    options = [f"--{output}={out}" for output in outputs]
    names = [str(proto) for proto in protos]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", *options, *names]
    subprocess.run(command, check=True, timeout=60)


def test_generated_stubs_equal_the_checked_in_ones(tmp_path: Path) -> None:
    protos = sorted((ROOT / "protos/slipstream/v1").glob("*.proto"))
    services = [proto for proto in protos if "\nservice " in proto.read_text()]
    generate(tmp_path, protos, "python_out", "pyi_out")
    generate(tmp_path, services, "grpc_python_out")
    generated = {path.name: path.read_text() for path in (tmp_path / "slipstream/v1").iterdir()}
    stubs = (ROOT / "slipstream/v1").glob("*_pb2*")
    assert generated == {path.name: path.read_text() for path in stubs}


def test_every_rpc_states_its_status_codes() -> None:
    for proto in (ROOT / "protos/slipstream/v1").glob("*.proto"):
        comment: list[str] = []
        for line in map(str.strip, proto.read_text().splitlines()):
            if line.startswith("rpc "):
                assert any("Status codes" in text for text in comment), f"{proto.name}: {line}"
            comment = [*comment, line] if line.startswith("//") else []


def test_an_application_needs_two_files_and_gets_no_other_service() -> None:
    needed = {gateway_pb2.DESCRIPTOR.name: gateway_pb2.DESCRIPTOR}
    for file in list(needed.values()):
        needed |= {other.name: other for other in file.dependencies}
    assert set(needed) == {"slipstream/v1/gateway.proto", "slipstream/v1/types.proto"}
    assert [name for file in needed.values() for name in file.services_by_name] == ["GatewayService"]


def test_what_moved_between_files_has_its_name_and_is_found_where_it_was() -> None:
    for file, names in (
        (verifier_pb2, ("DrafterShare", "DraftSpan", "FinishReason", "FINISH_REASON_STOP")),
        (worker_pb2, ("Role", "ROLE_VERIFIER", "WatchResponse")),
    ):
        for name in names:
            assert getattr(file, name) == getattr(types_pb2, name)
    assert types_pb2.DrafterShare.DESCRIPTOR.full_name == "slipstream.v1.DrafterShare"
    assert types_pb2.FinishReason.DESCRIPTOR.full_name == "slipstream.v1.FinishReason"


def test_every_file_says_where_other_languages_put_it() -> None:
    for proto in (ROOT / "protos/slipstream/v1").glob("*.proto"):
        text = proto.read_text()
        for option in ("go_package", "java_package", "csharp_namespace", "objc_class_prefix"):
            assert f'option {option} = "' in text, proto.name
        assert "option java_multiple_files = true;" in text


def test_the_document_and_the_programs_have_one_service_configuration() -> None:
    document = (ROOT / "docs/grpc.md").read_text()
    go = (ROOT / "examples/go/main.go").read_text()
    java = (ROOT / "examples/java/src/main/java/client/Client.java").read_text()
    found = json.loads(document.split("```json\n")[1].split("```")[0])
    assert found == json.loads(go.split("serviceConfig = `")[1].split("`")[0])
    retry = found["methodConfig"][0]["retryPolicy"]
    assert retry["retryableStatusCodes"] == ["UNAVAILABLE"]
    for name, value in retry.items():
        assert f'"{name}", {value if isinstance(value, int) else chr(34)}' in java.replace("List.of(", "")
    methods = {each["method"] for each in found["methodConfig"][0]["name"]}
    known = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"].methods_by_name
    assert methods <= set(known) and not methods & {"Generate", "Resume", "Rollback"}
    assert all(f'"method", "{method}"' in java for method in methods)
    assert found["healthCheckConfig"]["serviceName"] in java
