"""`slipstream doctor --target A --draft B`: whether a pair is worth serving, measured on your prompts on this machine.

The target writes a text behind each prompt, as a verifier would, and the drafter proposes for it round by round. What
it proposes is compared with the text: by the coupled rule a candidate is accepted if it is the token that the target
chose. So acceptance is what serving would have, of one chain for each round, without a server.
"""

from __future__ import annotations

import json
import statistics
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from slipstream.client.load.workload import Asked
from slipstream.engine.engine import Engine, HiddenRequest, HiddenStates, begin_unshared
from slipstream.engine.factory import open_engine
from slipstream.engine.sampler import coupled_sampling, logits_processor
from slipstream.engine.segment import Segment
from slipstream.errors import InvalidArgument, SlipstreamError
from slipstream.proposers.base import (
    ROOT,
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
from slipstream.rpc import proto_conversion
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.tokenizer.vocabulary import (
    is_local,
    load_tokenizer,
    model_folder,
    read_json,
    share_vocabulary,
    template_warning,
    tokenizer_file,
)
from training.speed import least_seconds, passes

DEPTH = 8
"""Longest chain that is tried."""
TEMPERATURES = (0.0, 1.0)
LENGTHS = (128, 512, 2048, 8192, 32768)
"""Tokens of context at which a new bucket begins."""
CHUNK = 256
TRIES = 5
FEW_ROUNDS = 8
"""Rounds below which a bucket or a slice gives no warning."""
DECAY, SHIFT, HEAT = 0.7, 0.6, 0.75
"""Shares of an acceptance length beyond 1 below which long contexts, the worst slice and high temperature are worth a
warning."""
SHORT_ANSWER = 16
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
"""What is tried where no prompts are given: a few of each kind."""


@dataclass(frozen=True, slots=True)
class Round:
    """What became of one proposal."""

    context: int
    """Committed tokens below it."""
    workload: str
    temperature: float
    proposed: int
    accepted: int


@dataclass(slots=True)
class PairCheck:
    """Everything that the command prints, in figures."""

    target: str
    draft: str
    method: str
    findings: list[tuple[str, str]] = field(default_factory=list)
    """`ok`, `warning` or `WRONG`, and a sentence."""
    by_depth: list[float] = field(default_factory=list)
    """Share of candidates accepted at each depth, where those above were; at temperature 0."""
    by_slice: dict[str, float] = field(default_factory=dict)
    """Tokens of a round, the target's own included, at temperature 0."""
    by_context: dict[str, float] = field(default_factory=dict)
    by_temperature: dict[str, float] = field(default_factory=dict)
    rounds: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes."""
    plain_ms: float = 0.0
    """One token without a drafter."""
    draft_ms: float = 0.0
    """One call of the drafter; a model is called once for each token of a chain."""
    verify_ms: dict[int, float] = field(default_factory=dict)
    """A pass of the target with so many candidates."""
    speed_up: dict[int, float] = field(default_factory=dict)
    """By draft length, for one session, with drafting and verifying one after the other."""

    @property
    def wrong(self) -> bool:
        return any(level == "WRONG" for level, _ in self.findings)

    def note(self, level: str, sentence: str) -> None:
        self.findings.append((level, sentence))


def check_pair(target: str, draft: str, method: str, prompts: Sequence[Asked], tokens: int, dtype: str) -> PairCheck:
    """Raises what opening the two raises, and InvalidArgument for a method that needs the target's own passes.
    `tokens`: of each answer."""
    if find_method(method).needs_target_passes:
        raise InvalidArgument(f"{method} drafts in the target's own passes; measure it with `slipstream bench`.")
    check = PairCheck(target, draft, method)
    engine = open_engine(target, dtype, kv_tokens=1 << 16)
    opened = open_proposer(method, ProposerSettings(model=draft, target=target, dtype=dtype))
    _check_models(check, engine, opened)
    if check.wrong:
        return check
    tokenizer = load_tokenizer(target)
    texts = [(asked, list(tokenizer.encode(asked.prompt).ids)) for asked in prompts]
    rounds: list[Round] = []
    calls = _Calls()
    lengths: list[int] = []
    for temperature in TEMPERATURES:
        for seed, (asked, prompt) in enumerate(texts):
            sampling = SamplingParams(temperature=temperature, seed=seed)
            text, states = write_text(engine, prompt, asked.max_tokens or tokens, sampling, opened.hidden)
            lengths.append(len(text) - len(prompt))
            rounds += run_rounds(opened, text, len(prompt), states, sampling, asked.workload or "all", calls)
    _summarise(check, rounds)
    _measure_cost(check, engine, [each for each in rounds if not each.temperature], calls)
    _measure_memory(check, engine, opened)
    _warn(check, rounds, lengths, engine)
    return check


def _check_models(check: PairCheck, engine: Engine, opened: OpenedProposer) -> None:
    target, draft = proto_conversion.model_to_proto(engine.model), proto_conversion.model_to_proto(opened.model)
    if not share_vocabulary(draft, target):
        check.note("WRONG", f"vocabulary: {draft.name} and {target.name} have different ones; choose a pair with one "
                   "tokenizer, or set DRAFTER_TRANSLATE_FOR.")  # fmt: skip
        return
    size = f"{target.vocabulary_size} tokens"
    check.note("ok", f"vocabulary: {size}, " + ("shared" if draft.vocabulary_fingerprint else "the method has none"))
    warning = template_warning(draft, target)
    check.note("warning" if warning else "ok", f"chat template: {warning or 'nothing differs'}")
    longest, known = target.max_length, min(draft.max_length, _trained_length(check.draft) or draft.max_length)
    if known < longest:
        check.note("warning", f"context: the target takes {longest} tokens, the drafter {known}: beyond, it proposes "
                   "nothing, or badly.")  # fmt: skip
    else:
        check.note("ok", f"context: both take the target's {longest} tokens")


def _trained_length(draft: str) -> int:
    """What a head's configuration says of the contexts that it was made for; 0 where it says nothing."""
    if not draft or not is_local(draft) or not (model_folder(draft) / "config.json").is_file():
        return 0
    found = read_json(model_folder(draft) / "config.json")
    return int((found.get("transformer_layer_config") or found).get("max_position_embeddings") or 0)


@torch.inference_mode()
def write_text(
    engine: Engine, prompt: list[int], tokens: int, sampling: SamplingParams, need: HiddenNeed | None
) -> tuple[list[int], HiddenStates | None]:
    """What the target writes behind the prompt, and the hidden states of all tokens but the last where they are needed.

    Raises ResourceExhausted for a text that has no room, Internal for broken numbers.
    """
    text = list(prompt)
    sequence = begin_unshared(engine, len(prompt) + tokens)
    request = None if need is None else HiddenRequest(need.layers)
    parts: list[HiddenStates] = []
    try:
        while len(text) < len(prompt) + tokens:
            pending = text[sequence.length : sequence.length + CHUNK]
            segment = Segment(sequence, pending, want_logits=sequence.length + len(pending) == len(text))
            output = engine.forward([segment]) if request is None else engine.forward([segment], request)
            engine.keep(segment, [])
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
        engine.close(sequence)
    return text, HiddenStates.join(parts) if parts else None


@dataclass(slots=True)
class _Calls:
    """Calls of the proposer, and the rounds that they were made for."""

    count: int = 0
    seconds: float = 0.0
    rounds: int = 0


def run_rounds(
    opened: OpenedProposer,
    text: list[int],
    prompt_length: int,
    states: HiddenStates | None,
    sampling: SamplingParams,
    workload: str,
    calls: _Calls,
) -> Iterator[Round]:
    """Rounds over the text behind its prompt. Raises the error with which the proposer gives the sequence up."""
    handle, length, given = object(), prompt_length, 0
    while length < len(text):
        hidden: tuple[HiddenRows, ...] = ()
        if states is not None and length - 1 > given:
            hidden = (HiddenRows(given, states.cut(given, length - 1)),)
            given = length - 1
        context = ProposerContext(handle, text, length, prompt_length, len(text) + DEPTH, sampling, hidden=hidden)
        chain = likeliest_chain(opened, context, calls)
        right = 0
        while right < len(chain) and length + right < len(text) and chain[right] == text[length + right]:
            right += 1
        calls.rounds += 1
        tried = min(len(chain), len(text) - length)
        yield Round(length, workload, sampling.temperature, tried, right)
        length += right + 1
    opened.proposer.close_sequence(handle)


def likeliest_chain(opened: OpenedProposer, context: ProposerContext, calls: _Calls) -> list[int]:
    """The first child of every node from the root down, up to DEPTH: a method that proposes level by level is called
    once for each."""
    nodes: list[ProposedNode] = []
    chain: list[int] = []
    """Indices into `nodes`."""
    while len(chain) < min(DEPTH, opened.depth):
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
        calls.count, calls.seconds = calls.count + 1, calls.seconds + time.perf_counter() - began
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
    return [nodes[index].token for index in chain[:DEPTH]]


def _best_below(nodes: Sequence[ProposedNode], parent: int) -> int:
    children = [index for index, node in enumerate(nodes) if node.parent == parent]
    return max(children, key=lambda index: nodes[index].log_prob, default=ROOT)


def _length(rounds: Sequence[Round], most: int = DEPTH) -> float:
    """Tokens of a round, with chains of at most `most` candidates."""
    return 1.0 + sum(min(each.accepted, most) for each in rounds) / len(rounds)


def _bucket(context: int) -> str:
    at = bisect_right(LENGTHS, context)
    low = LENGTHS[at - 1] if at else 0
    return f"{low}-{LENGTHS[at] - 1}" if at < len(LENGTHS) else f"{low}+"


def _summarise(check: PairCheck, rounds: list[Round]) -> None:
    greedy = [each for each in rounds if not each.temperature]
    check.rounds = len(greedy)
    for depth in range(DEPTH):
        tried = [each for each in greedy if each.proposed > depth and each.accepted >= depth]
        if len(tried) < FEW_ROUNDS // 2:
            break
        check.by_depth.append(sum(each.accepted > depth for each in tried) / len(tried))
    slices: dict[str, list[Round]] = defaultdict(list)
    contexts: dict[str, list[Round]] = defaultdict(list)
    for each in sorted(greedy, key=lambda each: each.context):
        slices[each.workload].append(each)
        contexts[_bucket(each.context)].append(each)
    check.by_slice = {name: _length(some) for name, some in slices.items()}
    check.by_context = {name: _length(some) for name, some in contexts.items()}
    for temperature in TEMPERATURES:
        if some := [each for each in rounds if each.temperature == temperature]:
            check.by_temperature[f"{temperature:g}"] = _length(some)


def _measure_cost(check: PairCheck, engine: Engine, greedy: list[Round], calls: _Calls) -> None:
    """Times passes of one session of CHUNK tokens, the least of TRIES each."""
    counts = range(DEPTH + 1)
    with passes(engine, min(CHUNK, engine.model.max_length - DEPTH - 2), DEPTH, DEPTH) as verify:
        found = least_seconds([partial(verify, count) for count in counts], TRIES)
    check.verify_ms = {count: 1e3 * seconds for count, seconds in zip(counts, found, strict=True)}
    check.plain_ms = check.verify_ms.pop(0)
    check.draft_ms, most = 1e3 * calls.seconds / calls.count, calls.count / calls.rounds
    for count in range(1, DEPTH + 1):
        round_ms = check.verify_ms[count] + check.draft_ms * min(count, most)
        check.speed_up[count] = _length(greedy, count) * check.plain_ms / round_ms


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


def _warn(check: PairCheck, rounds: list[Round], lengths: list[int], engine: Engine) -> None:
    best = max(check.speed_up, key=lambda count: check.speed_up[count])
    gain = check.speed_up[best]
    check.note(
        "ok" if gain > 1.05 else "warning",
        f"speed: {gain:.2f} times plain decoding with {best} candidates a round, one session on this machine"
        + ("" if gain > 1.05 else "; speculation hardly pays here, and the verifier will do without"),
    )
    cold, hot = check.by_temperature.get("0", 1.0) - 1.0, check.by_temperature.get("1", 1.0) - 1.0
    if cold and hot < HEAT * cold:
        check.note("warning", f"temperature: a round accepts {hot:.1f} candidates at temperature 1, {cold:.1f} at 0.")
    if statistics.median(lengths) < SHORT_ANSWER:
        half = f"{statistics.median(lengths):.0f}"
        check.note("warning", f"short outputs: half of the answers have at most {half} tokens: their time is prefill.")
    greedy = [each for each in rounds if not each.temperature]
    for kind, found, share, what in (
        ("long context", check.by_context, DECAY, "acceptance decays with the context"),
        ("domain shift", check.by_slice, SHIFT, "the drafter knows some of your work far less"),
    ):
        counts: dict[str, int] = defaultdict(int)
        for each in greedy:
            counts[_bucket(each.context) if kind == "long context" else each.workload] += 1
        known = {name: length - 1.0 for name, length in found.items() if counts[name] >= FEW_ROUNDS}
        if len(known) < 2:
            continue
        top = next(iter(known)) if kind == "long context" else max(known, key=lambda name: known[name])
        worst = min(known, key=lambda name: known[name])
        if known[worst] < share * known[top]:
            check.note("warning", f"{kind}: {what}: {known[worst]:.1f} candidates a round in {worst}, "
                       f"{known[top]:.1f} in {top}.")  # fmt: skip
    longest = max((each.context for each in rounds), default=0)
    if longest < engine.model.max_length // 4:
        whole = engine.model.max_length
        check.note("warning", f"long context: the prompts reach {longest} of {whole} tokens; acceptance may decay "
                   "beyond them: give --prompts as long as your users'.")  # fmt: skip


def render(check: PairCheck) -> str:
    """One screen."""
    lines = [
        f"{check.target} + {check.draft or 'nothing'} ({check.method}), {check.rounds} rounds at temperature 0",
        "",
    ]
    lines += [f"{level:<8}{sentence}" for level, sentence in check.findings]
    if check.rounds:
        lines += ["", "accepted by depth      " + "  ".join(f"{share:.0%}" for share in check.by_depth)]
        for name, found in (
            ("tokens a round, slice", check.by_slice),
            ("  by context", check.by_context),
            ("  by temperature", check.by_temperature),
        ):
            lines.append(f"{name:<23}" + "  ".join(f"{key} {value:.2f}" for key, value in found.items()))
        lines.append(
            f"{'time':<23}plain {check.plain_ms:.1f} ms, draft {check.draft_ms:.1f} ms a call, with candidates "
            + "  ".join(f"{count}: {took:.1f}" for count, took in check.verify_ms.items())
        )
        speeds = "  ".join(f"{count}: {gain:.2f}" for count, gain in check.speed_up.items())
        lines.append(f"{'speed-up':<23}{speeds}")
    lines.append(f"{'memory':<23}" + "  ".join(f"{name} {_size(count)}" for name, count in check.memory.items()))
    return "\n".join(lines)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def as_json(check: PairCheck) -> str:
    return json.dumps(asdict(check), indent=2)
