"""Tokenizers of SentencePiece's kinds, as converted checkpoints have them, and WordPiece's: each puts its space before
words in another way, and each decoder takes the first one of a text away in another way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.support.toy_tokenizer import END

BLANK = "▁"
SPECIAL = ("<unk>", "<s>", END)
WORDS = (
    *("The", "capital", "of", "France", "is", "Paris", "and", "a", "it", "der", "Käse", "lief"),
    *("Be", "brief", "user", "assistant", "system", "In", "warm", "Hi", "there"),
)
SIGNS = ".,!?:;'<>|/\\_-()[]{}\"0123456789\n"


def _bpe() -> models.BPE:
    """Words with and without a blank in front, letters, and bytes for everything else."""
    words = list(SPECIAL) + [f"<0x{byte:02X}>" for byte in range(256)] + [BLANK, *SIGNS]
    merges: list[tuple[str, str]] = []
    letters = [chr(code) for code in (*range(65, 91), *range(97, 123))] + ["ä"]
    for word in sorted(WORDS, key=len, reverse=True):
        merges += [(word[: end - 1], word[end - 1]) for end in range(2, len(word) + 1)]
        merges.append((BLANK, word))
        words += [*(word[:end] for end in range(2, len(word) + 1)), BLANK + word]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys([*words, *letters]))}
    return models.BPE(vocabulary, list(dict.fromkeys(merges)), byte_fallback=True, unk_token="<unk>", fuse_unk=True)


def _stripping() -> decoders.Decoder:
    return decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def _llama2() -> Tokenizer:
    tokenizer = Tokenizer(_bpe())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)])
    tokenizer.decoder = _stripping()
    return tokenizer


def _mistral() -> Tokenizer:
    tokenizer = Tokenizer(_bpe())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(BLANK, prepend_scheme="first", split=False)
    tokenizer.decoder = _stripping()
    return tokenizer


def _gemma() -> Tokenizer:
    tokenizer = Tokenizer(_bpe())
    tokenizer.normalizer = normalizers.Replace(" ", BLANK)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _t5() -> Tokenizer:
    words = [*SPECIAL, BLANK, *(BLANK + word for word in WORDS), *WORDS, *SIGNS.replace("\n", "")]
    letters = [chr(code) for code in (*range(65, 91), *range(97, 123))] + ["ä"]
    scored = [(word, -float(len(BLANK + "capital") + 1 - len(word))) for word in dict.fromkeys([*words, *letters])]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(BLANK, prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(BLANK, prepend_scheme="always")
    return tokenizer


def _word_piece() -> Tokenizer:
    letters = [chr(code) for code in (*range(65, 91), *range(97, 123))] + ["ä"]
    words = [*SPECIAL, *WORDS, *SIGNS.replace("\n", ""), *letters, *("##" + letter for letter in letters)]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _suffix() -> Tokenizer:
    """Marks the ends of words, as the first GPT did."""
    end = "</w>"
    letters = [chr(code) for code in (*range(65, 91), *range(97, 123))] + ["ä", *SIGNS.replace("\n", "")]
    words = [*SPECIAL, *letters, *(letter + end for letter in letters)]
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        pieces = [*word[:-1], word[-1] + end]
        for piece in range(1, len(pieces)):
            merges.append(("".join(pieces[:piece]), pieces[piece]))
            words.append("".join(pieces[: piece + 1]))
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(dict.fromkeys(merges)), end_of_word_suffix=end))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder(end)
    return tokenizer


KINDS: Mapping[str, Callable[[], Tokenizer]] = {
    "llama 2": _llama2,
    "mistral": _mistral,
    "gemma": _gemma,
    "t5": _t5,
    "word pieces": _word_piece,
    "suffixes": _suffix,
}


def sentence_piece(kind: str, folder: Path, *, begins: bool = True) -> Path:
    """Writes tokenizer.json of this kind. `begins`: every text begins with `<s>`."""
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    if begins:
        first = [("<s>", tokenizer.token_to_id("<s>"))]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=first
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
