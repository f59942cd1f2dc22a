"""Probes as a kubelet asks them."""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Callable, Mapping

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.cluster.api import Object


def succeeds(probe: Object, address: str, ports: Mapping[str, int], run: Callable[[list[str], float], int]) -> bool:
    """`run`: executes a command in the container for so many seconds at most, and returns its status."""
    seconds = float(probe.get("timeoutSeconds", 1))
    try:
        if "grpc" in probe:
            return _serving(f"{address}:{probe['grpc']['port']}", probe["grpc"].get("service") or "", seconds)
        if "httpGet" in probe:
            asked = probe["httpGet"]
            url = f"http://{address}:{ports.get(asked['port'], asked['port'])}{asked.get('path', '/')}"
            with urllib.request.urlopen(url, timeout=seconds) as answer:
                return int(answer.status) < 400
        return run(probe["exec"]["command"], seconds) == 0
    except (OSError, grpc.RpcError, subprocess.TimeoutExpired):
        return False


def _serving(target: str, service: str, seconds: float) -> bool:
    with grpc.insecure_channel(target) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=seconds)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
