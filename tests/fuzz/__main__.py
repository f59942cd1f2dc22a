"""`python -m tests.fuzz SECONDS [TARGET ...]`: atheris on each target, in a process of its own, from its corpus on.

What it finds is written to `.cache/fuzz/TARGET`: copy an input that reaches far, or failed, into the corpus."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import atheris

from tests.fuzz.changes import WORDS, changed_json

FOUND = Path(".cache/fuzz")
MOST_BYTES = 4096
OURS = ["gateway", "slipstream", "verifier_svc"]
ONE = "--one"


def fuzz(name: str, options: list[str]) -> None:
    with atheris.instrument_imports(include=OURS):
        from tests.fuzz.targets import TARGETS
    atheris.Setup([sys.argv[0], *options], lambda data: TARGETS[name](data) and None, custom_mutator=changed)
    atheris.Fuzz()


def changed(data: bytes, most: int, seed: int) -> bytes:
    """By the fuzzer itself, or in its JSON."""
    made = changed_json(data, random.Random(seed)) if seed % 2 else None
    return atheris.Mutate(data, most) if made is None or len(made) > most else made


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


def main(seconds: int, names: list[str]) -> int:
    """1 where a target failed."""
    from tests.fuzz.targets import CORPUS, TARGETS

    failed, words = 0, FOUND / "words"
    FOUND.mkdir(parents=True, exist_ok=True)
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in WORDS))
    for name in names or TARGETS:
        found = FOUND / name
        found.mkdir(parents=True, exist_ok=True)
        options = [f"-max_total_time={seconds}", f"-max_len={MOST_BYTES}", f"-artifact_prefix={found}/"]
        options += [f"-dict={words}", "-timeout=10", "-print_final_stats=1", str(found), str(CORPUS / name)]
        print(f"== {name}", flush=True)
        failed |= bool(subprocess.run([sys.executable, "-m", "tests.fuzz", ONE, name, *options]).returncode)
    return failed


if __name__ == "__main__":
    if sys.argv[1] == ONE:
        fuzz(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
