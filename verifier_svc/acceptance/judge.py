"""Runs the acceptance rules of one step: logits and candidates of all sessions go in, one result for each comes out.

The rules run in lockstep, with one batched call for each level of the trees that some session still visits. Greedy
sessions without penalties, bias or grammar need no levels: their choices are known for all rows at once.

The embedded engine's tokens are decided here. vLLM's are decided in its own step (`execution.vllm.step_sampler`): the
same rules along a chain, in batched torch calls or fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.engine.devices import download, upload
from slipstream.engine.sampler import coupled_sampling
from slipstream.engine.sampler.logits_processor import SampledRow, process
from slipstream.engine.sampler.token_history import TokenHistory
from slipstream.errors import SlipstreamError
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.speculation.selection import ROOT, Selection
from slipstream.tokenizer.grammar import Mask
from verifier_svc.acceptance.coupled import coupled
from verifier_svc.acceptance.rejection import KeyedRandomness, rejection
from verifier_svc.acceptance.result import AcceptanceResult, BrokenNumbers, Choose, FloatArray, Request, Rule
from verifier_svc.acceptance.typical import typical


class Masks(Protocol):
    """A grammar at the end of a session's prefix."""

    def after(self, path: tuple[int, ...]) -> Mask | None:
        """The tokens that may follow the prefix and this path; None where all may. Raises FailedPrecondition where the
        grammar cannot be followed."""
        ...


class VerifyInput(NamedTuple):
    """One session's share of a step. The logits after the prefix stand in row `first_row`, those after node i in
    `first_row + 1 + i`."""

    selection: Selection
    first_row: int
    sampling: SamplingParams
    position: int
    """Index of the token after the prefix: the length of the prefix."""
    history: TokenHistory | None = None
    """The committed tokens; needed only where `sampling.penalised`."""
    grammar: Masks | None = None
    """Where the output is structured."""


RULES: Mapping[str, Callable[[VerifyInput], Rule]] = MappingProxyType(
    {
        "coupled": lambda case: coupled(case.selection),
        "rejection": lambda case: rejection(case.selection, KeyedRandomness(case.sampling.seed, case.position)),
        "typical": lambda case: typical(case.selection),
    }
)


@dataclass(slots=True)
class _Walk:
    case: VerifyInput
    rule: Rule
    request: Request
    outcome: AcceptanceResult | BrokenNumbers | None = None

    def fail(self, error: SlipstreamError | None = None) -> None:
        self.rule.close()
        self.outcome = BrokenNumbers(self.request.node, error)

    def send(self, answer: int | FloatArray) -> None:
        try:
            self.request = self.rule.send(answer)
        except StopIteration as stop:
            self.outcome = stop.value


def judge(cases: Sequence[VerifyInput], logits: Tensor) -> list[AcceptanceResult | BrokenNumbers]:
    """Decides every case. logits: raw float32 [rows, V] of the whole step. Rows that no rule visits do not
    influence the results; their argmax may be computed."""
    outcomes: list[AcceptanceResult | BrokenNumbers | None] = [None] * len(cases)
    simple = [index for index, case in enumerate(cases) if _argmax_known(case)]
    for index, outcome in zip(simple, _follow([cases[index] for index in simple], logits), strict=True):
        outcomes[index] = outcome
    walks = {index: _start(case) for index, case in enumerate(cases) if outcomes[index] is None}
    active = list(walks.values())
    while active:
        _level(active, logits)
        active = [walk for walk in active if walk.outcome is None]
    for index, walk in walks.items():
        outcomes[index] = walk.outcome
    return [outcome for outcome in outcomes if outcome is not None]


def _argmax_known(case: VerifyInput) -> bool:
    """Whether the choices are the argmax of raw logits, whatever was accepted before."""
    sampling = case.sampling
    raw = case.grammar is None and not sampling.adjusted
    return raw and sampling.greedy and not sampling.drawn


