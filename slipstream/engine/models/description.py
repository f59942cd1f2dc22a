"""Description of a checkpoint that a worker reports, from its configuration and its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.engine.model_info import ModelInfo
from slipstream.engine.models.weights_digest import weights_digest
from slipstream.errors import NotFound
from slipstream.tokenizer.chat_template_source import chat_template_fingerprint
from slipstream.tokenizer.vocabulary import (
    as_ids,
    fingerprint,
    is_local,
    load_tokenizer,
    source_and_revision,
    tokenizer_file,
)


def describe(
    name: str, revision: str, config: Any, generation: Any, vocabulary_size: int, parameters: int
) -> ModelInfo:
    """`revision`: by `weights_revision`; `config`: of the whole model; `generation`: its generation configuration, None
    without one; `vocabulary_size`: columns of its logits. The type is empty."""
    source, _ = source_and_revision(name)
    text = config.get_text_config(decoder=True)
    eos = generation.eos_token_id if generation is not None else None
    return ModelInfo(
        name=Path(source).name if is_local(name) else source,
        revision=revision,
        vocabulary_size=vocabulary_size,
        fingerprint=_fingerprint(name, vocabulary_size),
        max_length=_max_length(text),
        dtype="",
        parameters=parameters,
        eos_token_ids=as_ids(eos if eos is not None else text.eos_token_id),
        chat_template=chat_template_fingerprint(name),
    )


def weights_revision(name: str) -> str:
    """`ModelInfo.revision`. Reads all weights of a folder whose digest is not kept: once for each start."""
    source, _ = source_and_revision(name)
    if is_local(name):
        return f"local-{weights_digest(Path(source))}"
    return tokenizer_file(name, "config.json").parent.name  # lies in a folder that is named after its commit


def _fingerprint(name: str, vocabulary_size: int) -> str:
    try:
        return fingerprint(load_tokenizer(name))
    except NotFound:
        # A bare checkpoint: token ids of equally many tokens are the best that can be promised.
        return f"size-{vocabulary_size}"


_LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length")
"""Names of a model's longest text in configurations: MPT has the second, BLOOM the third."""


def _max_length(config: Any) -> int:
    """Beyond the original length, dynamic and long rotary embeddings depend on the longest session of a step, so one
    session's text would depend on the others. They are served up to that length.
    """
    longest = next((int(length) for name in _LENGTHS if (length := getattr(config, name, None))), 1 << 20)
    rope = getattr(config, "rope_parameters", None) or {}
    flat = [rope] if "rope_type" in rope else [part for part in rope.values() if isinstance(part, dict)]
    for part in flat:
        if part.get("rope_type") in ("dynamic", "longrope"):
            original = part.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            longest = min(longest, int(original or longest))
    return longest
