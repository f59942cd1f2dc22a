"""A tokenizer whose every token is one byte, so that characters and stop strings straddle tokens; and its model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from slipstream.tokenizer.vocabulary import fingerprint, load_tokenizer
from slipstream.v1 import types_pb2

END = "<eos>"


def toy_tokenizer(folder: Path, specials: Sequence[str] = ()) -> Path:
    """Writes it. `specials`: further special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in (END, *specials)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def toy_model(folder: Path) -> types_pb2.ModelInfo:
    """Model information of a verifier with this tokenizer."""
    tokenizer = load_tokenizer(str(folder))
    return types_pb2.ModelInfo(
        name="toy",
        vocabulary_size=max(260, tokenizer.get_vocab_size(with_added_tokens=True)),
        vocabulary_fingerprint=fingerprint(tokenizer),
        max_length=200,
        eos_token_ids=[tokenizer.token_to_id(END)],
    )
