"""Whether a draft model fits its target, by their tokenizers' files alone: before anything large is read."""

from __future__ import annotations

from slipstream.errors import FailedPrecondition, NotFound
from slipstream.tokenizer.vocabulary import EMULATED, fingerprint, load_tokenizer, read_json, tokenizer_file

TRANSLATE = "let the drafter translate (`--translate`, DRAFTER_TRANSLATE_FOR)"


def check_vocabularies(draft: str, target: str) -> None:
    """Raises FailedPrecondition for models whose tokenizers have different vocabularies, and for a broken one. Models
    without a tokenizer pass: their workers compare what they have."""
    if any(name.startswith(f"{EMULATED}:") for name in (draft, target)):
        return
    try:
        tokenizers = [load_tokenizer(name) for name in (draft, target)]
    except NotFound:
        return
    mine, theirs = (fingerprint(tokenizer) for tokenizer in tokenizers)
    if mine != theirs:
        sizes = [tokenizer.get_vocab_size(with_added_tokens=True) for tokenizer in tokenizers]
        raise FailedPrecondition(
            f"draft model {draft} ({sizes[0]} tokens) has another vocabulary than the target {target} ({sizes[1]} "
            f"tokens); choose a pair with one tokenizer, or {TRANSLATE}.",
            reason="VOCABULARY_MISMATCH",
        )


def output_size(name: str) -> int:
    """Columns of a model's logits by its configuration, which may be padded; 0 where it does not say."""
    try:
        content = read_json(tokenizer_file(name, "config.json"))
    except NotFound:
        return 0
    return int((content.get("text_config") or content).get("vocab_size") or 0)


def padding_note(draft: str, target: str) -> str:
    """A sentence where the two are padded to different sizes, which serves all the same; empty otherwise."""
    if any(name.startswith(f"{EMULATED}:") for name in (draft, target)):
        return ""
    mine, theirs = output_size(draft), output_size(target)
    if not mine or not theirs or mine == theirs:
        return ""
    return f"the draft's logits have {mine} columns, the target's {theirs}: ids of one alone are never proposed"
