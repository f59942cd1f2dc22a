"""The route that `gateway.api.http` shows, as it stands there: what a newcomer copies works."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter

import gateway.api.http
from gateway.api import http_front
from gateway.api.http.dependencies import HttpDependencies
from tests.support.http_client import web
from tests.support.scripted_gateway import Setting


def shown_routes() -> Callable[[HttpDependencies], APIRouter]:
    """`routes` of the module in the docstring."""
    lines = (gateway.api.http.__doc__ or "").splitlines()
    first = lines.index("    import json")
    last = lines.index("        return router")
    made: dict[str, Any] = {"__name__": "lines"}
    exec(textwrap.dedent("\n".join(lines[first : last + 1])), made)
    routes: Callable[[HttpDependencies], APIRouter] = made["routes"]
    return routes


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_front, "_ROUTES", (*http_front._ROUTES, shown_routes()))


async def test_the_route_streams_the_text(setting: Setting) -> None:
    asked = {"prompt": "a", "max_tokens": 6, "seed": 1}
    async with AsyncExitStack() as stack:
        served = await web(setting, stack, setting.verifier())
        whole = (await served.post("/v1/completions", asked)).json()["choices"][0]["text"]
        events = [event.data for event in await served.events("/v1/lines", asked)]
        stopped = [event.data for event in await served.events("/v1/lines", asked | {"stop": whole})]
        refused = await served.post("/v1/lines", {"prompt": 5})
    assert events[-1] == "[DONE]" and "".join(map(json.loads, events[:-1])) == whole != ""
    assert stopped == ["[DONE]"]
    assert refused.status_code == 400 and "prompt" in refused.json()["error"]["message"]


async def test_the_route_obeys_keys(setting: Setting, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text("")
    async with AsyncExitStack() as stack:
        served = await web(setting, stack, setting.verifier(), api_keys=str(tmp_path / "keys.toml"))
        assert (await served.post("/v1/lines", {"prompt": "a"})).status_code == 401
