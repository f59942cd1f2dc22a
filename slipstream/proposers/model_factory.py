"""Opens the method `model`: a draft model with the target's vocabulary, or one that translates for the target."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from tokenizers import Tokenizer

from slipstream.engine.engine import Engine
from slipstream.engine.factory import open_engine
from slipstream.engine.model_info import ModelInfo
from slipstream.errors import NotFound
from slipstream.proposers.base import ROOT, OpenedProposer, ProposerContext, ProposerSettings
from slipstream.proposers.cross_vocabulary.spelling import Spelling
from slipstream.proposers.cross_vocabulary.translated import TranslatedProposer
from slipstream.proposers.cross_vocabulary.translation import Translation
from slipstream.proposers.draft_model import ModelProposer
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.tokenizer.grammar import Grammars
from slipstream.tokenizer.vocabulary import eos_token_ids, fingerprint, load_tokenizer

WARM_UP = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.7, acceptance="rejection"),
)


def open_proposer(settings: ProposerSettings) -> OpenedProposer:
    """A proposer that has proposed before: the first passes take ten times as long, and no request is to wait for
    them. Raises what `open_engine` and `load_tokenizer` raise."""
    opened = _open(settings)
    for number, sampling in enumerate(WARM_UP):
        handle, tokens = ("warm-up", number), [0, 0, 0]
        context = ProposerContext(
            handle, tokens, len(tokens), len(tokens), len(tokens) + 1, sampling, expand=[ROOT], noise_nodes=[0]
        )
        opened.proposer.propose([context])
        opened.proposer.close_sequence(handle)
    return opened


def _open(settings: ProposerSettings) -> OpenedProposer:
    if settings.engine == "vllm":
        return _open_on_vllm(settings)
    engine = open_engine(
        settings.model, settings.dtype, settings.kv_tokens, settings.quantisation, settings.lean, settings.device
    )
    if settings.translate_for:
        target = load_tokenizer(settings.translate_for)
        if fingerprint(target) != engine.model.fingerprint:
            return _open_translated(settings, engine, target)
    proposer = ModelProposer(
        engine,
        width=settings.width,
        proposal_tokens=settings.proposal_tokens,
        sharpness=settings.sharpness,
        grammars=_grammars(settings, engine.model),
    )
    return OpenedProposer(engine.model, proposer)


def _open_on_vllm(settings: ProposerSettings) -> OpenedProposer:
    """Raises what `open_vllm_engine` raises."""
    from slipstream.engine.vllm.engine import DraftOptions, open_vllm_engine
    from slipstream.proposers.chain_model import ChainProposer

    engine = open_vllm_engine(DraftOptions(*attrgetter(*DraftOptions._fields)(settings)))
    proposer = ChainProposer(
        engine,
        width=settings.width,
        proposal_tokens=settings.proposal_tokens,
        sharpness=settings.sharpness,
        grammars=_grammars(settings, engine.model),
    )
    return OpenedProposer(engine.model, proposer, expands=1)


def _grammars(settings: ProposerSettings, model: ModelInfo) -> Grammars:
    """Ready for the first structured output."""
    grammars = Grammars.of(settings.model, model)
    grammars.prepare().result()
    return grammars


def _open_translated(settings: ProposerSettings, engine: Engine, tokenizer: Tokenizer) -> OpenedProposer:
    """Announces the vocabulary of the target that it translates for, so that it is paired with no other."""
    announced = fingerprint(tokenizer)
    target, draft = Spelling(tokenizer), Spelling(load_tokenizer(settings.model), engine.model.vocabulary_size)
    translation = Translation(target, draft, (_end_tokens(settings.translate_for), engine.model.eos_token_ids))
    proposer = TranslatedProposer(
        engine,
        translation,
        width=settings.width,
        proposal_tokens=settings.proposal_tokens,
        sharpness=settings.sharpness,
    )
    return OpenedProposer(replace(engine.model, fingerprint=announced, vocabulary_size=target.size), proposer)


def _end_tokens(name: str) -> tuple[int, ...]:
    """The end-of-text ids of a tokenizer's folder; none where it holds a tokenizer and no model."""
    try:
        return eos_token_ids(name)
    except NotFound:
        return ()
