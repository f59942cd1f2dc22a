"""Structured output with llguidance: which tokens may come next. No torch here: the gateway uses it too.

A grammar is compiled once for a tokenizer; each use has a `Cursor` of its own, which goes along a session's output and
to and fro on the paths of its tree. What may follow is a function of the tokens alone, whatever way the cursor took.

Where one text alone can follow, the library allows one token alone: the one with which the tokenizer itself would
begin that text. Where the text may be over, the end-of-text tokens are among those allowed, and where it must be over
they are the only ones.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from slipstream.errors import FailedPrecondition, InvalidArgument, SlipstreamError
from slipstream.tokenizer.structured_output import BAD_GRAMMAR, StructuredOutput
from slipstream.tokenizer.vocabulary import EMULATED, common_prefix, fingerprint, load_tokenizer

Mask = npt.NDArray[np.uint8]
"""A bit for each token, the lowest bits first: 1 is allowed."""

STACK_BYTES = 128 << 20
"""Of the thread that compiles. The library recurses along rules that name rules, some 3 kB for each: in MAX_BYTES there
is room for 9000 of them, and the 8 MiB of a usual thread end, with the process, after 2500."""
NO_TOKENIZER = "NO_TOKENIZER"
KEPT = 64
"""Grammars that are kept compiled; many requests bring the same one."""
INITIAL_LEXER_FUEL, STEP_LEXER_FUEL = 300_000, 20_000
"""What compiling and what one mask may cost, in the library's measure: a third and a tenth of its defaults, with which
nested repetitions take seconds. Of sensible grammars none comes near, with 128,000 tokens neither."""


@cache
def _limits() -> LLParserLimits:
    return LLParserLimits(initial_lexer_fuel=INITIAL_LEXER_FUEL, step_lexer_fuel=STEP_LEXER_FUEL, verbose_errors=False)


class TokenizedModel(Protocol):
    """What a grammar depends on of a model."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class Grammars:
    """The grammars of one model, compiled one after the other on a thread of their own. Thread-safe.

    `load` gives the tokenizer, of which the fingerprint must be the model's; `vocabulary_size` is the width of its
    logits, `ends` are its end-of-text tokens.
    """

    def __init__(
        self, load: Callable[[], Tokenizer], fingerprint: str, vocabulary_size: int, ends: Sequence[int]
    ) -> None:
        self._load = load
        self._fingerprint = fingerprint
        self._vocabulary_size = vocabulary_size
        self._ends = tuple(ends)
        self._tokenizer: LLTokenizer | None = None
        self._known: OrderedDict[tuple[str, StructuredOutput], Grammar] = OrderedDict()

    @classmethod
    def of(cls, name: str, model: TokenizedModel) -> Grammars:
        """The grammars of a checkpoint, given by folder or hub id."""
        return cls(lambda: load_tokenizer(name), model.fingerprint, model.vocabulary_size, model.eos_token_ids)

    def prepare(self) -> Future[None]:
        """Takes the tokenizer in, as the first grammar would else: with 128,000 tokens a second or two, in which the
        interpreter does nothing else. A model that cannot be constrained is no error yet."""
        return _compiler().submit(self._prepare)

    def _prepare(self) -> None:
        with contextlib.suppress(SlipstreamError):
            self._tokens()

    def compile(self, structure: StructuredOutput, salt: str = "") -> Future[Grammar]:
        """The grammar, soon. It fails with InvalidArgument (BAD_GRAMMAR) for what cannot be read, and with
        FailedPrecondition where this model cannot write what was asked for (NO_TOKENIZER, UNSATISFIABLE_GRAMMAR).
        Sessions of different salts share nothing, not even the time that compiling takes."""
        return _compiler().submit(self._compiled, structure, salt)

    def _compiled(self, structure: StructuredOutput, salt: str) -> Grammar:
        """On the compiler's thread."""
        key = (salt, structure)
        grammar = self._known.pop(key, None) or Grammar(self._tokens(), _source(structure), self._ends)
        self._known[key] = grammar
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        return grammar

    def _tokens(self) -> LLTokenizer:
        if self._tokenizer is None:
            if self._fingerprint.startswith(EMULATED):
                raise FailedPrecondition("this model is emulated and has no words to constrain.", reason=NO_TOKENIZER)
            self._tokenizer = self._read(self._load())
        return self._tokenizer

    def _read(self, tokenizer: Tokenizer) -> LLTokenizer:
        if fingerprint(tokenizer) != self._fingerprint:
            raise FailedPrecondition(
                "this model's tokenizer is not known, so it cannot be constrained.", reason=NO_TOKENIZER
            )
        if not self._ends:
            raise FailedPrecondition(
                "this model has no end-of-text token, so no output would end.", reason=NO_TOKENIZER
            )
        try:
            return LLTokenizer(tokenizer.to_str(), n_vocab=self._vocabulary_size, eos_token=list(self._ends))
        except ValueError as error:
            raise FailedPrecondition(
                f"this model's tokenizer has tokens whose bytes are not known: {error}.", reason=NO_TOKENIZER
            ) from error


