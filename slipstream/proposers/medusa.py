"""Propose with Medusa's heads: all depths at once from the hidden state that the last token was chosen from.

A pass costs some small matrices and the heads' outputs, and reads no text: nothing is prefilled, and no KV is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from slipstream.engine.devices import find_device
from slipstream.engine.engine import HiddenStates
from slipstream.errors import NotFound
from slipstream.proposers.base import (
    HiddenNeed,
    OpenedProposer,
    Proposal,
    ProposerContext,
    ProposerSettings,
    any_vocabulary,
)
from slipstream.proposers.medusa_heads import MedusaHeads, load_heads
from slipstream.proposers.parallel_drafting import RANKS, ParallelProposer, expected_ranks, falling
from slipstream.tokenizer.vocabulary import model_folder, read_json

PUBLISHED = ((0.56, 0.1), (0.32, 0.09), (0.2, 0.07), (0.15, 0.05), (0.12, 0.04))
"""Accuracy of rank 0 and of rank 1 of the five heads of the published 7 B model: what is expected of unknown heads."""


class MedusaProposer(ParallelProposer):
    """Proposes for sequences whose newest hidden state is that of the token before the last."""

    def __init__(
        self,
        heads: MedusaHeads,
        *,
        expected: Sequence[Sequence[float]],
        width: int,
        proposal_tokens: int,
    ) -> None:
        super().__init__(expected, width=width, proposal_tokens=proposal_tokens)
        self._heads = heads
        self._states: dict[Hashable, tuple[int, Tensor]] = {}
        """The newest hidden state [hidden] of each sequence, behind the number of its token."""

    def _read(self, contexts: list[ProposerContext]) -> list[tuple[Proposal, bool]]:
        read = []
        for context in contexts:
            for rows in context.hidden:
                self._states[context.handle] = rows.end - 1, rows.states.last[-1]
            token = self._states[context.handle][0] if context.handle in self._states else -1
            read.append((Proposal([], context.length), token >= 0 and token == context.length - 2))
        return read

    def _compute(self, contexts: list[ProposerContext]) -> list[Tensor]:
        logits = self._heads.logits(torch.stack([self._states[context.handle][1] for context in contexts]))
        return [logits[:, row] for row in range(len(contexts))]

    def close_sequence(self, handle: Hashable) -> None:
        self._states.pop(handle, None)
        super().close_sequence(handle)


def one_step_accuracy(heads: MedusaHeads) -> Callable[[list[int], HiddenStates, list[int]], float]:
    """Measures how well the first head follows the target: see `OpenedProposer.accuracy`. It does not see the token
    that was chosen in between, so that it counts where its best RANKS hold the next one."""

    @torch.inference_mode()
    def accuracy(tokens: list[int], states: HiddenStates, chosen: list[int]) -> float:
        best = heads.logits(states.last[:-1])[0].topk(RANKS).indices.cpu()
        return float((best == torch.tensor(chosen[1:])[:, None]).any(-1).float().mean())

    return accuracy


def open_proposer(settings: ProposerSettings) -> OpenedProposer:
    """The method `medusa` for `settings.target`. Raises what `load_heads` raises."""
    heads = load_heads(settings.model, settings.target).on(find_device(settings.device))
    proposer = MedusaProposer(
        heads,
        expected=_expected(settings.model, len(heads)),
        width=settings.width,
        proposal_tokens=settings.proposal_tokens,
    )
    return OpenedProposer(any_vocabulary("medusa"), proposer, HiddenNeed(), len(heads), one_step_accuracy(heads))


def expected_accuracy(depths: int) -> list[list[float]]:
    """[depths][RANKS] accuracies of published heads."""
    return [expected_ranks(*PUBLISHED[min(depth, len(PUBLISHED) - 1)]) for depth in range(depths)]


def _expected(name: str, heads: int) -> list[list[float]]:
    """Accuracies that training measured (`medusa_rank_accuracy`), else those of published heads."""
    measured: object = None
    with contextlib.suppress(NotFound, OSError):  # heads may be a file alone
        measured = read_json(model_folder(name) / "config.json").get("medusa_rank_accuracy")
    if isinstance(measured, list) and len(measured) >= heads:
        return [falling([float(each) for each in ranks[:RANKS]]) for ranks in measured[:heads]]
    return expected_accuracy(heads)