def _follow(cases: Sequence[VerifyInput], logits: Tensor) -> list[AcceptanceResult | BrokenNumbers]:
    """Cases whose choices need no walk to be known: the argmax of all their rows, then each rule in one go."""
    if not cases:
        return []
    spans = [(case.first_row, case.first_row + 1 + len(case.selection)) for case in cases]
    if sum(stop - start for start, stop in spans) == len(logits):
        choices = coupled_sampling.likeliest(logits)
    else:
        rows = [row for start, stop in spans for row in range(start, stop)]
        choices = [-1] * len(logits)
        likeliest = coupled_sampling.likeliest(logits[upload(torch.tensor(rows), logits.device)])
        for row, token in zip(rows, likeliest, strict=True):
            choices[row] = token
    return [_walked(case.selection, choices[start:stop]) for case, (start, stop) in zip(cases, spans, strict=True)]


def _walked(selection: Selection, choices: Sequence[int]) -> AcceptanceResult | BrokenNumbers:
    """The coupled rule without the ceremony. choices: after the prefix, then after each node; -1 where a row is
    broken."""
    if not len(selection):
        return AcceptanceResult((), choices[0]) if choices[0] >= 0 else BrokenNumbers(ROOT)
    rule = coupled(selection)
    request = next(rule)
    while (token := choices[1 + request.node]) >= 0:
        try:
            request = rule.send(token)
        except StopIteration as stop:
            result: AcceptanceResult = stop.value
            return result
    return BrokenNumbers(request.node)


def _start(case: VerifyInput) -> _Walk:
    rule = RULES[case.sampling.acceptance](case)
    return _Walk(case, rule, next(rule))


def _level(walks: list[_Walk], logits: Tensor) -> None:
    """Answers one request of each walk."""
    walks, rows = _rows(walks)
    if not walks:
        return
    index = upload(torch.tensor([walk.case.first_row + 1 + walk.request.node for walk in walks]), logits.device)
    processed = process(logits[index].float(), rows)
    # Rows that want a distribution take part in `choose` as greedy ones: that finds the broken among them, and the
    # argmax.
    chooses = [isinstance(walk.request, Choose) for walk in walks]
    tokens, broken = coupled_sampling.choose(
        processed,
        [walk.case.sampling.greedy or not chosen for walk, chosen in zip(walks, chooses, strict=True)],
        [walk.case.sampling.seed for walk in walks],
        [walk.case.position + walk.case.selection.depth(walk.request.node) for walk in walks],
    )
    tokens, broken = download(tokens, broken)
    answers = zip(walks, chooses, tokens.tolist(), broken.tolist(), processed, strict=True)
    for walk, chosen, token, is_broken, row in answers:
        if is_broken:
            walk.fail()
        else:
            walk.send(token if chosen else _distribution(row, token, walk.case.sampling.greedy))


def _rows(walks: list[_Walk]) -> tuple[list[_Walk], list[SampledRow]]:
    """Rows of the walks, without those whose grammar cannot be followed there."""
    rows = list[SampledRow]()
    going = list[_Walk]()
    for walk in walks:
        try:
            rows.append(_row(walk))
            going.append(walk)
        except SlipstreamError as error:
            walk.fail(error)
    return going, rows


def _row(walk: _Walk) -> SampledRow:
    case = walk.case
    needed = case.sampling.penalised or case.grammar is not None
    path = case.selection.path(walk.request.node) if needed else ()
    return SampledRow(case.sampling, case.history, path, None if case.grammar is None else case.grammar.after(path))


def _distribution(logits: Tensor, likeliest: int, greedy: bool) -> FloatArray:
    """Processed logits [V] -> p as float64 [V]; one-hot at temperature 0."""
    if greedy:
        one_hot = torch.zeros(len(logits), dtype=torch.float64)
        one_hot[likeliest] = 1.0
        return one_hot.numpy()
    return logits.double().softmax(dim=-1).cpu().numpy()
