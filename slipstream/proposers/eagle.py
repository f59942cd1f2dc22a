"""Propose with EAGLE's draft layer, which goes on where the target's hidden states end.

The layer reads the committed text once, with the target's hidden states, and keeps its keys and values. Under the
coupled rule one call proposes a whole tree as EAGLE-2 does (Li et al. 2024, arXiv 2406.16858): pass by pass the
candidates with the likeliest paths are expanded, and the likeliest of all are proposed. Under `rejection` tokens are
drawn, one level for each call. All sessions share every pass.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from slipstream.engine.devices import find_device, upload
from slipstream.engine.engine import HiddenStates
from slipstream.engine.models.fast_dtype import dtype_on
from slipstream.errors import SlipstreamError
from slipstream.proposers.base import (
    ROOT,
    HiddenNeed,
    OpenedProposer,
    Proposal,
    ProposedNode,
    ProposerContext,
    ProposerSettings,
    any_vocabulary,
)
from slipstream.proposers.eagle_checkpoint import load_head
from slipstream.proposers.eagle_head import EagleHead
from slipstream.proposers.head_file import read_target
from slipstream.proposers.node_choice import NodeChooser, Place
from slipstream.proposers.packed_linear import pack
from slipstream.proposers.pair_cache import PairCache, PairReader, Path

PASSES = 7
"""Passes of the draft layer for one tree, after the one that reads the committed tokens."""
TREE = 32
"""Candidates that one call proposes; which of them pay, the verifier decides."""
LEAST = math.log(0.002)
"""Path log-probability below which a candidate is not worth a place in a pass, however cheap the target's rows are."""


@dataclass(slots=True)
class _Part:
    """One text's rows of a pass: pairs of its text, or candidates."""

    cache: PairCache
    tokens: list[int]
    hidden: Tensor
    """[rows, width]."""
    paths: list[Path] = field(default_factory=list)
    """Paths of candidates; empty for pairs of the text."""


@dataclass(slots=True)
class _Growing:
    """A tree that grows pass by pass."""

    index: int
    """Index of its context in the call."""
    context: ProposerContext
    cache: PairCache
    nodes: list[ProposedNode] = field(default_factory=list)
    """Parents before children; a parent's index is one into this list."""
    scores: list[float] = field(default_factory=list)
    """Path log-probabilities."""
    depths: list[int] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [ROOT])
    """Nodes to propose below."""
    error: SlipstreamError | None = None

    def view(self) -> ProposerContext:
        """The context with the tree as it is now."""
        return replace(
            self.context,
            node_tokens=[node.token for node in self.nodes],
            parents=[node.parent for node in self.nodes],
            expand=self.frontier,
            noise_nodes=[0] * len(self.frontier),
        )

    def add(self, nodes: Sequence[ProposedNode], width: int) -> None:
        """Adds a level, and makes its likeliest candidates the frontier."""
        first = len(self.nodes)
        for node in nodes:
            above = node.parent
            self.scores.append(node.log_prob + (self.scores[above] if above != ROOT else 0.0))
            self.depths.append(1 + (self.depths[above] if above != ROOT else 0))
            self.nodes.append(node)
        deepest, least = self.context.max_length - self.context.length, LEAST
        if (deeper := self.context.deeper) is not None:  # relative to the root, as the scores are
            deepest = min(deepest, deeper.levels + 1)
            least = max(least, deeper.least_log_prob - deeper.path_log_probs[self.context.expand.index(ROOT)])
        worth = [at for at in range(first, len(self.nodes)) if self.scores[at] >= least and self.depths[at] < deepest]
        self.frontier = heapq.nlargest(width, worth, key=lambda at: self.scores[at])

    def best(self, size: int) -> list[ProposedNode]:
        """The `size` likeliest, parents before children."""
        taken = sorted(heapq.nsmallest(size, range(len(self.nodes)), key=lambda at: (-self.scores[at], at)))
        first = len(self.context.node_tokens)
        place = {ROOT: ROOT} | {at: first + number for number, at in enumerate(taken)}
        return [self.nodes[at]._replace(parent=place[self.nodes[at].parent]) for at in taken]


