"""The text to learn from: the Python files of one directory, their vocabulary, and batches of token windows."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from slipstream.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

# Installed packages carry their own licences; the rest are generated tables or data with odd encodings on purpose.
LEFT_OUT_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "data", "encoded_modules"}
)
HELD_OUT_PER_MILLE = 20


@dataclass(frozen=True)
class Document:
    """One file: its path inside the corpus (POSIX) and its text."""

    path: str
    text: str


@dataclass(frozen=True)
class TrainingCorpus:
    """Documents split by file: no held-out file is ever trained on, not even by the tokenizer."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    name: str
    licence: str


def read_corpus(directory: Path | None) -> TrainingCorpus:
    """Read `directory` (the standard library if None), without duplicates; the split hangs on the path alone."""
    root = directory or Path(sysconfig.get_path("stdlib"))
    train: list[Document] = []
    held_out: list[Document] = []
    seen: set[bytes] = set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if LEFT_OUT_FOLDERS.intersection(relative.parts[:-1]):
            continue
        text = _read(path)
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if not text.strip() or digest in seen:
            continue
        seen.add(digest)
        document = Document(relative.as_posix(), text)
        (held_out if is_held_out(document.path) else train).append(document)
    if directory is None:
        version = sysconfig.get_python_version()
        return TrainingCorpus(tuple(train), tuple(held_out), f"the Python {version} standard library", "PSF-2.0")
    return TrainingCorpus(tuple(train), tuple(held_out), f"the Python files of `{root.name}`", "as stated by its owner")


def is_held_out(path: str, per_mille: float = HELD_OUT_PER_MILLE) -> bool:
    """About 2 % of files, chosen by a hash of the path, so that the split survives new and changed files."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % 1000 < per_mille


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return ""


END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0


def train_vocabulary(texts: Iterable[str], size: int) -> Tokenizer:
    """Byte-level BPE with `size` tokens in all; every text decodes to itself because nothing normalises it.

    Token 0 ends a document and separates documents in training; it is never added to a prompt.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_vocabulary(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json: the same bytes for the same vocabulary in every folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "model_max_length": context,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def encode_stream(tokenizer: Tokenizer, documents: Iterable[Document], seed: int) -> npt.NDArray[np.int64]:
    """All documents in an order fixed by `seed`, each followed by the end-of-text token: int64 [tokens]."""
    shuffled = list(documents)
    np.random.default_rng(seed).shuffle(shuffled)
    pieces: list[int] = [END_OF_TEXT_ID]
    for encoding in tokenizer.encode_batch([document.text for document in shuffled]):
        pieces.extend(encoding.ids)
        pieces.append(END_OF_TEXT_ID)
    return np.asarray(pieces, dtype=np.int64)


@dataclass(frozen=True)
class TrainingBatch:
    """The data of a step."""

    tokens: torch.Tensor
    """int64 [rows, length + 1]."""
    learned: torch.Tensor | None = None
    """bool [rows, length + 1]: the tokens to learn; None: all."""
    used: float = 0.0
    """Part of the budget that is gone."""

    def on(self, device: torch.device) -> TrainingBatch:
        learned = None if self.learned is None else self.learned.to(device)
        return TrainingBatch(self.tokens.to(device), learned, self.used)


@dataclass(frozen=True)
class Windows:
    """Cuts a stream into windows of `length` inputs plus one shifted target; every epoch cuts elsewhere.

    Windows start anywhere in a file, so a prompt taken from the middle of a file is a natural one.
    """

    stream: npt.NDArray[np.int64]
    length: int
    rows: int
    seed: int

    def __post_init__(self) -> None:
        if self.per_epoch < 1:
            raise InvalidArgument(
                f"The corpus has {len(self.stream)} tokens, less than one window of {self.length}; give more files."
            )

    @property
    def per_epoch(self) -> int:
        """Windows until every token was seen once; one length is kept free for the shift."""
        return (len(self.stream) - self.length - 1) // self.length

    def batch(self, step: int) -> torch.Tensor:
        """Tokens int64 [rows, length + 1] of one step."""
        import torch  # here: held-out texts are prompts of commands that need no torch

        picks = range(step * self.rows, (step + 1) * self.rows)
        return torch.from_numpy(np.stack([self._window(*divmod(pick, self.per_epoch)) for pick in picks]))

    def _window(self, epoch: int, index: int) -> npt.NDArray[np.int64]:
        random = np.random.default_rng((self.seed, epoch))
        shift = int(random.integers(self.length))
        start = shift + int(random.permutation(self.per_epoch)[index]) * self.length
        return self.stream[start : start + self.length + 1]