class Grammar:
    """Compiled for one tokenizer. Raises what `Grammars.compile` says."""

    def __init__(self, tokenizer: LLTokenizer, source: str, ends: Sequence[int]) -> None:
        self._ends = frozenset(ends)
        self._matcher = LLMatcher(tokenizer, source, log_level=0, limits=_limits())
        if self._matcher.is_error():
            message = _shortened(self._matcher.get_error())
            raise InvalidArgument(f"structured_output cannot be read: {message}.", reason=BAD_GRAMMAR)
        self._matcher.compute_bitmask()  # what this costs, cursors need not pay: copies know what it found
        if self._matcher.is_error():
            raise FailedPrecondition(
                "nothing that this model can write satisfies structured_output, or it is too complex; change it.",
                reason="UNSATISFIABLE_GRAMMAR",
            )

    def cursor(self) -> Cursor:
        """At the beginning of an output."""
        return Cursor(self._matcher.deep_copy, self._ends)


class Cursor:
    """For one thread at a time."""

    def __init__(self, fresh: Callable[[], LLMatcher], ends: frozenset[int]) -> None:
        self._fresh = fresh
        self._ends = ends
        self._matcher = fresh()
        self._said: list[int] = []
        self._mask: Mask | None = None

    def mask(self, output: Sequence[int]) -> Mask | None:
        """What may follow these tokens; None behind an end of the text, where nothing counts any more.

        Raises FailedPrecondition (GRAMMAR_GAVE_UP) where the library reaches one of its limits, or the tokens are
        none of the grammar's; the cursor can be used again."""
        if not self._ends.isdisjoint(output):
            return None
        self._go(list(output))
        if self._mask is None:
            self._mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            self._check()
        return self._mask

    def allows(self, output: Sequence[int], token: int) -> bool:
        """Whether the token may follow the others. Raises as `mask` does."""
        mask = self.mask(output)
        return mask is not None and bool(mask[token >> 3] >> (token & 7) & 1)

    def _go(self, output: list[int]) -> None:
        kept = common_prefix(self._said, output)
        if kept < len(self._said):
            self._matcher.rollback(len(self._said) - kept)
        if kept < len(output):
            self._matcher.consume_tokens(output[kept:])
        if kept < max(len(self._said), len(output)):
            self._mask = None
        self._said = output
        self._check()

    def _check(self) -> None:
        """An error of the matcher stays with it: it is replaced."""
        if self._matcher.is_error():
            message = _shortened(self._matcher.get_error())
            self._matcher, self._said, self._mask = self._fresh(), [], None
            raise FailedPrecondition(
                f"the grammar cannot be followed any further: {message}.", reason="GRAMMAR_GAVE_UP"
            )


def _source(structure: StructuredOutput) -> str:
    """In the library's own notation. Raises InvalidArgument for a schema that is no JSON."""
    if structure.format == "regex":
        return LLMatcher.grammar_from_regex(structure.text)
    if structure.format == "grammar":
        return json.dumps({"grammars": [{"lark_grammar": structure.text}]})
    return LLMatcher.grammar_from_json_schema(structure.schema)


def _shortened(message: str) -> str:
    """The first lines of an error, on one."""
    return " ".join(message.split())[:300].rstrip(".")


@cache
def _compiler() -> ThreadPoolExecutor:
    """One thread for the whole process, so that compiling never takes more than one core."""
    executor = ThreadPoolExecutor(1, "grammar-compiler")
    usual = threading.stack_size(STACK_BYTES)
    try:
        executor.submit(lambda: None).result()  # starts the thread
    finally:
        threading.stack_size(usual)
    return executor
