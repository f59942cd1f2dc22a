"""Ctrl-C in the middle of a text, at the command line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from subprocess import PIPE

MOST_TRIES = 20


def test_ctrl_c_prints_the_command_that_resumes_the_text(server: str) -> None:
    asked = ["def read(self, path):", "--max-tokens", "300", "--ignore-eos", "--seed", "4", "--server", server]
    whole = subprocess.run(slipstream("generate", *asked, "--json"), capture_output=True, text=True, check=True)
    for _ in range(MOST_TRIES):  # the text may be whole before the signal comes
        status, begun, message = interrupted(asked)
        if status:
            break
    assert status == 130
    command = message[message.index("slipstream resume") :].partition("`")[0].split()[1:]
    rest = subprocess.run(slipstream(*command, "--server", server), capture_output=True, text=True, check=True).stdout
    assert (begun + rest).rstrip("\n") == json.loads(whole.stdout)["text"].rstrip("\n")


def interrupted(words: list[str]) -> tuple[int, str, str]:
    """Status, output and last line of a `slipstream generate` that is interrupted once it printed something."""
    with subprocess.Popen(slipstream("generate", *words), stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        begun = process.stdout.read(8)
        process.send_signal(signal.SIGINT)
        begun += process.stdout.read()
        message = process.stderr.read()
        return process.wait(timeout=60), begun, message


def slipstream(*words: str) -> list[str]:
    return [sys.executable, "-m", "slipstream", *words]
