"""`slipstream doctor --target A --draft B`: whether a pair is worth serving, measured on your prompts on this machine.

The target writes a text behind each prompt, as a verifier would, and the drafter proposes for it round by round. What
it proposes is compared with the text: by the coupled rule a candidate is accepted if it is the token that the target
chose. So acceptance is what serving would have, of one chain for each round, without a server.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from measurement.load.workload import Asked
from measurement.pairs.figures import DEPTH, TEMPERATURES, PairCheck, Round, mean_length, summarise
from measurement.pairs.findings import check_files, check_models, decide, warn, warn_of_level
from measurement.pairs.loops import DISTINCT, distinct_share
from measurement.pairs.passes import least_seconds, passes
from slipstream.engine.engine import Engine, HiddenRequest, HiddenStates
from slipstream.engine.factory import open_engine
from slipstream.engine.sampler import coupled_sampling, logits_processor
from slipstream.engine.segment import Segment
from slipstream.errors import InvalidArgument, SlipstreamError
from slipstream.proposers.base import (
    ROOT,
    UNLIMITED,
    HiddenNeed,
    HiddenRows,
    OpenedProposer,
    Proposal,
    ProposedNode,
    ProposerContext,
    ProposerSettings,
    open_proposer,
)
from slipstream.proposers.registry import find_method
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.tokenizer.vocabulary import is_local, load_tokenizer, read_json, tokenizer_file

CHUNK = 256
TRIES = 5
TIMED_ROUNDS = 16
"""Rounds of a text whose calls are timed."""
WEIGHTS = (".safetensors", ".pt", ".bin")
BYTES = {"float32": 4, "float64": 8}
"""Bytes of a number by its type; numbers of other types have 2."""
PROMPTS = (
    Asked("def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n", "code"),
    Asked("class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n", "code"),
    Asked("The history of the town begins with the river. In the spring of that year, the first", "prose"),
    Asked("When you write a letter to a friend whom you have not seen for a long time, you should", "prose"),
    Asked('{"name": "Ada", "born": 1815, "languages": ["English", "French"]}\n{"name": "Alan", "born":', "JSON"),
    Asked('[{"id": 1, "price": 9.5, "in_stock": true}, {"id": 2, "price": 12.0, "in_stock": false}, {"id":', "JSON"),
    Asked(
        "def first(a, b):\n    total = a + b\n    return total\n\n# The same, renamed:\ndef second(a, b):\n",
        "in prompt",
    ),
    Asked("Q: The code is 7 3 9 1 5 2. Repeat the code twice.\nA: The code is 7 3 9 1", "in prompt"),
)
"""Prompts of a check that names none: a few of each kind."""


def check_pair(
    check: PairCheck, prompts: Sequence[Asked], tokens: int, dtype: str, on_progress: Callable[[str], None] = print
) -> None:
    """Fills `check`, which names the two models and the method. `tokens`: of each answer; `on_progress` takes a line
    for each stage that may take long.

    Raises what opening the two raises, and InvalidArgument for a method that needs the target's own passes.
    """
    if find_method(check.method).needs_target_passes:
        raise InvalidArgument(f"{check.method} drafts in the target's own passes; measure it with `slipstream bench`.")
    check_files(check)
    if not check.wrong:
        _try(check, prompts, tokens, dtype, on_progress)
    decide(check)


def _try(
    check: PairCheck, prompts: Sequence[Asked], tokens: int, dtype: str, on_progress: Callable[[str], None]
) -> None:
    on_progress(f"loading {check.target}")
    engine = open_engine(check.target, dtype, kv_tokens=1 << 16)
    translated = check.target if check.translated else ""
    opened = open_proposer(
        check.method,
        ProposerSettings(model=check.draft, target=check.target, dtype=dtype, translate_for=translated),
    )
    check.target_parameters, check.draft_parameters = engine.model.parameters, opened.model.parameters
    check_models(check, engine, opened)
    if check.wrong:
        return
    on_progress(f"{len(TEMPERATURES) * len(prompts)} texts of up to {tokens} tokens")
    rounds, calls, lengths, timed = _rounds(check, engine, opened, prompts, tokens)
    summarise(check, rounds)
    if check.rounds:
        assert timed is not None
        measure_cost(check, engine, [each for each in rounds if not each.temperature], calls, timed)
        warn_of_level(check)
        warn(check, rounds, lengths, engine)
    _measure_memory(check, engine, opened)


def _rounds(
    check: PairCheck, engine: Engine, opened: OpenedProposer, prompts: Sequence[Asked], tokens: int
) -> tuple[list[Round], Calls, list[int], TimedRounds | None]:
    """Rounds over the target's texts, the calls that they took, the lengths of all answers, and the rounds of the first
    text once more. Any drafter predicts a text that loops, which flatters all figures: it is counted and left out."""
    tokenizer = load_tokenizer(check.target)
    counts_first = find_method(check.method).needs_model
    rounds: list[Round] = []
    calls, lengths, distinct = Calls(), list[int](), list[float]()
    firsts: list[bool] = []
    timed: TimedRounds | None = None
    for temperature in TEMPERATURES:
        check.looping_by_temperature[f"{temperature:g}"] = 0
        for seed, asked in enumerate(prompts):
            prompt = list(tokenizer.encode(asked.prompt).ids)
            sampling = SamplingParams(temperature=temperature, seed=seed)
            text = write_text(engine, prompt, asked.max_tokens or tokens, sampling, opened.hidden)
            lengths.append(len(text.written))
            distinct.append(distinct_share(text.written))
            if distinct[-1] < DISTINCT:
                check.looping += 1
                check.looping_by_temperature[f"{temperature:g}"] += 1
                continue
            run = partial(run_rounds, opened, text, asked.workload or "all")
            timed = timed or run
            rounds += run(calls)
            if not temperature:
                check.places += lengths[-1]
                firsts += first_right(opened, text) if counts_first else []
    check.texts, check.distinct = len(distinct), statistics.mean(distinct)
    check.first = sum(firsts) / len(firsts) if firsts else None
    return rounds, calls, lengths, timed


@dataclass(frozen=True, slots=True)
class TargetText:
    """A prompt and what the target wrote behind it, at which a drafter is tried."""

    tokens: list[int]
    prompt_length: int
    sampling: SamplingParams
    states: HiddenStates | None = None
    """Hidden states of all tokens but the last, for heads."""
    vocabulary_size: int = UNLIMITED
    """Vocabulary size of the target."""

    @property
    def written(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def context(self, handle: object, length: int, given: int) -> ProposerContext:
        """A proposer's view of the first `length` tokens; of the first `given` it has the hidden states already."""
        hidden: tuple[HiddenRows, ...] = ()
        if self.states is not None and length - 1 > given:
            hidden = (HiddenRows(given, self.states.cut(given, length - 1)),)
        return ProposerContext(
            handle,
            self.tokens,
            length,
            self.prompt_length,
            len(self.tokens) + DEPTH,
            self.sampling,
            vocabulary_size=self.vocabulary_size,
            hidden=hidden,
        )


