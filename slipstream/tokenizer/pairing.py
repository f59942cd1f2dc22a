"""Which draft model may draft for which target."""

from __future__ import annotations

from slipstream.v1 import types_pb2


def share_vocabulary(draft: types_pb2.ModelInfo, target: types_pb2.ModelInfo) -> bool:
    """Whether a token id means the same to both. A lookup, which has no vocabulary of its own, fits all."""
    return draft.vocabulary_fingerprint in ("", target.vocabulary_fingerprint)
