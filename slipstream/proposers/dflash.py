"""Propose with DFlash's block drafter: one pass for all sessions gives each the tokens of a whole block.

What the target's layers say of the text becomes keys and values once, as its tokens are committed, and stays; a block's
own rows are of one pass. Each row of a block is a distribution by itself (`parallel_drafting`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slipstream.engine.devices import find_device
from slipstream.engine.engine import HiddenStates
from slipstream.engine.models.fast_dtype import dtype_on
from slipstream.proposers.base import (
    HiddenNeed,
    OpenedProposer,
    Proposal,
    ProposerContext,
    ProposerSettings,
    any_vocabulary,
)
from slipstream.proposers.dflash_head import DflashHead, load_dflash
from slipstream.proposers.draft_cache import PairReader
from slipstream.proposers.head_file import read_target
from slipstream.proposers.parallel_drafting import ParallelProposer, expected_ranks

EXPECTED = 0.75, 0.08
"""Accuracy of rank 0 and of rank 1 of every row, where those before it were right, that an unknown drafter is believed
to have."""
TRIED_EVERY = 8
"""Tokens between the roots on which a drafter is tried at the start."""


class DflashProposer(ParallelProposer):
    """Proposes for sequences whose hidden states came up to that of the token before the last."""

    def __init__(
        self, head: DflashHead, *, width: int = 4, proposal_tokens: int = 32, most_tokens: int = 65_536
    ) -> None:
        expected = [expected_ranks(*EXPECTED)] * (head.config.block - 1)
        super().__init__(expected, width=width, proposal_tokens=proposal_tokens)
        self._head = head
        self._reader = PairReader(most_tokens)
        self.passes = 0
        """Passes over blocks so far."""

    def _read(self, contexts: list[ProposerContext]) -> list[tuple[Proposal, bool]]:
        answers, new = self._reader.read(contexts)
        for each in new:
            each.cache.append(*self._head.context(each.states, each.cache.end))
            each.cache.length = each.cache.used
        read = []
        for context, answer in zip(contexts, answers, strict=True):
            cache = self._reader.cache(context.handle)
            whole = bool(cache.length) and cache.end == context.length - 1
            read.append((answer, whole and not answer.no_room))
        return read

    def _compute(self, contexts: list[ProposerContext]) -> list[Tensor]:
        self.passes += 1
        texts = [self._reader.cache(context.handle).rows() for context in contexts]
        roots = [context.tokens[context.length - 1] for context in contexts]
        numbers = [context.length - 1 for context in contexts]
        place = self._head.fc.weight.device
        found = self._head(
            torch.tensor(roots, device=place), torch.tensor(numbers, device=place), attend_texts(texts, self._head)
        )
        return list(found)

    def close_sequence(self, handle: Hashable) -> None:
        self._reader.close(handle)
        super().close_sequence(handle)


def attend_texts(
    texts: list[tuple[Tensor, Tensor]], head: DflashHead
) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """Attention of blocks, each over its own text (keys and values of `DflashHead.context`) and its own rows."""
    block, heads = head.config.block, head.config.layer.num_key_value_heads

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        found = []
        for number, text in enumerate(texts):
            own = slice(number * block, (number + 1) * block)
            seen_keys, seen_values = (
                torch.cat((before[layer * heads : (layer + 1) * heads], new[0, :, own]), dim=1)[None]
                for before, new in zip(text, (keys, values), strict=True)
            )
            found.append(scaled_dot_product_attention(queries[:, :, own], seen_keys, seen_values, enable_gqa=True))
        return torch.cat(found, dim=2)

    return attend


def one_step_accuracy(head: DflashHead) -> Callable[[list[int], HiddenStates, list[int]], float]:
    """Measures how well a drafter's first row follows the target, behind some tokens: see `OpenedProposer.accuracy`."""

    @torch.inference_mode()
    def accuracy(tokens: list[int], states: HiddenStates, chosen: list[int]) -> float:
        keys, values = head.context(states, 0)
        roots = list(range(1, len(tokens), TRIED_EVERY))
        place = keys.device
        found = head(
            torch.tensor([tokens[root] for root in roots], device=place),
            torch.tensor(roots, device=place),
            attend_texts([(keys[:, :root], values[:, :root]) for root in roots], head),
        )
        best: list[int] = found[:, 0].argmax(-1).tolist()
        return sum(token == chosen[root] for token, root in zip(best, roots, strict=True)) / len(roots)

    return accuracy


def open_proposer(settings: ProposerSettings) -> OpenedProposer:
    """The method `dflash` for `settings.target`. Raises what `load_dflash` raises."""
    target, place = read_target(settings.target), find_device(settings.device)
    head = load_dflash(settings.model, target, dtype_on(place, target.output.dtype)).to(place)
    proposer = DflashProposer(
        head, width=settings.width, proposal_tokens=settings.proposal_tokens, most_tokens=settings.kv_tokens
    )
    layers = {number for number in head.config.layers if number < target.layer_count}
    need = HiddenNeed(tuple(sorted(layers)), every_row=True)
    return OpenedProposer(any_vocabulary("dflash"), proposer, need, head.config.block - 1, one_step_accuracy(head))