@torch.inference_mode()
def write_text(
    engine: Engine, prompt: list[int], tokens: int, sampling: SamplingParams, need: HiddenNeed | None
) -> TargetText:
    """Up to `tokens` of the target behind the prompt, with the hidden states that `need` names.

    Raises ResourceExhausted for a text that has no room, Internal for broken numbers.
    """
    text = list(prompt)
    sequence = engine.kv.begin_unshared(len(prompt) + tokens)
    request = None if need is None else HiddenRequest(need.layers)
    parts: list[HiddenStates] = []
    try:
        while len(text) < len(prompt) + tokens:
            pending = text[sequence.length : sequence.length + CHUNK]
            segment = Segment(sequence, pending, want_logits=sequence.length + len(pending) == len(text))
            output = engine.forward([segment]) if request is None else engine.forward([segment], request)
            engine.kv.keep(segment, [])
            if output.hidden is not None:
                parts.append(output.hidden)
            if not segment.want_logits:
                continue
            row = logits_processor.process(output.logits, [logits_processor.SampledRow(sampling)])
            drawn, _ = coupled_sampling.choose(row, [sampling.greedy], [sampling.seed], [len(text)])
            text.append(int(drawn[0]))
            if text[-1] in engine.model.eos_token_ids or text[-1] < 0:
                break
    finally:
        engine.kv.close(sequence)
    states = HiddenStates.join(parts) if parts else None
    return TargetText(text, len(prompt), sampling, states, engine.model.vocabulary_size)


@dataclass(slots=True)
class Calls:
    """Calls of the proposer, and the rounds that they were made for."""

    seconds: list[float] = field(default_factory=list)
    """Seconds of each call."""
    rounds: int = 0


TimedRounds = Callable[[Calls], Generator[Round]]
"""Begins the rounds over one text."""


def run_rounds(opened: OpenedProposer, text: TargetText, workload: str, calls: Calls) -> Generator[Round]:
    """Rounds over the text behind its prompt. Raises the error with which the proposer gives the sequence up."""
    handle, length, given, tokens = object(), text.prompt_length, 0, text.tokens
    try:
        while length < len(tokens):
            context = text.context(handle, length, given)
            given = length - 1
            chain = likeliest_chain(opened, context, calls)
            right = 0
            while right < len(chain) and length + right < len(tokens) and chain[right] == tokens[length + right]:
                right += 1
            calls.rounds += 1
            tried = min(len(chain), len(tokens) - length)
            yield Round(length, workload, text.sampling.temperature, tried, right)
            length += right + 1
    finally:
        opened.proposer.close_sequence(handle)


