"""A draft model distilled from the target: forward KL, then a loss that acceptance is made of (`loss.divergence`).

A small model learns nothing of distances between tokens that no row had: behind those it would be of no use. So it sees
no further: a fresh one is a Llama with a sliding window of one row, which the library calls a Mistral.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from measurement.pairs.passes import passes
from slipstream.engine.factory import open_engine
from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound
from slipstream.tokenizer.vocabulary import fingerprint, load_tokenizer, source_and_revision, tokenizer_file
from training.corpus import TrainingBatch
from training.folder import replacing
from training.loss import distilled, divergence
from training.request import TrainRequest
from training.speed import CONTEXT
from training.target import Target, TargetStates
from training.trained_drafter import rank_of, reached, shifted

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
LOGIT_SETTINGS = ("logit_scale", "logits_scaling", "final_logit_softcapping")
HEAD = 32
"""Size of a fresh model's attention heads."""


class DraftModel:
    layers: tuple[int, ...] = ()
    layout = "a causal language model of transformers"

    def __init__(self, request: TrainRequest, target: Target) -> None:
        self._request, self._target = request, target
        self.depth = self.passes = request.depth
        self._saved: Path | None = None
        self._served: Callable[[int], None] | None = None
        """A pass as a drafter has it, of the saved model."""
        self._engines = ExitStack()
        self.module: Any = _fresh(request, target) if not request.start else _started(request, target)
        output = self.module.get_output_embeddings()
        scaled = any(getattr(self.module.config, name, None) for name in LOGIT_SETTINGS)
        self._plain = isinstance(output, torch.nn.Linear) and output.bias is None and not scaled

    def calibrate(self, batch: TrainingBatch, states: TargetStates) -> None:
        """It has no scales to fit."""

    def loss(self, batch: TrainingBatch, states: TargetStates) -> Tensor:
        assert batch.learned is not None
        kind = self._request.late_loss if batch.used >= self._request.late_from else "kl"
        rows, places = batch.learned[:, 1:].nonzero(as_tuple=True)
        last, output = states.last[rows, places], self.module.get_output_embeddings()
        if not self._plain:
            found = self._logits(batch.tokens)[rows, places]
            return divergence(found, self._target.logits(last), kind).mean()
        # A matrix alone makes the logits: then only a few rows of them exist at a time.
        states_of = self.module.base_model(input_ids=batch.tokens, use_cache=False).last_hidden_state
        weights = torch.full((1, len(rows)), 1.0 / max(1, len(rows)), device=batch.tokens.device)
        head = output.weight[: self._target.vocabulary]
        return distilled(
            states_of[rows, places][None], head, weights, lambda part: self._target.logits(last[part]), kind
        )

    def ranks(self, batch: TrainingBatch, states: TargetStates) -> Tensor:
        """The model reads the text alone: what it makes of a place does not hang on the root."""
        first = rank_of(self._logits(batch.tokens).float(), shifted(batch.tokens, 1, 0))
        return torch.stack([reached(shifted(first, 1 + depth, 0), batch, depth) for depth in range(self.depth)])

    def _logits(self, tokens: Tensor) -> Tensor:
        """[B, T, vocabulary of the target]: a draft model's own may be padded."""
        found: Tensor = self.module(input_ids=tokens, use_cache=False).logits
        return found[..., : self._target.vocabulary]

    def one_pass(self) -> None:
        """Runs a pass of the engine that serves the saved model: the one that is trained is in float32, in the
        library's code and without KV, which takes several times as long."""
        if self._saved is None:
            self._logits(torch.zeros(1, 1, dtype=torch.int64, device=self._target.device))
            return
        if self._served is None:
            engine = open_engine(str(self._saved), kv_tokens=2 * CONTEXT, device=str(self._target.device))
            self._served = self._engines.enter_context(passes(engine, CONTEXT, 0, 1))
        self._served(0)

    def save(self, folder: Path, accuracy: list[list[float]]) -> None:
        self._saved, self._served = folder, None
        with replacing(folder) as fresh:
            self.module.to(torch.bfloat16)
            self.module.config._name_or_path = ""
            self.module.save_pretrained(fresh)
            self.module.float()
            for name in TOKENIZER:
                try:
                    shutil.copyfile(tokenizer_file(self._target.name, name), fresh / name)
                except NotFound:
                    continue


def _started(request: TrainRequest, target: Target) -> Any:
    folder = request.start
    if fingerprint(load_tokenizer(folder)) != fingerprint(target.tokenizer):
        raise FailedPrecondition(
            f"{folder} and {target.name} have different tokenizers; start from a model with the target's.",
            reason="VOCABULARY_MISMATCH",
        )
    source, revision = source_and_revision(folder)
    config = AutoConfig.from_pretrained(source, revision=revision)
    if request.sliding_window:
        config = _windowed(config, request.sliding_window)
    return AutoModelForCausalLM.from_pretrained(
        source, revision=revision, config=config, dtype=torch.float32, use_safetensors=True
    )


def _windowed(config: Any, window: int) -> MistralConfig:
    """Returns the configuration of the same model with a sliding window of `window` tokens."""
    if config.model_type not in ("llama", "mistral") or getattr(config, "attention_bias", False):
        raise InvalidArgument(
            f"sliding_window is for a Llama or a Mistral without biases, not for {config.model_type}."
        )
    kept = {name: value for name, value in config.to_dict().items() if name not in ("model_type", "architectures")}
    return MistralConfig(**kept | {"sliding_window": window})


def _fresh(request: TrainRequest, target: Target) -> Any:
    own = target.config
    heads = max(2, request.hidden // HEAD)
    config = MistralConfig(
        vocab_size=own.vocab_size,
        hidden_size=request.hidden,
        num_hidden_layers=request.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        intermediate_size=request.feed_forward or 4 * request.hidden,
        max_position_embeddings=own.max_position_embeddings,
        tie_word_embeddings=True,
        sliding_window=request.sliding_window or request.window,
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        pad_token_id=None,
    )
    return MistralForCausalLM(config)
