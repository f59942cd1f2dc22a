"""grpc.health.v1.Health: what probes and load balancers ask, without a key.

grpc's own service holds a lock while it writes to a watcher, so one that reads nothing keeps every change of the status
waiting, and the end of the process; it has no bound on watchers, and fails at `List`.
"""

from __future__ import annotations

import asyncio
from typing import TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.rpc.status_interceptor import Context

MOST_WATCHERS = 1024
"""Streams of `Watch` at a time."""
Answer: TypeAlias = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the library has no types
    """Statuses by name."""

    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}
        self._changed = asyncio.Event()
        """Set at the next change, and replaced then."""
        self._watchers = 0

    def set(self, service: str, serving: bool) -> None:
        """`service`: one of the few names that the server has; empty for the server itself."""
        status = Answer.SERVING if serving else Answer.NOT_SERVING
        self._answers[service] = Answer(status=status)
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> Answer:
        if request.service not in self._answers:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return self._answers[request.service]

    async def List(self, request: health_pb2.HealthListRequest, context: Context) -> health_pb2.HealthListResponse:
        return health_pb2.HealthListResponse(statuses=self._answers)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        if self._watchers >= MOST_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED)
        self._watchers += 1
        try:
            unknown, sent = Answer(status=Answer.SERVICE_UNKNOWN), None
            while True:
                changed, answer = self._changed, self._answers.get(request.service, unknown)
                if answer != sent:
                    await context.write(answer)
                    sent = answer
                await changed.wait()
        finally:
            self._watchers -= 1