class EagleProposer:
    """Proposes for sequences whose hidden states came up to that of the token before the last."""

    def __init__(self, head: EagleHead, *, width: int = 4, proposal_tokens: int = 32, most_pairs: int = 65_536) -> None:
        self._head, self._width = head, width
        self._chooser = NodeChooser(width, proposal_tokens)
        self._reader = PairReader(most_pairs)
        self.passes = 0
        """Passes of the draft layer so far."""

    @torch.inference_mode()
    def propose(self, contexts: list[ProposerContext]) -> list[Proposal | SlipstreamError]:
        answers = self._read(contexts)
        growing: list[_Growing] = []
        for index, (context, answer) in enumerate(zip(contexts, answers, strict=True)):
            cache = self._reader.cache(context.handle)
            whole = cache.end == context.length - 1 and () in cache.states
            if whole and context.expand and isinstance(answer, Proposal) and not answer.no_room:
                growing.append(_Growing(index, context, cache))
        self._draw([each for each in growing if each.context.sampling.drawn], answers)
        trees = [each for each in growing if not each.context.sampling.drawn and ROOT in each.context.expand]
        for number in range(PASSES + 1):
            self._grow(trees, last=number == PASSES)
        for tree in trees:
            size = min(TREE, tree.context.max_nodes)
            levels = max(tree.depths, default=1)
            answers[tree.index] = tree.error or Proposal(tree.best(size), tree.context.length, levels=levels)
        return answers

    def close_sequence(self, handle: Hashable) -> None:
        self._reader.close(handle)
        self._chooser.close_sequence(handle)

    def _read(self, contexts: list[ProposerContext]) -> list[Proposal | SlipstreamError]:
        """One pass over the pairs of committed tokens that are new; empty proposals."""
        answers, new = self._reader.read(contexts)
        self._compute([_Part(each.cache, each.tokens, fuse(self._head, each.states)) for each in new])
        return list(answers)

    def _compute(self, parts: list[_Part]) -> None:
        """One pass over all parts; the states of candidates and of each text's last pair are kept."""
        if not parts:
            return
        self.passes += 1
        device, window = parts[0].hidden.device, self._head.config.window
        bounds = [0]
        positions: list[int] = []
        masks: list[Tensor] = []
        for part in parts:
            cache, count = part.cache, len(part.tokens)
            bounds.append(bounds[-1] + count)
            if part.paths:
                positions += [cache.end - 1 + len(path) for path in part.paths]
                masks.append(upload(cache.candidate_mask(part.paths, window), device))
            else:
                positions += range(cache.end, cache.end + count)
                masks.append(upload(cache.text_mask(count, window), device))

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            rows = [
                part.cache.attend(queries[0, :, low:high], keys[0, :, low:high], values[0, :, low:high], mask)
                for part, low, high, mask in zip(parts, bounds, bounds[1:], masks, strict=False)
            ]
            return torch.cat(rows, dim=1)[None]

        tokens = upload(torch.tensor([[token for part in parts for token in part.tokens]]), device)
        hidden = torch.cat([part.hidden for part in parts])[None]
        states = self._head(tokens, hidden, upload(torch.tensor([positions]), device), attend)[0]
        for part, low, high in zip(parts, bounds, bounds[1:], strict=False):
            cache = part.cache
            if part.paths:
                cache.slots |= {path: cache.used - (high - low) + at for at, path in enumerate(part.paths)}
                cache.states |= dict(zip(part.paths, states[low:high], strict=True))
            else:
                cache.length = cache.used
                cache.states[()] = states[high - 1].clone()

    def _states(self, wanted: list[tuple[PairCache, Path]]) -> Tensor:
        """[wanted, width] states of these paths; what was not computed is, level by level."""
        for depth in range(1, 1 + max((len(path) for _, path in wanted), default=0)):
            missing: dict[int, tuple[PairCache, dict[Path, None]]] = {}
            for cache, path in wanted:
                if len(path) >= depth and path[:depth] not in cache.states:
                    missing.setdefault(id(cache), (cache, {}))[1][path[:depth]] = None
            self._compute(
                [
                    _Part(
                        cache,
                        [path[-1] for path in paths],
                        torch.stack([cache.states[path[:-1]] for path in paths]),
                        list(paths),
                    )
                    for cache, paths in missing.values()
                ]
            )
        return torch.stack([cache.states[path] for cache, path in wanted])

    def _choose(self, views: list[tuple[_Growing, ProposerContext]]) -> dict[int, Proposal | SlipstreamError]:
        """Returns the proposals below the nodes to expand, by the context's index."""
        if not views:
            return {}
        places = [Place(at, view, number) for at, (_, view) in enumerate(views) for number in range(len(view.expand))]
        states = self._states([(views[place.index][0].cache, tuple(place.path)) for place in places])
        found: list[Proposal | SlipstreamError] = [Proposal([], view.length) for _, view in views]
        self._chooser.choose(places, self._head.target_logits(states), found)
        return {growing.index: answer for (growing, _), answer in zip(views, found, strict=True)}

    def _draw(self, drawing: list[_Growing], answers: list[Proposal | SlipstreamError]) -> None:
        """One level below the nodes that each context names."""
        for index, answer in self._choose([(each, each.context) for each in drawing]).items():
            answers[index] = answer

    def _grow(self, trees: list[_Growing], *, last: bool) -> None:
        """One level more below each tree's frontier."""
        open_trees = [tree for tree in trees if tree.frontier and tree.error is None]
        found = self._choose([(tree, tree.view()) for tree in open_trees])
        for tree in open_trees:
            answer = found[tree.index]
            if isinstance(answer, Proposal):
                tree.add(answer.nodes, 0 if last else self._width)
            else:
                tree.error = answer


def fuse(head: EagleHead, states: HiddenStates) -> Tensor:
    """[rows, width] what the head takes of the target's hidden states."""
    layers = head.config.layers
    features = torch.cat([states.layers[each] for each in layers], dim=-1) if layers else states.last
    return head.fuse(features.to(head.embed_tokens.weight))


def one_step_accuracy(head: EagleHead) -> Callable[[list[int], HiddenStates, list[int]], float]:
    """Measures how well a head follows its target: see `OpenedProposer.accuracy`."""

    @torch.inference_mode()
    def accuracy(tokens: list[int], states: HiddenStates, chosen: list[int]) -> float:
        features = fuse(head, states)[None, :-1]
        positions = torch.arange(features.shape[1], device=features.device)[None]
        found = head(torch.tensor([tokens[1:]], device=features.device), features, positions)
        best = head.target_logits(found)[0].argmax(-1)
        return float((best.cpu() == torch.tensor(chosen[1:])).float().mean())

    return accuracy


def open_proposer(settings: ProposerSettings) -> OpenedProposer:
    """The method `eagle` for `settings.target`. Raises what `load_head` raises."""
    target, place = read_target(settings.target), find_device(settings.device)
    head = load_head(settings.model, target, dtype_on(place, target.output.dtype)).to(place)
    pack(head)
    proposer = EagleProposer(
        head, width=settings.width, proposal_tokens=settings.proposal_tokens, most_pairs=settings.kv_tokens
    )
    need = HiddenNeed(tuple(sorted(set(head.config.layers))), every_row=True)
    return OpenedProposer(any_vocabulary("eagle"), proposer, need, PASSES + 1, one_step_accuracy(head))
