"""Whether a role may be sent work, by its plaintext health port. In images `docker/healthcheck` asks the same."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def healthy(address: str, service: str = "") -> bool:
    """Whether the plaintext health port at HOST:PORT says SERVING, within TIMEOUT_S; never raises."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
