"""Clients that nobody here wrote, each in an environment of its own, against `slipstream serve` on the shipped pair.

A client's program prints a line for each thing that worked. What it has to print is written here: a program that leaves
something out fails. What texts say is the shipped pair's affair; that they are the same on each way is not.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.clients import environments
from tests.clients.conftest import Served, chosen_clients
from tests.clients.environments import Environment

EXPECTED: dict[str, str] = {
    "openai": "models completion logprobs echo words chat stream schema functions responses background items error key",
    "anthropic": "models message stream schema count error key",
    "langchain": "chat stream structured completion anthropic",
    "litellm": "chat stream text responses anthropic error",
    "litellm-proxy": "models chat stream tools structured completion responses anthropic cancel error key",
    "instructor": "schema",
    "pydantic-ai": "text stream output responses anthropic",
    "openai-agents": "chat-text chat-stream chat-output chat-tools chat-handoff chat-session chat-cancel chat-error "
    "responses-text responses-stream responses-output responses-tools responses-handoff responses-session "
    "responses-cancel responses-error previous key",
    "llama-index": "chat stream completion structured tools agent responses cancel error key",
    "haystack": "chat stream logprobs structured tools agent pipeline responses error key",
    "semantic-kernel": "chat stream structured tools prompt agent completion cancel error key",
    "llm": "models chat conversation schema tools completion error key",
    "aider": "ask edit error key",
    "lm-eval": "loglikelihood remote",
    "openai-js": "chat stream schema tools responses error",
    "anthropic-js": "message stream tools schema error",
    "vercel-ai": "text stream object responses anthropic error",
    "grpc-js": "models generate resume structured rollback cancel error health reflection key",
}
"""What each client's program does, in order."""
GUARDED = {name for name, done in EXPECTED.items() if done.endswith(" key")}
"""Those that are also given the address that asks for a key, and the key."""
TARGET = str(environments.ROOT / "models" / "target")
"""The shipped pair's, whose tokenizer lm-eval reads."""


@pytest.fixture(scope="module")
def environment() -> Callable[[str], Environment]:
    """Environments by name, made where they are not there."""

    def made(name: str) -> Environment:
        return environments.node(name) if name in environments.NPM else environments.python(name)

    return made


def test_every_client_has_an_environment_with_versions_of_its_own() -> None:
    assert set(EXPECTED) == set(environments.PYTHON) | set(environments.NPM)
    assert all("==" in package for packages in environments.PYTHON.values() for package in packages)
    assert set(environments.SHORT) <= set(EXPECTED)
    for name in EXPECTED:
        stem = name.replace("-", "_")
        assert len(list(environments.PROGRAMS.glob(f"{stem}_client.*"))) == 1


def test_the_page_names_the_settings_of_every_client() -> None:
    page = (environments.ROOT / "docs" / "http.md").read_text("utf-8")
    rows = re.findall(
        r"^\| ((?:`[a-z-]+`(?:, )?)+) \|", page.partition("## Clients\n")[2].partition("\n## ")[0], re.MULTILINE
    )
    assert {name for row in rows for name in re.findall(r"`([a-z-]+)`", row)} == set(environments.CLIENTS)


def test_client_suites_are_chosen_by_name_and_unknown_names_are_refused() -> None:
    assert chosen_clients("") == set(environments.CLIENTS) > chosen_clients("short") == set(environments.SHORT)
    assert chosen_clients("go openai") == {"go", "openai"}
    with pytest.raises(pytest.UsageError, match="opnai"):
        chosen_clients("opnai")


@pytest.mark.slow
@pytest.mark.timeout(environments.BUILD_S + environments.RUN_S)
@pytest.mark.parametrize("name", EXPECTED)
def test_a_client_does_all_of_it(
    name: str, environment: Callable[[str], Environment], served: Served, request: pytest.FixtureRequest
) -> None:
    grpc = name == "grpc-js"
    given = [served.grpc if grpc else f"http://{served.http}"]
    if name in GUARDED:
        keyed: Served = request.getfixturevalue("guarded")
        given += [keyed.grpc if grpc else f"http://{keyed.http}", keyed.key]
    given += [TARGET] if name == "lm-eval" else []  # it counts tokens of texts itself
    given += [str(environments.PROTOS)] if grpc else []
    said = environment(name).run(*given)
    assert [line.split()[1] for line in said.splitlines() if line.startswith("done ")] == EXPECTED[name].split(), said


@pytest.mark.slow
@pytest.mark.timeout(environments.BUILD_S + environments.RUN_S)
@pytest.mark.parametrize("language", environments.LANGUAGES)
def test_a_client_of_the_protos_generates_resumes_and_reads_an_error(
    language: str, environment: object, served: Served
) -> None:
    """From `examples/`, with the two files that an application needs."""
    said = getattr(environments, language)().run(served.grpc)
    head, _, error = said.rstrip().rpartition("\nerror ")
    head, _, rest = head.rpartition("\nrest ")
    word, count, text = head.split(" ", 2)
    assert (word, int(count)) == ("text", 24) and rest and text.endswith(rest) and len(rest) < len(text)
    code, *details = error.split()
    assert code.upper().replace("_", "") == "INVALIDARGUMENT"
    assert details == ["NUMBER_OUT_OF_RANGE", "sampling.temperature", "100"]
