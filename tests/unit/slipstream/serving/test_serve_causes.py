"""The last line of `slipstream serve` that fails is the cause, in the words of its options."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.serving.role import OPTIONS, cause_of
from tests.support.checkpoints import save_checkpoint, save_tokenizer
from tools.settings import CONFIGS


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("failed GATEWAY_STORE='x' is no address; write VERIFIER_MODEL.\n",
         "--store 'x' is no address; write --target."),
        ("failed VERIFIER_KV_TOKENS=0 is too few.", "VERIFIER_KV_TOKENS=0 is too few."),
        ("ready grpc=a:1", ""),
    ],
)  # fmt: skip
def test_a_role_s_error_is_in_the_words_of_serve(line: str, cause: str) -> None:
    assert cause_of(line) == cause


def test_options_stand_for_settings_that_there_are() -> None:
    known = {prefix + field.upper() for prefix, kind in CONFIGS.values() for field in kind.__dataclass_fields__}
    assert OPTIONS.keys() <= known


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--store", "rubbish"], "--store"), (["--listen", "nowhere"], "cannot listen on nowhere")],
)
def test_the_last_line_is_the_cause(options: list[str], said: str, tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path, vocab_size=64, num_hidden_layers=1)
    save_tokenizer(tmp_path, 64)
    command = ["serve", "--target", str(tmp_path), "--drafter", "none", "--listen", "127.0.0.1:0", "--http", "off"]
    ended = subprocess.run(
        [sys.executable, "-m", "slipstream", *command, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    last = ended.stderr.splitlines()[-1]
    assert ended.returncode == 1 and last.startswith("slipstream serve: ") and said in last, ended.stderr
