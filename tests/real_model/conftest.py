"""The checkpoint, a shallow draft of it, and a fleet of processes that serves it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slipstream.engine.factory import open_engine
from tests.e2e.conftest import UNMEASURED
from tests.real_model.fleet import Fleet, served
from tests.real_model.shallow import save_shallow
from tools.real_model import FOLDER, whole
from verifier_svc.execution.embedded import EmbeddedExecutor

REQUIRED = "REAL_MODEL_REQUIRED"
"""Set to 1: tests fail where the checkpoint cannot be had, instead of being left out."""
ROOT = Path(__file__).resolve().parents[2]
KV_TOKENS = 24_576


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, downloaded and converted where it is not there."""
    if not whole(FOLDER):
        done = subprocess.run(
            [sys.executable, "-m", "tools.real_model"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            why = done.stderr.strip().splitlines()[-1]
            if os.environ.get(REQUIRED) == "1":
                pytest.fail(why, pytrace=False)
            pytest.skip(why)
    return FOLDER


@pytest.fixture(scope="session")
def shallow(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_shallow(smollm2, tmp_path_factory.mktemp("shallow"))


@pytest.fixture(scope="module", params=["auto", pytest.param("float32", marks=pytest.mark.long)])
def executor(request: pytest.FixtureRequest, smollm2: Path) -> EmbeddedExecutor:
    """The verifier's executor on the checkpoint, in the type that users get and in float32."""
    torch.set_num_threads(1)
    return EmbeddedExecutor(open_engine(str(smollm2), request.param, kv_tokens=KV_TOKENS))


def options(shallow: Path) -> list[str]:
    """Every drafter, the shipped head that was trained for this checkpoint among them."""
    head = ROOT / "models" / "smollm2-eagle"
    drafters = ("suffix", "ngram", "prediction", "lookahead", f"model={shallow}", f"eagle={head}")
    return [word for each in drafters for word in ("--drafter", each)]


@pytest.fixture(scope="session")
def fleet(smollm2: Path, shallow: Path) -> Iterator[Fleet]:
    """`slipstream serve` in default settings but for one: candidates are verified even where they do not pay, as 12
    texts at once on two busy cores. So no pass is timed before it serves."""
    with served(smollm2, *options(shallow), VERIFIER_ALWAYS_SPECULATE="true", **UNMEASURED) as fleet:
        yield fleet


@pytest.fixture(scope="module", params=["suffix", "six drafters"])
def default_fleet(request: pytest.FixtureRequest, smollm2: Path, shallow: Path) -> Iterator[Fleet]:
    """`slipstream serve` in default settings, with the default drafter, and with six, which slow the steps of two
    cores: drafting begins and pauses."""
    with served(smollm2, *(options(shallow) if request.param == "six drafters" else ())) as fleet:
        yield fleet
