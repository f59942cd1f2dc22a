"""Opening a proposer by its method: what the drafter guesses with, and what it says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from drafter_svc.config import DrafterConfig
from drafter_svc.proposers import Proposer
from drafter_svc.proposers.corpus import Corpora
from drafter_svc.proposers.lookup import Growth, LookupProposer, NgramText, SuffixText, Text
from drafter_svc.proposers.prediction import PredictionText
from drafter_svc.session import DraftSession
from slipstream.errors import InvalidArgument, NotFound
from slipstream.rpc import proto_conversion
from slipstream.tokenizer.grammar import Grammars
from slipstream.tokenizer.vocabulary import eos_token_ids, fingerprint, load_tokenizer
from slipstream.v1 import types_pb2

if TYPE_CHECKING:  # lookups need no torch
    from slipstream.engine.engine import Engine

LOOKUPS = ("ngram", "suffix", "prediction")
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
    corpora = Corpora(config.corpus_tokens, config.corpus_salts, config.corpus_shared) if config.corpus_tokens else None
    bounds = Growth(config.width, LEAST_SHARE)
    texts: dict[str, Callable[[DraftSession], Text]] = {
        "ngram": lambda session: NgramText(),
        "suffix": lambda session: SuffixText(
            corpora.of(session.cache_salt) if corpora else None, bounds, len(session.tokens)
        ),
        "prediction": lambda session: PredictionText(session.prediction, session.prompt_length),
    }
    # Without a model there is no vocabulary to differ in: an empty fingerprint fits any target.
    anything = types_pb2.ModelInfo(name=config.method, vocabulary_size=MOST, max_length=MOST, dtype="none")
    return anything, LookupProposer(texts[config.method], LOOKUP_NODES)


def _model(config: DrafterConfig) -> tuple[types_pb2.ModelInfo, Proposer]:
    # Imported here: lookups need no torch.
    from drafter_svc.proposers.model import ModelProposer
    from slipstream.engine.factory import open_engine
    from slipstream.engine.models.spread import Spread

    spread = Spread(device=config.device)
    engine = open_engine(config.model, config.dtype, config.kv_tokens, config.quantisation, config.lean, spread)
    if config.translate_for:
        target = load_tokenizer(config.translate_for)
        if fingerprint(target) != engine.model.fingerprint:
            return _translated(config, engine, target)
    grammars = Grammars.of(config.model, engine.model)
    grammars.prepare().result()
    proposer = ModelProposer(
        engine,
        width=config.width,
        max_nodes=config.max_nodes,
        proposal_tokens=config.proposal_tokens,
        sharpness=config.sharpness,
        grammars=grammars,
    )
    return proto_conversion.model_to_wire(engine.model), proposer


def _translated(config: DrafterConfig, engine: Engine, tokenizer: Tokenizer) -> tuple[types_pb2.ModelInfo, Proposer]:
    """Announces the vocabulary of the target that it translates for, so that it is paired with no other."""
    from drafter_svc.proposers.spelling import Spelling
    from drafter_svc.proposers.translated import TranslatedProposer
    from drafter_svc.proposers.translation import Translation

    announced = fingerprint(tokenizer)
    target, draft = Spelling(tokenizer), Spelling(load_tokenizer(config.model), engine.model.vocabulary_size)
    translation = Translation(target, draft, (_ends(config.translate_for), engine.model.eos_token_ids))
    proposer = TranslatedProposer(
        engine,
        translation,
        width=config.width,
        max_nodes=config.max_nodes,
        proposal_tokens=config.proposal_tokens,
        sharpness=config.sharpness,
    )
    model = replace(engine.model, fingerprint=announced, vocabulary_size=target.size)
    return proto_conversion.model_to_wire(model), proposer


def _ends(name: str) -> tuple[int, ...]:
    """The end-of-text ids of a tokenizer's folder; none where it holds a tokenizer and no model."""
    try:
        return eos_token_ids(name)
    except NotFound:
        return ()
