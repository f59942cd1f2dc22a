"""What the bounds between tenants stand for: CPU milliseconds of a tokenizer for texts as long as each allows.

usage: python -m benchmarks.tenant_bounds [FOLDER ...]     (folders of checkpoints; the shipped target if none is named)

One thread, the middle of several times. `code` is held-out Python, `prose` words and spaces: texts differ by as much.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.prompts import held_out
from benchmarks.records import Row, write
from gateway.config import GatewayConfig
from gateway.text.encoding import TextEncoding
from gateway.text.tokenizer import SHORT_TOKENS
from gateway.work.pieces import SHORT
from gateway.work.tenant_work import KINDS, LARGE_BYTES
from slipstream.tokenizer.vocabulary import load_tokenizer

TARGET = Path(__file__).resolve().parents[1] / "models" / "target"
TIMES = 9
MOST_BYTES = GatewayConfig(("127.0.0.1:1",), "x").max_prompt_bytes


def texts() -> dict[str, str]:
    """Texts of MOST_BYTES, by their kind."""
    code = "\n".join(held_out(400, characters=4000))
    words = "Nobody knows how many words there are in so long a letter. "
    return {"code": (code * (1 + MOST_BYTES // len(code)))[:MOST_BYTES], "prose": (words * MOST_BYTES)[:MOST_BYTES]}


def cpu_ms(work: Callable[[], object]) -> float:
    """The first time does not count."""
    found: list[float] = []
    for _ in range(1 + TIMES):
        began = time.process_time()
        work()
        found.append(1e3 * (time.process_time() - began))
    return round(median(found[1:]), 3)


def row(folder: Path, kind: str, text: str) -> Row:
    encoding = TextEncoding(load_tokenizer(str(folder)), MOST_BYTES)
    unit, tokens = KINDS["encode"], encoding.encode(text[:LARGE_BYTES])[:SHORT_TOKENS]
    whole = cpu_ms(lambda: encoding.encode(text))
    return {
        "tokenizer": folder.resolve().name,
        "text": kind,
        f"encode {SHORT} characters ms": cpu_ms(lambda: encoding.encode(text[:SHORT])),
        f"encode {unit} bytes ms": round(whole * unit / len(text), 3),
        f"encode {LARGE_BYTES} bytes ms": cpu_ms(lambda: encoding.encode(text[:LARGE_BYTES])),
        f"encode {MOST_BYTES} bytes ms": whole,
        f"decode {len(tokens)} tokens ms": cpu_ms(lambda: encoding.decode(tokens)),
        "most bytes of a token": encoding.token_bytes.longest,
    }


def main(folders: list[Path]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rows = [row(folder, kind, text) for folder in folders for kind, text in texts().items()]
    write("tenant_bounds", "python -m benchmarks.tenant_bounds " + " ".join(each.name for each in folders), rows)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]] or [TARGET])
