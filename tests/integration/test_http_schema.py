"""Every route of the HTTP API against requests that its own schema makes, right ones and wrong ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from tests.front import Setting
from tests.web import CHAT_TEMPLATE, web

CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]
BOUNDED = settings(
    max_examples=8,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def attack(url: str, document: dict[str, Any], mode: GenerationMode) -> Counter[str]:
    """Answers of each route. Raises for an answer that is the server's fault, or that the schema does not know."""
    answers: Counter[str] = Counter()

    def check(case: Any) -> None:
        response = case.call(base_url=url, timeout=60)
        answers[case.operation.path] += 1
        case.validate_response(response, checks=CHECKS)
        assert response.headers["x-request-id"]
        if response.status_code >= 400:
            assert "error" in response.json()

    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        strategy = found.ok().as_strategy(generation_mode=mode)
        with contextlib.suppress(Unsatisfiable):  # nothing can be wrong in a request that has nothing in it
            BOUNDED(given(case=strategy)(check))()
    return answers


@pytest.mark.parametrize("mode", list(GenerationMode))
async def test_no_request_inside_the_schema_or_outside_is_the_servers_fault(
    setting: Setting, tmp_path: Path, mode: GenerationMode
) -> None:
    (tmp_path / "chat.jinja").write_text("{# <tool_call> #}" + CHAT_TEMPLATE)
    async with AsyncExitStack() as stack:
        served = await web(setting, stack, setting.verifier(), chat_template=str(tmp_path / "chat.jinja"))
        document = (await served.client.get("/openapi.json")).json()
        answers = await asyncio.to_thread(attack, served.url, document, mode)
    posted = {path for path, operations in document["paths"].items() if "post" in operations}
    assert answers and (posted if mode is GenerationMode.NEGATIVE else set(document["paths"])) <= set(answers)
