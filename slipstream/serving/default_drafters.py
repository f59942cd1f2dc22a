"""The drafters of `slipstream serve` where none are named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.tokenizer import vocabulary

DEFAULT_DRAFTERS = ("model", "suffix")
"""Together they find more than each alone on every kind of text that `benchmarks.methods` has."""
PROCESSES_ALONE = ("model",)
"""Where nothing drafts in the verifier: a lookup is not worth a process of its own."""
LOOKUP_ALONE = ("suffix",)
"""For a target that no draft model shares a vocabulary with."""


def default_drafters(target: str, draft: str, in_verifier: bool | None) -> tuple[str, ...]:
    """Methods as `--drafter` takes them, METHOD or METHOD=FOLDER. `target` and `draft` are what the user named, empty
    for the shipped ones; `in_verifier` is False where nothing may draft in the verifier."""
    methods = PROCESSES_ALONE if in_verifier is False else DEFAULT_DRAFTERS
    if draft or not target or target.startswith(f"{vocabulary.EMULATED}:"):
        return methods
    found = shipped_draft_for(target)
    return tuple(f"{method}={found}" if method == "model" else method for method in methods) if found else LOOKUP_ALONE


def shipped_draft_for(target: str) -> str:
    """The folder of the shipped draft model with the target's vocabulary; empty for none, and where the target's cannot
    be read: `serve` reports the reason."""
    try:
        wanted = vocabulary.fingerprint(vocabulary.load_tokenizer(target))
        drafts = (str(folder) for folder in _shipped_drafts())
        return next((each for each in drafts if vocabulary.fingerprint(vocabulary.load_tokenizer(each)) == wanted), "")
    except (SlipstreamError, ImportError):
        return ""


def _shipped_drafts() -> Iterator[Path]:
    """`draft`, and `NAME-draft` for targets by others."""
    yield from sorted(file.parent.resolve() for file in vocabulary.SHIPPED.glob("*draft/tokenizer.json"))
