"""What docs/clients.md and the README show works as it stands there."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
from pathlib import Path

import pytest

from gateway.store.memory import MemoryBackend
from tests.support.gateway_calls import store
from tests.support.scripted_gateway import Setting

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = ("127.0.0.1:50051", "127.0.0.1:50061")


def examples(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text("utf-8"), re.MULTILINE | re.DOTALL)


EXAMPLES = [
    pytest.param(code, id=f"{name} {i}")
    for name in ("docs/clients.md", "README.md")
    for i, code in enumerate(examples(name))
]


@pytest.mark.parametrize("code", EXAMPLES)
async def test_an_example_runs_and_prints(setting: Setting, tmp_path: Path, code: str) -> None:
    (tmp_path / "template").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    memory, script = MemoryBackend(), [65 + token % 26 for token in range(64)]
    config = {"chat_template": str(tmp_path / "template")}
    front = await setting.front(setting.verifier(script), store=store(memory, "a"), **config)
    beside = await setting.beside(front, store(memory, "b"), **config)
    for shown, real in zip(ADDRESSES, (front.gateway.address, beside.gateway.address), strict=True):
        code = code.replace(shown, real)
    printed = io.StringIO()

    def run() -> None:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "an example", "exec"), {"__name__": "__main__"})

    await asyncio.to_thread(run)
    assert front.tokenizer.decode(script[:10]) in printed.getvalue() or "NO_MODEL" in printed.getvalue()


def test_the_documents_have_examples_to_run() -> None:
    assert len(examples("docs/clients.md")) >= 5 and len(examples("README.md")) == 1
