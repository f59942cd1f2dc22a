"""The stubs that are checked in are those the contract generates."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from gateway.config import BESIDES_BYTES, GatewayConfig
from gateway.gateway import REFUSED_BYTES
from gateway.requests import validation
from gateway.text.chat_messages import MAX_MESSAGES
from slipstream.rpc import proto_conversion
from slipstream.rpc.channel import MAX_MESSAGE_BYTES
from slipstream.rpc.server import SERVER_OPTIONS
from slipstream.speculation import sampling_params
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


def test_messages_moved_between_proto_files_keep_their_full_name_and_their_old_import() -> None:
    for file, names in (
        (verifier_pb2, ("DrafterShare", "DraftSpan", "FinishReason", "FINISH_REASON_STOP")),
        (worker_pb2, ("Role", "ROLE_VERIFIER", "WatchResponse")),
    ):
        for name in names:
            assert getattr(file, name) == getattr(types_pb2, name)
    assert types_pb2.DrafterShare.DESCRIPTOR.full_name == "slipstream.v1.DrafterShare"
    assert types_pb2.FinishReason.DESCRIPTOR.full_name == "slipstream.v1.FinishReason"


def test_every_proto_file_sets_the_package_options_of_other_languages() -> None:
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


def test_the_limits_in_comments_are_those_that_are_checked() -> None:
    files = [(ROOT / f"protos/slipstream/v1/{name}.proto").read_text() for name in ("gateway", "types")]
    text = re.sub(r"\n\s*// ?", " ", "\n".join(files))
    config = GatewayConfig(verifiers=("a:1",), tokenizer="none")
    most = 2 * config.max_prompt_bytes + BESIDES_BYTES
    stops = f"at most {config.max_stop_strings} (GATEWAY_MAX_STOP_STRINGS) of 1 to {config.max_stop_bytes} bytes"
    for limit in (
        stops,
        f"At most {config.max_stop_tokens} (GATEWAY_MAX_STOP_TOKENS)",
        f"At most {validation.MAX_NAMES}, of at most {validation.MAX_NAME_CHARACTERS} characters",
        f"at most {MAX_MESSAGES}.",
        f"at most {proto_conversion.MAX_LABEL_BYTES} bytes",
        f"at most {sampling_params.MAX_NAMED_TOKENS} tokens, each bias in [-100, 100]",
        f"0 is greedy decoding; else in [{sampling_params.LEAST_TEMPERATURE:g}, 100]",
        f"In [{sampling_params.LEAST_REPETITION_PENALTY:g}, 100]; 1 is neutral",
        f"0 to {sampling_params.MAX_TOP_LOGPROBS}",
        f"{proto_conversion.MAX_PROMPT_LOGPROBS:,} numbers",
        f"GATEWAY_MAX_PROMPT_BYTES, {config.max_prompt_bytes >> 20} MiB (TEXT_TOO_LONG)",
        f"{most >> 20} MiB by default, never more than {MAX_MESSAGE_BYTES >> 20} MiB",
        f"More than {REFUSED_BYTES >> 20} MiB above that the gRPC library refuses it",
        f"metadata above {dict(SERVER_OPTIONS)['grpc.absolute_max_metadata_size'] >> 10} KiB",
        f"{validation.MAX_ANNOTATION_BYTES >> 10} KiB and {validation.ANNOTATION_BYTES_A_TOKEN} bytes for each token",
    ):
        assert limit.lower() in text.lower(), limit
