"""SmolLM2 in a GGUF file is the checkpoint: the same tokens, the same tokenizer and chat template."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.engine.factory import open_engine
from tests.real_model.conftest import ROOT
from tests.real_model.prompts import OWN, encoded
from tests.support.greedy_text import greedy

TOKENS = 12


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_in_a_gguf_file_writes_the_checkpoint_s_texts(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "smollm2.gguf"
    command = [sys.executable, "-m", "benchmarks.peers.export_gguf", str(smollm2), str(file), "bf16"]
    subprocess.run(command, cwd=ROOT, check=True)
    prompts = encoded(smollm2, OWN[:3])
    assert encoded(file, OWN[:3]) == prompts
    texts = []
    for model in (smollm2, file):
        engine = open_engine(str(model), "float32", kv_tokens=2048)
        texts.append([greedy(engine, prompt, TOKENS) for prompt in prompts])
    assert texts[0] == texts[1]
