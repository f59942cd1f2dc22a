"""What a step computes, to be compared between two devices: logits, decisions and guesses."""

from __future__ import annotations

import torch

from slipstream.engine.sampler import coupled_sampling, draft_draws
from slipstream.engine.sampler.token_history import TokenHistory
from slipstream.engine.torch_engine import TorchEngine
from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.speculation.selection import Selection
from tests.support.packed_passes import TREE, Session, prompt
from verifier_svc.acceptance.judge import VerifyInput, judge
from verifier_svc.acceptance.result import AcceptanceResult, BrokenNumbers


def steps(engine: TorchEngine) -> list[torch.Tensor]:
    """Logits of a prefill, of trees, and of what comes after an accepted path."""
    first, second = (Session(engine.kv.begin_unshared(64), prompt(length, length)) for length in (20, 9))
    logits = [engine.forward([first.segment(), second.segment()]).logits]
    for session in (first, second):
        engine.kv.keep(session.step, [])
        session.tokens.append(5)
        session.written = session.sequence.length
    logits.append(engine.forward([first.segment(parents=TREE), second.segment()]).logits)
    engine.kv.keep(first.step, [1, 4])
    first.tokens += [1, 2, 3]
    first.written = first.sequence.length
    logits.append(engine.forward([first.segment()]).logits)
    for session in (first, second):
        engine.kv.close(session.sequence)
    return logits


SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias={5: 3.0}),
    SamplingParams(seed=3),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.9, seed=4),
    SamplingParams(temperature=1.4, top_p=0.95, min_p=0.01, seed=5),
    SamplingParams(presence_penalty=0.4, frequency_penalty=0.2, seed=9),
    SamplingParams(temperature=1e-38, seed=3),
    SamplingParams(seed=5, acceptance="rejection"),
    SamplingParams(temperature=0.0, acceptance="rejection"),
]


def random_logits() -> torch.Tensor:
    """[3 rows of each sampling, 1000]"""
    return 3 * torch.randn(3 * len(SAMPLINGS), 1000, generator=torch.Generator().manual_seed(3))


def judged(logits: torch.Tensor) -> list[AcceptanceResult | BrokenNumbers]:
    """Two candidates of a session of each sampling."""
    history = TokenHistory([1, 2, 3])
    history.append([7, 8, 7])
    proposals = (None, DraftDistribution((9, 11), (40000, 20000)))
    selection = Selection((4, 9), (-1, 0), (1, 2), (-0.1, -0.1), (-0.1, -0.2), proposals)
    cases = [VerifyInput(selection, 3 * index, sampling, 6, history) for index, sampling in enumerate(SAMPLINGS)]
    return judge(cases, logits)


def guesses(logits: torch.Tensor) -> list[list[list[int]]]:
    """Behind four rows: ranked tokens, distributions, and tokens drawn from them."""
    greedy, seeds, places = [True, False, False, True], [1, 2, 3, 4], [5, 6, 7, 8]
    tokens, _ = coupled_sampling.rank(logits, greedy, seeds, places, 3, 1.5)
    ids, weights = draft_draws.quantise(logits, 16)
    weights[greedy, 1:] = 0  # as a drafter does for greedy sessions under a ratio rule
    drawn = draft_draws.draw(ids, weights, seeds, places, 3)
    return [tensor.tolist() for tensor in (tokens, ids, weights, drawn)]
