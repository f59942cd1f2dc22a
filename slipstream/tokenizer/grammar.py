"""Structured output with llguidance: the tokens that a grammar allows next. Without torch, since the gateway uses it.

A grammar is compiled once for a tokenizer. Each session has a `Cursor` of its own, which moves along the output and the
paths of the candidate tree. The allowed tokens are a function of the tokens before, however the cursor moved.

Where only one text can follow, the library allows only the token with which the tokenizer would begin that text. Where
the text may end, end-of-text tokens are among the allowed ones; where it must end, they are the only ones.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from slipstream.errors import GRAMMAR_TOO_COSTLY, FailedPrecondition, InvalidArgument, SlipstreamError
from slipstream.tenants import FairThreads, TenantCache
from slipstream.tokenizer.structured_output import BAD_GRAMMAR, StructuredOutput
from slipstream.tokenizer.vocabulary import EMULATED, common_prefix, fingerprint, load_tokenizer

Mask = npt.NDArray[np.uint8]
"""uint8 [`mask_bytes(V)`]: one bit for each token, lowest bits first; 1 is allowed."""

COMPILERS = 2
"""Threads that compile; one tenant uses at most one of them."""
STACK_BYTES = 128 << 20
"""Stack of a compiling thread. The library recurses into nested rules, about 3 kB for each: MAX_BYTES has room for
9000 of them, and the usual 8 MiB would crash the process after 2500."""
NO_TOKENIZER = "NO_TOKENIZER"
KEPT = 64
"""Compiled grammars that are kept, since many requests have the same one."""
INITIAL_LEXER_FUEL, STEP_LEXER_FUEL = 300_000, 20_000
"""Bounds on the cost of compiling and of one mask, in the library's units: a third and a tenth of its defaults, with
which nested repetitions take seconds. Ordinary grammars stay far below, also with 128,000 tokens."""
STEP_ITEMS, LEXER_STATES = 20_000, 50_000
"""Bounds on the work of one mask in ambiguous rules, and on the memory of one grammar: 1 to 2 kB for each state.
Ordinary grammars need at most 1,000 items with 4,096 tokens."""
EACH_S, EXTRA_S, MASK_S = 0.005, 2.0, 0.5
"""Seconds of a processor for a session's masks (`MaskBudget`). Ordinary ones take 0.00002 to 0.0015. STEP_ITEMS bounds
one mask only roughly, since an item of an ambiguous rule costs the more the more there are."""
LOCKED_S = 0.0005
"""Longest piece of work after which a cursor moves with the interpreter's lock."""
PIECE = 16
"""Tokens consumed at a time, unless they are costly."""
NO_TOKEN = 2**31
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
"""A rule of llama.cpp's grammars, which is none of Lark's."""
MOVERS = 2
"""Threads of the library that move costly cursors."""


@cache
def _limits() -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_ITEMS,
        max_lexer_states=LEXER_STATES,
        verbose_errors=False,
    )


@cache
def _movers() -> LLExecutor:
    return LLExecutor(MOVERS)


