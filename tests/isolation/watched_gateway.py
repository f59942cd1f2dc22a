"""`python -m tests.isolation.watched_gateway`: a gateway that writes into the file LOOP_FILE how many CPU seconds the
longest callback of its event loop took since the file was last zeroed."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any

from gateway.__main__ import main
from gateway.auth.loop_turns import FairLoop
from slipstream.process import run_role
from tests.support.loop_watch import code_of, watching

LOOP_FILE = "LOOP_FILE"
"""Environment variable."""
SECONDS = struct.Struct("d")
NAME_BYTES = 200
SIZE = SECONDS.size + NAME_BYTES
LEAST_S = 0.001


def longest_callback(file: Path) -> tuple[float, str]:
    """CPU seconds and code of the longest callback since this was called last."""
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), SIZE) as shared:
        found, code = SECONDS.unpack_from(shared)[0], shared[SECONDS.size :].rstrip(b"\0").decode()
        SECONDS.pack_into(shared, 0, 0.0)
        return found, code


def run() -> None:
    with Path(os.environ[LOOP_FILE]).open("r+b") as opened:
        shared = mmap.mmap(opened.fileno(), SIZE)

    def note(took_s: float, handle: Any) -> None:
        if took_s > SECONDS.unpack_from(shared)[0]:
            shared[SECONDS.size :] = code_of(handle).encode()[-NAME_BYTES:].ljust(NAME_BYTES, b"\0")
            SECONDS.pack_into(shared, 0, took_s)

    with watching(LEAST_S, note):
        run_role("gateway", main(False), FairLoop)


if __name__ == "__main__":
    run()
