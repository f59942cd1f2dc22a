"""The table has each route and RPC that a gateway has, and each of their resources."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from gateway.api import http_front
from slipstream.v1 import gateway_pb2
from tests.isolation.attacks import ATTACKS
from tests.isolation.table import HTTP, NONE, RESOURCES, RPCS

FILES = (gateway_pb2, health_pb2, reflection_pb2)
"""Of the services that a gateway registers."""


def routes() -> Iterator[str]:
    parts: Any = SimpleNamespace(grpc=None)
    own = [route for routes in http_front._ROUTES for route in routes(parts).routes]
    for route in (*own, *FastAPI(docs_url=None, redoc_url=None).routes):
        yield from (f"{method} {route.path}" for method in route.methods - {"HEAD"})  # type: ignore[attr-defined]


def rpcs() -> Iterator[str]:
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            yield from (f"{service.full_name}/{method.name}" for method in service.methods)


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
