"""Opening a proposer by its method: what the drafter guesses with, and what it says of it."""

from __future__ import annotations

from collections.abc import Callable

from drafter_svc.config import DrafterConfig
from drafter_svc.proposers import Proposer
from drafter_svc.proposers.corpus import Corpus
from drafter_svc.proposers.lookup import LookupProposer, NgramText, SuffixText, Text
from slipstream import wire
from slipstream.errors import InvalidArgument
from slipstream.v1 import types_pb2

LOOKUPS = ("ngram", "suffix")
MOST = 2**31 - 1
LOOKUP_NODES = 8
"""Guesses below one node in one step."""
LEAST_SHARE = 0.05
"""A path less likely than this is not looked up any further."""


def open_proposer(config: DrafterConfig) -> tuple[types_pb2.ModelInfo, Proposer]:
    """On the model's own thread. Raises InvalidArgument for an unknown method, and what `open_engine` raises."""
    if config.method == "model":
        return _model(config)
    if config.method not in LOOKUPS:
        raise InvalidArgument(f"DRAFTER_METHOD={config.method!r}; choose model, {', '.join(LOOKUPS)}.")
    corpus = Corpus(config.corpus_tokens) if config.corpus_tokens else None
    texts: dict[str, Callable[[], Text]] = {
        "ngram": NgramText,
        "suffix": lambda: SuffixText(corpus, config.width, LEAST_SHARE),
    }
    # Without a model there is no vocabulary to differ in: an empty fingerprint fits any target.
    anything = types_pb2.ModelInfo(name=config.method, vocabulary_size=MOST, max_length=MOST, dtype="none")
    return anything, LookupProposer(texts[config.method], LOOKUP_NODES)


def _model(config: DrafterConfig) -> tuple[types_pb2.ModelInfo, Proposer]:
    # Imported here: lookups need no torch.
    from drafter_svc.proposers.model import ModelProposer
    from slipstream.engine.opening import open_engine

    engine = open_engine(config.model, config.dtype, config.kv_tokens)
    proposer = ModelProposer(
        engine, width=config.width, max_nodes=config.max_nodes, proposal_tokens=config.proposal_tokens
    )
    return wire.model_to_wire(engine.model), proposer