def call_seconds(rounds_of: TimedRounds) -> float:
    """Seconds of one call, on average over the first rounds of a text, without the one that reads the prompt: of each
    call the least of TRIES, as passes are timed, so that other work on the machine counts for neither. `rounds_of`
    begins the same rounds anew."""
    found: list[list[float]] = []
    for _ in range(TRIES):
        calls = Calls()
        with closing(rounds_of(calls)) as rounds:
            next(rounds)
            first = len(calls.seconds)
            for _ in islice(rounds, TIMED_ROUNDS):
                pass
        found.append(calls.seconds[first:] or calls.seconds)
    return float(statistics.mean(map(min, zip(*found, strict=True))))


def first_right(opened: OpenedProposer, text: TargetText) -> list[bool]:
    """Whether the first candidate is the text's token, at every place behind the prompt: rounds begin where the ones
    before ended, which are the places that are hard to guess."""
    handle, given, found = object(), 0, list[bool]()
    for length in range(text.prompt_length, len(text.tokens)):
        context = text.context(handle, length, given)
        given = length - 1
        found.append(likeliest_chain(opened, context, Calls(), 1)[:1] == [text.tokens[length]])
    opened.proposer.close_sequence(handle)
    return found


def likeliest_chain(opened: OpenedProposer, context: ProposerContext, calls: Calls, most: int = DEPTH) -> list[int]:
    """The first child of every node from the root down, up to `most`: a method that proposes level by level is called
    once for each."""
    nodes: list[ProposedNode] = []
    chain: list[int] = []
    """Indices into `nodes`."""
    while len(chain) < min(most, opened.depth):
        end = chain[-1] if chain else ROOT
        view = replace(
            context,
            node_tokens=[node.token for node in nodes],
            parents=[node.parent for node in nodes],
            expand=[end],
            hidden=() if nodes else context.hidden,
            noise_nodes=[len(nodes)],
        )
        began = time.perf_counter()
        [answer] = opened.proposer.propose([view])
        calls.seconds.append(time.perf_counter() - began)
        if isinstance(answer, SlipstreamError):
            raise answer
        if not isinstance(answer, Proposal) or not answer.nodes:
            break
        nodes += answer.nodes
        below = _best_below(nodes, end)
        while below != ROOT:
            chain.append(below)
            below = _best_below(nodes, below)
        if opened.hidden is not None and not opened.model.fingerprint:
            break  # it proposed its whole tree
    return [nodes[index].token for index in chain[:most]]


def _best_below(nodes: Sequence[ProposedNode], parent: int) -> int:
    children = [index for index, node in enumerate(nodes) if node.parent == parent]
    return max(children, key=lambda index: nodes[index].log_prob, default=ROOT)


def measure_cost(
    check: PairCheck,
    engine: Engine,
    greedy: list[Round],
    calls: Calls,
    rounds_of: TimedRounds,
) -> None:
    """Times passes of one session of CHUNK tokens, the least of TRIES each, and calls as `call_seconds` does."""
    counts = range(DEPTH + 1)
    with passes(engine, min(CHUNK, engine.model.max_length - DEPTH - 2), DEPTH, DEPTH) as verify:
        found = least_seconds([partial(verify, count) for count in counts], TRIES)
    check.verify_ms = {count: 1e3 * seconds for count, seconds in zip(counts, found, strict=True)}
    check.plain_ms = check.verify_ms.pop(0)
    check.draft_ms, most = 1e3 * call_seconds(rounds_of), len(calls.seconds) / calls.rounds
    for count in range(1, DEPTH + 1):
        round_ms = check.verify_ms[count] + check.draft_ms * min(count, most)
        check.speed_up[count] = mean_length(greedy, count) * check.plain_ms / round_ms


def _measure_memory(check: PairCheck, engine: Engine, opened: OpenedProposer) -> None:
    check.memory = {
        "target weights": engine.model.parameters * BYTES.get(engine.model.dtype, 2),
        "target KV of 1000 tokens": 1000 * _kv_bytes(check.target, engine.model.dtype),
    }
    if opened.model.parameters:
        check.memory["draft weights"] = opened.model.parameters * BYTES.get(opened.model.dtype, 2)
        check.memory["draft KV of 1000 tokens"] = 1000 * _kv_bytes(check.draft, opened.model.dtype)
    elif check.draft and is_local(check.draft):
        place = Path(check.draft).expanduser()
        found = [place] if place.is_file() else [each for each in place.iterdir() if each.suffix in WEIGHTS]
        check.memory["head weights"] = sum(each.stat().st_size for each in found)


def _kv_bytes(model: str, dtype: str) -> int:
    """Bytes of one token's keys and values; 0 for a model whose configuration does not say it."""
    try:
        raw = read_json(tokenizer_file(model, "config.json"))
    except SlipstreamError:
        return 0
    raw = raw.get("text_config") or raw
    heads = int(raw.get("num_attention_heads") or 0)
    size = raw.get("head_dim") or (int(raw.get("hidden_size") or 0) // heads if heads else 0)
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    return 2 * int(raw.get("num_hidden_layers") or 0) * kv_heads * int(size) * BYTES.get(dtype, 2)
