"""A rehearsal: texts that ask a decoder for everything its attention does, played by the engine and by the library.

near    A prompt in two pieces over several blocks, a tree with branches below it, and a step after one of its branches
        was kept. It is longer than an excerpt's windows.
far     A chain whose positions double up to the longest one; their bits alternate, so that a narrow type rounds them.

The engine packs both into the same steps, as it serves; the library computes each path of the tree as a text, by its
eager attention and with masks of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.engine.attention.packed import Attending, States
from slipstream.engine.attention.paged_sequences import PagedSequences
from slipstream.engine.engine import HiddenRequest
from slipstream.engine.forward import Forward, ForwardStep
from slipstream.engine.kernels.attention import PagedLayer, PagedStep
from slipstream.engine.kvcache.store import AttentionLayer
from slipstream.engine.models.excerpt import decoder_layers
from slipstream.engine.models.library_forward import LibraryForward
from slipstream.engine.segment import Segment

PROMPT, PIECE, BLOCK = 11, 5, 4
"""Tokens of the near prompt, of its first piece, and of a block of KV."""
PARENTS = (-1, -1, 0, 0, 1)
"""Parents of the tree's nodes."""
PATHS = ((0, 2), (0, 3), (1, 4))
"""From its root to its leaves; the last one is kept, and two more tokens follow it."""
LONGEST_NEAR = PROMPT + 4
"""Tokens of a near text."""
FAR = 1 << 16
"""Positions beyond are not tried."""
_ENGINE_TOKENS = 128


@dataclass(frozen=True)
class TextToken:
    """A token of a text: near texts are numbered by path, the far one is behind them."""

    text: int
    at: int


@dataclass
class Played:
    """Rows of one rehearsal, in an order of its own that is the same for everything that plays it."""

    logits: torch.Tensor
    """fp32 [rows, V]."""
    states: list[torch.Tensor] = field(default_factory=list)
    """Output of each layer, fp32 [rows, hidden]."""


