"""`python -m slipstream.health HOST:PORT`: whether the role there may be sent work, for an image's HEALTHCHECK."""

from __future__ import annotations

import sys

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


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m slipstream.health HOST:PORT [SERVICE]")
    sys.exit(0 if healthy(*sys.argv[1:]) else 1)
