"""What an image runs, and what stands for models that this machine cannot fetch or compute."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.programs import program, store

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    "gateway": "gateway",
    "drafter": "drafter_svc",
    "drafter-lookup": "drafter_svc",
    "verifier": "verifier_svc",
    "verifier-vllm": "verifier_svc",
    "drafter-vllm": "drafter_svc",
}
"""By the image's name."""
IN_IMAGE = "/opt/slipstream"
"""Where an image has the repository's models."""
EMULATED = {
    "VERIFIER_MODEL": "emulated:base_ms=30&token_ms=0.2&vocabulary=4096",
    "DRAFTER_MODEL": "emulated:base_ms=4&acceptance=0.9&vocabulary=4096",
    "GATEWAY_TOKENIZER": str(ROOT / "models" / "target"),
    "DRAFTER_ENGINE": "embedded",
    "DRAFTER_VLLM_ARGS": "",
    "VERIFIER_DEVICE": "cpu",
    "DRAFTER_DEVICE": "cpu",
    "VERIFIER_DTYPE": "auto",
    "DRAFTER_DTYPE": "auto",
}
"""By variable, where it is there."""


class NoSuchImage(Exception):
    """Of an image that nothing here stands for."""


def command(image: str) -> list[str]:
    """Of a container that names none itself. Raises NoSuchImage."""
    name = re.split("[@:]", image.rsplit("/", 1)[-1])[0]
    if name == "valkey":
        return []
    if name in ("jaeger", "opentelemetry-collector-contrib"):
        return [program("jaeger" if name == "jaeger" else "otelcol")]
    if name not in MODULES:
        raise NoSuchImage(image)
    return [sys.executable, "-m", MODULES[name]]


def environment(values: Mapping[str, str]) -> dict[str, str]:
    """A container's variables, as this machine can serve them."""
    shipped = [name for name, value in values.items() if value.startswith(IN_IMAGE)]
    if shipped:
        return {name: value.replace(IN_IMAGE, str(ROOT)) for name, value in values.items()}
    changed = {name: EMULATED[name] for name in values.keys() & EMULATED.keys()}
    measured = {"VERIFIER_MEASURE_S": "0.2"} if "VERIFIER_MODEL" in values else {}
    return {**values, **changed, **measured}


def store_commands(folder: Path) -> None:
    """`valkey-server` and `valkey-cli` in the folder, whichever store this machine has."""
    folder.mkdir(parents=True, exist_ok=True)
    server, cli = store()
    for name, line in {
        "valkey-server": f'exec {server} "$@"',
        "valkey-cli": f'REDISCLI_AUTH=$VALKEYCLI_AUTH exec {cli} "$@"',
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
