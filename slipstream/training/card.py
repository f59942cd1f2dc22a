"""models/README.md: what the pair is, how it was made, and the figures recorded at the end of training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.training.checkpoint import Position
from slipstream.training.corpus import Corpus
from slipstream.training.evaluate import Evaluation
from slipstream.training.settings import Settings


@dataclass(frozen=True)
class Record:
    """Everything the card states; `sizes` and `ends` are (target, draft)."""

    settings: Settings
    corpus: Corpus
    evaluation: Evaluation
    sizes: tuple[int, int]
    ends: tuple[Position, Position]
    stream_tokens: int
    command: str


def write_card(record: Record, path: Path) -> None:
    """Write the card as Markdown."""
    path.write_text(f"{record.evaluation}\n{record.sizes} {record.ends}\n", encoding="utf-8")
