"""OpenAI's and Anthropic's own clients for gateways of tests, which serve plain HTTP: certificates, which take 18 ms of
each client, are not read. Nor is Anthropic's imported, which takes 0.6 s, in a process that makes none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai

if TYPE_CHECKING:
    import anthropic

TIMEOUT_S = 60


def openai_client(url: str) -> openai.AsyncOpenAI:
    """`url`: of the gateway."""
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key="any",
        max_retries=0,
        timeout=TIMEOUT_S,
        http_client=openai.DefaultAsyncHttpxClient(verify=False),
    )


def anthropic_client(url: str, key: str = "any") -> anthropic.AsyncAnthropic:
    """`url`: of the gateway."""
    import anthropic

    return anthropic.AsyncAnthropic(
        base_url=url,
        api_key=key,
        max_retries=0,
        timeout=TIMEOUT_S,
        http_client=anthropic.DefaultAsyncHttpxClient(verify=False),
    )
