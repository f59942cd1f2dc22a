"""The table has each route and RPC that a gateway has, and each of their resources."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from grpc_health.v1 import health_pb2_grpc

from gateway.api import http_front
from gateway.api.grpc_service import GatewayService
from slipstream.rpc.health import Health
from tests.isolation.attacks import ATTACKS
from tests.isolation.table import HTTP, NONE, RESOURCES, RPCS


class Registered:
    """Takes services as a gRPC server does, and keeps the names of their methods."""

    def __init__(self) -> None:
        self.methods: set[str] = set()

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self.methods |= {name.strip("/") for handler in handlers for name in handler._method_handlers}

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        self.methods |= {f"{service}/{name}" for name in handlers}


def routes() -> Iterator[str]:
    parts: Any = SimpleNamespace(grpc=None)
    own = [route for routes in http_front._ROUTES for route in routes(parts).routes]
    for route in (*own, *FastAPI(openapi_url=None).routes):
        yield from (f"{method} {route.path}" for method in route.methods - {"HEAD"})  # type: ignore[attr-defined]


def rpcs() -> set[str]:
    """Of the services that a gateway registers, and of health, which every server has."""
    server: Any = Registered()
    missing: Any = None
    GatewayService(missing, missing, missing).register(server)
    health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
    return server.methods  # type: ignore[no-any-return]


def test_every_route_and_rpc_has_a_row() -> None:
    assert sorted(HTTP) == sorted(routes())
    assert sorted(RPCS) == sorted(rpcs())


@pytest.mark.parametrize("target", [*HTTP, *RPCS])
def test_every_row_has_an_attack_on_each_resource_or_a_reason(target: str) -> None:
    row = (HTTP | RPCS)[target]
    assert sorted(row) == sorted(RESOURCES)
    for resource, name in row.items():
        assert name in ATTACKS or (name.startswith(NONE) and len(name) > len(NONE) + 10), (resource, name)


def test_every_attack_has_a_place() -> None:
    named = {name for row in (HTTP | RPCS).values() for name in row.values() if not name.startswith(NONE)}
    assert named == set(ATTACKS)