class TokenizedModel(Protocol):
    """Properties of a model that a grammar depends on."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class Grammars:
    """The grammars of one model, compiled on separate threads that tenants share fairly. Thread-safe.

    `load` returns the tokenizer, which must have the given fingerprint; `vocabulary_size` is the width of the model's
    logits, `ends` are its end-of-text tokens.
    """

    def __init__(
        self, load: Callable[[], Tokenizer], fingerprint: str, vocabulary_size: int, ends: Sequence[int]
    ) -> None:
        self._load = load
        self._fingerprint = fingerprint
        self._vocabulary_size = vocabulary_size
        self._ends = tuple(ends)
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._known: TenantCache[tuple[str, StructuredOutput], Grammar] = TenantCache(KEPT)
        self.compiled = 0
        """Grammars that were compiled or found, refused ones included."""

    @classmethod
    def of(cls, name: str, model: TokenizedModel) -> Grammars:
        """The grammars of a checkpoint, given by folder or hub id."""
        return cls(lambda: load_tokenizer(name), model.fingerprint, model.vocabulary_size, model.eos_token_ids)

    def prepare(self) -> Future[None]:
        """Loads the tokenizer before the first grammar needs it: with 128,000 tokens that blocks the interpreter for a
        second or two. A model that cannot be constrained raises no error yet."""
        return _compilers().submit("", self._prepare)

    def _prepare(self) -> None:
        with contextlib.suppress(SlipstreamError):
            self._tokens()

    def compile(self, structure: StructuredOutput, salt: str = "", tenant: str = "") -> Future[Grammar]:
        """Compiles a grammar. The future fails with InvalidArgument (BAD_GRAMMAR) for a malformed one, and with
        FailedPrecondition where the model cannot satisfy it (NO_TOKENIZER, UNSATISFIABLE_GRAMMAR). Sessions of
        different salts share no grammar, so that compile times reveal nothing."""
        return _compilers().submit(tenant, self._compiled, structure, salt, tenant)

    def _compiled(self, structure: StructuredOutput, salt: str, tenant: str) -> Grammar:
        """Returns the cached or newly compiled grammar; runs on a compiling thread. The salts of different tenants
        differ, so no two threads compile one grammar."""
        key = salt, structure
        self.compiled += 1
        with self._lock:
            known = self._known.get(tenant, key)
        if known is not None:
            return known
        grammar = Grammar(self._tokens(), _source(structure), self._ends)
        with self._lock:
            self._known.put(tenant, key, grammar)
        return grammar

    def _tokens(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                if self._fingerprint.startswith(EMULATED):
                    raise FailedPrecondition(
                        "this model is emulated and has no words to constrain.", reason=NO_TOKENIZER
                    )
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


def mask_bytes(vocabulary_size: int) -> int:
    """Bytes of a mask: those of a step's sessions are computed together, whoever made them."""
    return -(-vocabulary_size // 8)


class Grammar:
    """A grammar compiled for one tokenizer. Raises the errors of `Grammars.compile`."""

    def __init__(self, tokenizer: LLTokenizer, source: str, ends: Sequence[int]) -> None:
        self._ends = frozenset(ends)
        self._mask_bytes = mask_bytes(tokenizer.vocab_size)
        self._matcher = LLMatcher(tokenizer, source, log_level=0, limits=_limits())
        if self._matcher.is_error():
            message = _shortened(self._matcher.get_error())
            raise InvalidArgument(
                f"structured_output cannot be read: {message}.", reason=BAD_GRAMMAR, field="structured_output"
            )
        self._matcher.compute_bitmask()  # cursors are copies and keep the result
        if self._matcher.is_error():
            raise FailedPrecondition(
                "nothing that this model can write satisfies structured_output, or it is too complex; change it.",
                reason="UNSATISFIABLE_GRAMMAR",
            )

    def cursor(self, budget: MaskBudget | None = None) -> Cursor:
        """A cursor at the beginning of an output."""
        return Cursor(self._matcher.deep_copy, self._mask_bytes, self._ends, budget or MaskBudget())


class MaskBudget:
    """The seconds of a processor that the masks of one session may take: `each_s` for each, and `extra_s` besides.

    Raises FailedPrecondition (GRAMMAR_TOO_COSTLY) once they are spent, and for a mask that takes more than MASK_S.
    """

    def __init__(self, each_s: float = EACH_S, extra_s: float = EXTRA_S) -> None:
        self._each_s = each_s
        self._left_s = extra_s
        self.last_s = 0.0
        """Seconds that the last piece of work took."""

    def check(self) -> None:
        if self._left_s < 0.0:
            raise FailedPrecondition(
                "this grammar takes too long to follow; write it without ambiguous rules.", reason=GRAMMAR_TOO_COSTLY
            )

    def charge(self, seconds: float, masks: int = 0) -> None:
        self.last_s = seconds
        self._left_s = -1.0 if seconds > MASK_S else self._left_s + masks * self._each_s - seconds
        self.check()


class Cursor:
    """A position in a grammar, for one thread at a time: behind the tokens that were committed and any path of others.

    Masks are computed without the interpreter's lock. To move the library holds it, which takes long where a mask took
    long; then it moves on the library's own threads.
    """

    def __init__(
        self, fresh: Callable[[], LLMatcher], mask_bytes: int, ends: frozenset[int], budget: MaskBudget
    ) -> None:
        self._fresh = fresh
        self._mask_bytes = mask_bytes
        self._ends = ends
        self._budget = budget
        self._matcher = fresh()
        self._bystander: LLMatcher | None = None
        self._committed: list[int] = []
        self._ended = False
        self._read = 0
        """Committed tokens that the matcher has consumed; it has consumed a path only if these are all."""
        self._path: list[int] = []
        self._mask: Mask | None = None

    def commit(self, tokens: Sequence[int]) -> None:
        """Paths follow these tokens from now on."""
        kept = common_prefix(self._path, list(tokens))
        if kept < len(tokens) and len(self._path) > kept:
            self._matcher.rollback(len(self._path) - kept)
            self._path, self._mask = self._path[:kept], None
        self._path = self._path[kept:]
        self._read += kept
        self._committed += tokens
        self._ended = self._ended or not self._ends.isdisjoint(tokens)

    def mask(self, path: Sequence[int]) -> Mask | None:
        """The tokens allowed after the committed ones and these; None after an end of text.

        Raises FailedPrecondition where the library reaches one of its limits or the grammar does not allow the tokens
        (GRAMMAR_GAVE_UP), the cursor then stays usable; and what the budget raises."""
        if self._ended or not self._ends.isdisjoint(path):
            return None
        self._budget.check()
        try:
            self._move_to(path)
            if self._mask is None:
                began = time.thread_time()
                # The library has one bit more, and whole words.
                self._mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8, self._mask_bytes)
                self._budget.charge(time.thread_time() - began, masks=1)
                self._check()
        except BaseException:  # a matcher that has failed cannot be used again, nor one that panicked halfway
            self._matcher, self._read, self._path, self._mask = self._fresh(), 0, [], None
            raise
        return self._mask

    def _move_to(self, path: Sequence[int]) -> None:
        if self._read < len(self._committed):
            self._consume(self._committed[self._read :])
            self._read = len(self._committed)
        kept = common_prefix(self._path, list(path))
        if kept < len(self._path):
            self._matcher.rollback(len(self._path) - kept)
            self._mask = None
        if kept < len(path):
            self._consume(path[kept:])
        self._path = list(path)
        self._check()

    def _consume(self, tokens: Sequence[int]) -> None:
        self._mask = None
        start = 0
        while start < len(tokens):
            if self._budget.last_s <= LOCKED_S:
                began, piece = time.thread_time(), tokens[start : start + PIECE]
                self._matcher.consume_tokens(list(piece))
                start += PIECE
                self._budget.charge(time.thread_time() - began)
            else:
                began = time.perf_counter()
                self._consume_unlocked(tokens[start])
                start += 1
                self._budget.charge(time.perf_counter() - began)

    def _consume_unlocked(self, token: int) -> None:
        """The library gives the lock up only for two matchers at a time; the other one has failed and does nothing."""
        if self._bystander is None:
            self._bystander = self._fresh()
            self._bystander.consume_token(NO_TOKEN)
        _movers().consume_token_par([(self._matcher, token), (self._bystander, token)])

    def _check(self) -> None:
        """Raises the error of a matcher that has failed."""
        if self._matcher.is_error():
            message = _shortened(self._matcher.get_error())
            raise FailedPrecondition(
                f"the grammar cannot be followed any further: {message}.", reason="GRAMMAR_GAVE_UP"
            )


def allows(mask: Mask | None, token: int) -> bool:
    """Whether a mask has the token; None has none."""
    return mask is not None and bool(mask[token >> 3] >> (token & 7) & 1)


def _source(structure: StructuredOutput) -> str:
    """The grammar in the library's notation. Raises InvalidArgument for a schema that is not JSON, and for a grammar in
    llama.cpp's notation."""
    if structure.format == "regex":
        return LLMatcher.grammar_from_regex(structure.text)
    if structure.format == "grammar":
        if _GBNF.search(structure.text):
            raise InvalidArgument(
                "the grammar is in GBNF (`root ::= ...`); write it in Lark's notation, which begins `start: ...`.",
                reason=BAD_GRAMMAR,
                field="structured_output",
            )
        return json.dumps({"grammars": [{"lark_grammar": structure.text}]})
    return LLMatcher.grammar_from_json_schema(structure.schema)


def _shortened(message: str) -> str:
    """The beginning of an error's text, on one line."""
    return " ".join(message.split())[:300].rstrip(".")


@cache
def _compilers() -> FairThreads:
    """The threads of the whole process, so that compiling never takes more than so many cores."""
    return FairThreads(COMPILERS, "grammar-compiler", STACK_BYTES)
