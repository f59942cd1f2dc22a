"""A whole training run: vocabulary, target, drafter, evaluation, card."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from slipstream.errors import InvalidArgument
from training.card import TrainingRecord, write_card
from training.corpus import TrainingBatch, TrainingCorpus, Windows, encode_stream, train_vocabulary
from training.evaluate import evaluate
from training.folder import save_model
from training.loss import Teacher, head_loss
from training.settings import Settings, TrainingStage
from training.split_model import SplitModel, build_llama, grow
from training.trainer import Batches, CheckpointPolicy, LossFunction, Position, Trainer


@dataclass(frozen=True)
class TrainingFolders:
    """`out` gets target/, draft/ and README.md; `cache` gets what a resumed run needs; `start` has an earlier pair."""

    out: Path
    cache: Path
    resume: bool
    start: Path | None = None


class TrainingSession:
    """Runs the stages in order; every stage resumes from its own checkpoint."""

    def __init__(self, settings: Settings, corpus: TrainingCorpus, places: TrainingFolders) -> None:
        if not corpus.held_out:
            raise InvalidArgument("No file fell into the 2 % held out for evaluation; give more or other files.")
        self.settings = settings
        self.corpus = corpus
        self.places = places
        self.tokenizer = self._vocabulary()
        self.stream = encode_stream(self.tokenizer, corpus.train, settings.seed)
        self.held_out = encode_stream(self.tokenizer, corpus.held_out, settings.seed)

    def run(self, command: str) -> TrainingRecord:
        """Train both models, save them, evaluate them and write the card; `command` is quoted in it."""
        target, target_end = self._target()
        save_model(target, self.tokenizer, self.places.out / "target", self.settings.target.shape.context)
        draft, draft_end = self._draft(target)
        save_model(draft, self.tokenizer, self.places.out / "draft", self.settings.draft.shape.context)
        found = evaluate(target, draft, self.held_out, self.bytes_per_token(), self.settings.evaluation_windows)
        sizes = (target.num_parameters(), draft.num_parameters())
        record = TrainingRecord(
            self.settings, self.corpus, found, sizes, (target_end, draft_end), len(self.stream), command
        )
        write_card(record, self.places.out / "README.md")
        return record

    def bytes_per_token(self) -> float:
        """Mean UTF-8 bytes per token of held-out text, without the end-of-text tokens."""
        size = sum(len(document.text.encode()) for document in self.corpus.held_out)
        return size / (len(self.held_out) - len(self.corpus.held_out) - 1)

    def _target(self) -> tuple[Any, Position]:
        def loss_of(network: SplitModel, batch: TrainingBatch) -> torch.Tensor:
            tokens = batch.tokens
            return head_loss(network.hidden(tokens[:, :-1]), network.embedding, tokens[:, 1:].reshape(-1))

        network, end = self._stage(self.settings.target, loss_of, self.settings.seed)
        return network.model.eval(), end

    def _draft(self, target: Any) -> tuple[Any, Position]:
        body = torch.compile(target.model, dynamic=False) if self.settings.compiled else target.model
        head = target.get_input_embeddings().weight.detach()

        def loss_of(network: SplitModel, batch: TrainingBatch) -> torch.Tensor:
            inputs = batch.tokens[:, :-1]
            with torch.no_grad():
                states = body(input_ids=inputs, use_cache=False).last_hidden_state
            teacher = Teacher(states.reshape(-1, states.shape[-1]), head)
            return head_loss(network.hidden(inputs), network.embedding, batch.tokens[:, 1:].reshape(-1), teacher)

        network, end = self._stage(self.settings.draft, loss_of, self.settings.seed + 100)
        return network.model.eval(), end

    def _stage(self, stage: TrainingStage, loss_of: LossFunction, seed: int) -> tuple[SplitModel, Position]:
        model = build_llama(stage.shape, self.settings.vocabulary, seed)
        if self.places.start is not None:
            grow(model, self.places.start / stage.name)
        network = SplitModel(model, self.settings.compiled)
        key = f"{stage} {seed} {self._fingerprint()} {self.places.start}"
        path = self.places.cache / f"{stage.name}.pt"
        keeping = CheckpointPolicy(path, key, self.settings.checkpoint_minutes, self.places.resume)
        return network, Trainer(stage, network, self._batches(stage, seed)).run(loss_of, keeping)

    def _batches(self, stage: TrainingStage, seed: int) -> Batches:
        short = Windows(self.stream, stage.window, stage.rows, seed)
        rows = max(1, stage.rows * stage.window // stage.long_window)
        long = Windows(self.stream, stage.long_window, rows, seed + 1)
        return lambda used, step: TrainingBatch((long if used >= stage.long_from else short).batch(step))

    def _fingerprint(self) -> str:
        return hashlib.sha256(self.stream.tobytes()).hexdigest()[:16]

    def _vocabulary(self) -> Tokenizer:
        if self.places.start is not None:
            return Tokenizer.from_file(str(self.places.start / "target" / "tokenizer.json"))
        kept = self.places.cache / "tokenizer.json"
        if self.places.resume and kept.exists():
            return Tokenizer.from_file(str(kept))
        tokenizer = train_vocabulary((document.text for document in self.corpus.train), self.settings.vocabulary)
        self.places.cache.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(kept))
        return tokenizer