class Rehearsal:
    def __init__(self, vocabulary_size: int, length: int, seed: int, *, by_order: bool = False) -> None:
        """`length` bounds positions, and is LONGEST_NEAR at least. Tokens are drawn by `seed`. `by_order`: positions of
        the far text are those of its tokens, because the library takes no others."""
        draw = torch.Generator().manual_seed(seed)
        tokens = torch.randint(vocabulary_size, (PROMPT + len(PARENTS) + 2 + 64,), generator=draw).tolist()
        self.prompt, rest = tokens[:PROMPT], tokens[PROMPT:]
        self.nodes, rest = rest[: len(PARENTS)], rest[len(PARENTS) :]
        self.behind = rest[:2]
        length = min(length, FAR)
        near = range(min(4, length))
        doubled = {(16 << power) // 3 for power in range(20) if (16 << power) // 3 < length}
        positions = sorted({*near, *doubled, length - 1})
        self.far_positions = [*range(len(positions))] if by_order else positions
        self.far = rest[2 : 2 + len(self.far_positions)]

    @property
    def near(self) -> list[list[int]]:
        return [[*self.prompt, *(self.nodes[node] for node in path), *self.behind] for path in PATHS]

    @property
    def on_one_path(self) -> list[int]:
        """Numbers of the rows that the last path and the far text have."""
        return [row for row, place in enumerate(self.places) if place.text >= len(PATHS) - 1]

    @property
    def places(self) -> list[TextToken]:
        """The token of each row of logits, in the order in which an engine gives them."""
        last, far = len(PATHS) - 1, len(PATHS)
        of_nodes = [
            next(TextToken(text, PROMPT + path.index(node)) for text, path in enumerate(PATHS) if node in path)
            for node in range(len(PARENTS))
        ]
        first = [TextToken(last, PIECE - 1), *(TextToken(far, at) for at in range(len(self.far)))]
        return [
            *first,
            TextToken(last, PROMPT - 1),
            *of_nodes,
            TextToken(last, PROMPT + 2),
            TextToken(last, PROMPT + 3),
        ]

    @property
    def groups(self) -> dict[str, list[int]]:
        """Numbers of rows by what they show."""
        far = 1 + len(self.far)
        rows = len(self.places)
        return {"far positions": list(range(1, far)), "pieces and branches": [0, *range(far, rows)]}


@dataclass(frozen=True)
class Player:
    """A forward of ours, as an engine runs it."""

    forward: Forward
    layers: list[AttentionLayer]
    device: torch.device
    batch_invariant: bool = True
    in_one_call: bool = True
    """The layers are computed by one call where there are kernels for it, as they are but for the largest trees."""


class _Moved:
    def __init__(self, step: ForwardStep, positions: torch.Tensor, in_one_call: bool) -> None:
        self._step, self.positions, self._in_one_call = step, positions, in_one_call
        self.tokens, self.wanted = step.tokens, step.wanted

    def attend(self, module: Attending, states: States, extras: dict[str, object]) -> torch.Tensor:
        return self._step.attend(module, states, extras)

    def paged(self, layers: tuple[PagedLayer, ...]) -> PagedStep | None:
        return self._step.paged(layers) if self._in_one_call else None


class _Stage:
    """Steps on pages of KV, whose tokens stand at positions of our choice; rows that are read follow from the sequence,
    as ever."""

    def __init__(self, player: Player, length: int, outputs: list[torch.Tensor] | None) -> None:
        """`outputs`: what hooks collect; None: the forward is asked for hidden states, but for the last layer's."""
        self.pages = PagedSequences(player.layers, length, player.device, _ENGINE_TOKENS, BLOCK)
        self._player, self._outputs = player, outputs
        self._request = None if outputs is not None else HiddenRequest(tuple(range(1, len(player.layers))))
        self.logits: list[torch.Tensor] = []
        self.states: list[list[torch.Tensor]] = []

    def step(self, segments: list[Segment], positions: list[int]) -> None:
        player = self._player
        plan = self.pages.plan(segments, batch_invariant=player.batch_invariant)
        output = player.forward(
            _Moved(plan, torch.tensor([positions], device=player.device), player.in_one_call), self._request
        )
        self.pages.computed(segments)
        if self._outputs is not None:
            found = [rows[0] for rows in self._outputs]
            self._outputs.clear()
        else:
            found = list(output.hidden.layers.values()) if output.hidden is not None else []
        self.states.append([rows[plan.wanted.to(rows.device)].float() for rows in found])
        self.logits.append(output.logits.float())


@torch.inference_mode()
def play(player: Player, rehearsal: Rehearsal) -> Played:
    """On pages of KV, as an engine does."""
    model = player.forward.model if isinstance(player.forward, LibraryForward) else None
    outputs: list[torch.Tensor] = []
    length = max(LONGEST_NEAR, len(rehearsal.far))
    with _watched(model, outputs) if model is not None else nullcontext():
        stage = _Stage(player, length, None if model is None else outputs)
        player.forward.reserve(max(length, *rehearsal.far_positions) + 1)
        _perform(stage, rehearsal)
    return Played(torch.cat(stage.logits), [torch.cat(rows) for rows in zip(*stage.states, strict=True)])


def _perform(stage: _Stage, rehearsal: Rehearsal) -> None:
    kv, prompt = stage.pages.kv, rehearsal.prompt
    near, far = kv.begin_unshared(PROMPT + len(PARENTS) + 4), kv.begin_unshared(len(rehearsal.far))
    chain = Segment(far, rehearsal.far[:1], rehearsal.far[1:], list(range(-1, len(rehearsal.far) - 2)))
    first = Segment(near, prompt[:PIECE])
    stage.step([first, chain], [*range(PIECE), *rehearsal.far_positions])
    kv.keep(first, [])
    second = Segment(near, prompt[PIECE:], rehearsal.nodes, list(PARENTS))
    stage.step([second], [PIECE + depth for depth in second.depths()])
    kv.keep(second, list(PATHS[-1]))
    stage.step([Segment(near, rehearsal.behind[:1], rehearsal.behind[1:], [-1])], [PROMPT + 2, PROMPT + 3])


@torch.inference_mode()
def recite(model: Any, rehearsal: Rehearsal, device: torch.device, *, branches: bool = True) -> Played:
    """By the library, whose model uses its eager attention. Without `branches` only the rows `on_one_path`."""
    outputs: list[torch.Tensor] = []
    near, far = rehearsal.near if branches else rehearsal.near[-1:], torch.tensor([rehearsal.far], device=device)
    with _watched(model, outputs):
        logits = model(input_ids=torch.tensor(near, device=device), use_cache=False).logits
        count = len(outputs)
        # With a mask of its own kind the library does not take a gap between positions for the end of a text.
        behind = model(
            input_ids=far,
            position_ids=torch.tensor([rehearsal.far_positions], device=device),
            attention_mask=torch.ones_like(far),
            use_cache=False,
        ).logits
    both = zip(outputs[:count], outputs[count:], strict=True)
    states = [_rows(rehearsal, of_near, of_far) for of_near, of_far in both]
    return Played(_rows(rehearsal, logits, behind), states)


def _rows(rehearsal: Rehearsal, near: torch.Tensor, far: torch.Tensor) -> torch.Tensor:
    """near [paths, tokens, N], of the last paths; far [1, tokens, N]."""
    texts = dict(zip(range(len(PATHS) - len(near), len(PATHS) + 1), [*near, *far], strict=True))
    return torch.stack([texts[place.text][place.at] for place in rehearsal.places if place.text in texts]).float()


@contextmanager
def _watched(model: Any, outputs: list[torch.Tensor]) -> Iterator[None]:
    """`outputs` gets what each decoder layer gives, [batch, tokens, hidden], in the order in which they run."""

    def keep(module: object, given: object, output: Any) -> None:
        states = output[0] if isinstance(output, tuple | list) else output
        outputs.append(states[0] if states.dim() == 4 else states)  # of several residual streams the first

    hooks = [layer.register_forward_hook(keep) for layer in decoder_layers(model)[1]]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
