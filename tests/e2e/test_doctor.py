"""`slipstream doctor` and `status` on real processes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.e2e.conftest import starting

ROOT = Path(__file__).resolve().parents[2]
TARGET, DRAFT = "emulated:vocabulary=4096&base_ms=10", "emulated:vocabulary=4096&base_ms=0.1&acceptance=0.8"
OTHER = "emulated:vocabulary=512"


async def run_command(*words: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "slipstream", *words, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()


async def test_the_doctor_finds_what_is_wrong_and_nothing_else() -> None:
    listen = {"LISTEN": "127.0.0.1:0"}
    async with starting() as (_, start):
        (_, verifier), (_, drafter), (_, stranger) = await asyncio.gather(
            start("verifier_svc", **named("VERIFIER_", MODEL=TARGET, **listen)),
            start("drafter_svc", **named("DRAFTER_", MODEL=DRAFT, SHARPNESS="1", **listen)),
            start("drafter_svc", **named("DRAFTER_", MODEL=OTHER, **listen)),
        )
        knows = named(
            "GATEWAY_",
            VERIFIERS=verifier,
            DRAFTERS=f"model={drafter},stranger={stranger}",
            TOKENIZER=str(ROOT / "models" / "target"),
            **listen,
        )
        _, gateway = await start("gateway", **knows)
        output = ""

        while "DOES NOT FIT" not in output or "drafts" not in output:  # the gateway has not reached them yet
            status, output = await run_command("status", "--server", gateway)
        assert status == 0
        first, *drafters = output.splitlines()[:-1]
        assert first.startswith("emulated: 1 verifier,")
        assert any(line.startswith("  model (emulated): drafts") for line in drafters), output
        assert any(line.startswith("  stranger") and "DOES NOT FIT" in line for line in drafters), output

        status, output = await run_command(
            "doctor", "--server", gateway, *("--worker", verifier), *("--worker", drafter)
        )
        assert status == 0, output
        assert [line[:5] for line in output.splitlines()] == ["ok   "] * 4, output

        status, output = await run_command(
            "doctor", *(f"--worker={each}" for each in (verifier, stranger, "127.0.0.1:1"))
        )
        wrong = [line for line in output.splitlines() if line.startswith("WRONG")]
        assert status == 1 and len(wrong) == 2, output
        assert "127.0.0.1:1" in wrong[0] and "another vocabulary" in wrong[1]


def named(prefix: str, **settings: str) -> dict[str, str]:
    return {prefix + name: value for name, value in settings.items()}
