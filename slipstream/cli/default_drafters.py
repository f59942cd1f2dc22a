"""The drafters of `slipstream serve` where none are named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.proposers.registry import default_layers
from slipstream.tokenizer import vocabulary

DEFAULT_DRAFTERS = ("model", "suffix")
"""Together they find more than each alone on every kind of text that `benchmarks.methods` has."""
PROCESSES_ALONE = ("model",)
"""Where nothing drafts in the verifier: a lookup is not worth a process of its own."""
LOOKUP_ALONE = ("suffix",)
"""For a target that no draft model shares a vocabulary with, and no head was made for."""
HEAD = "eagle"
"""The method of heads that are shipped, in folders NAME-eagle."""


def default_drafters(target: str, draft: str, in_verifier: bool | None) -> tuple[str, ...]:
    """Methods as `--drafter` takes them, METHOD or METHOD=FOLDER. `target` and `draft` are what the user named, empty
    for the shipped ones; `in_verifier` is False where nothing may draft in the verifier."""
    methods = PROCESSES_ALONE if in_verifier is False else DEFAULT_DRAFTERS
    if draft or not target or target.startswith(f"{vocabulary.EMULATED}:"):
        return methods
    if found := shipped_draft_for(target):
        return tuple(f"{method}={found}" if method == "model" else method for method in methods)
    head = shipped_head_for(target)
    return (f"{HEAD}={head}", *LOOKUP_ALONE) if head and in_verifier is not False else LOOKUP_ALONE


def shipped_draft_for(target: str) -> str:
    """The folder of the shipped draft model with the target's vocabulary; empty for none, and where the target's cannot
    be read: who serves it says why."""
    try:
        wanted = vocabulary.fingerprint(vocabulary.load_tokenizer(target))
        drafts = (str(folder) for folder in _shipped_drafts())
        return next((each for each in drafts if vocabulary.fingerprint(vocabulary.load_tokenizer(each)) == wanted), "")
    except (SlipstreamError, ImportError):
        return ""


def _shipped_drafts() -> Iterator[Path]:
    """`draft`, and `NAME-draft` for targets by others."""
    yield from sorted(file.parent.resolve() for file in vocabulary.SHIPPED.glob("*draft/tokenizer.json"))


def shipped_head_for(target: str) -> str:
    """The folder of the shipped head whose shapes are this target's: width, vocabulary and number of layers, by those
    that it reads. Empty for none. Of another model of these shapes it would guess badly, and change no token."""
    try:
        read = vocabulary.read_json(vocabulary.tokenizer_file(target, "config.json"))
        shape = [read["hidden_size"], read["vocab_size"], list(default_layers(int(read["num_hidden_layers"])))]
        return next((str(folder) for folder, its in _shipped_heads() if its == shape), "")
    except (SlipstreamError, ImportError, KeyError, TypeError, ValueError):
        return ""


def _shipped_heads() -> Iterator[tuple[Path, list[object]]]:
    for file in sorted(vocabulary.SHIPPED.glob(f"*-{HEAD}/config.json")):
        read = vocabulary.read_json(file)
        layer, layers = read["transformer_layer_config"], read["eagle_aux_hidden_state_layer_ids"]
        yield file.parent.resolve(), [read["target_hidden_size"], layer["vocab_size"], layers]
