"""`logits_processor.process` and `coupled_sampling.choose` for rows on a GPU, with acceptance along chains, in at most
five launches that read the logits twice (greedy rows once) and wait for nothing.

The tokens are those of torch's operators on the same logits: what could move a token is computed in the same types and
the same order. Two things may differ in the last bits, and so may a token where two scores or sums are as near as that:

- The logarithms of the noise, in float64: CPU, GPU and Triton's interpreter have their own. The best two scores of a
  row are as good as never within 1e-15.
- The exponentials that top-p adds up: here float32, rounded down to 2^-44 of the largest so that their sum does not
  depend on its order, there float64 and float32. So a set may end one token earlier or later, at most once in thousands
  of rows; that token is then the chosen one as seldom as it is likely, which at the end of a set is little.

Equal logits, weights and scores are decided alike: by the lowest id. Sessions under a ratio rule want
distributions, which these kernels do not write: torch computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.engine.devices import upload
from slipstream.engine.kernels.triton_launch import available, launch

SETTINGS = np.dtype(
    [
        ("key", np.uint64),
        ("top_k", np.int64),
        ("greedy", np.int64),
        ("mask", np.int64),
        ("place", np.int64),
        ("first", np.int64),
        ("depth", np.int64),
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("floor", np.float64),
        ("repetition", np.float64),
        ("presence", np.float64),
        ("frequency", np.float64),
    ]
)
"""Settings of a row, as `slipstream.engine.kernels.fused_sampling` reads them. `key` names its noise; `greedy` rows
have neutral cuts and temperature; `mask`: its row of the masks, or -1; `place`: its session's among the `Adjusted`, or
-1; `first`: the index in the drafts of its chain's first candidate; `depth`: candidates before the row; `floor`: log
min_p."""
MOST_TOKENS = 1 << 18
"""Largest vocabulary, in tokens: more weights would not fit into 63 bits."""
PADDING = -1
BLOCK, GROUP, CHUNK, CAPACITY, WAYS = 4096, 128, 256, 8192, 64


class Adjusted(NamedTuple):
    """Tensors that penalties and bias need of S sessions, on the device."""

    counts: Tensor
    """float32 [S, V] how often each token is in the output."""
    prompt: Tensor
    """bool [S, V] which tokens are in the prompt."""
    bias: Tensor
    """float32 [S, V]"""
    touched: Tensor
    """int32 [S, ceil(V / 32)]; the lowest bit is the lowest token: those that any of the three concerns."""
    allowed: Tensor
    """uint8 [S, ceil(V / 8)]; likewise: those that `bias` does not forbid."""


class Decided(NamedTuple):
    """Decisions for N requests, in one tensor: one copy takes all of it to the host."""

    packed: Tensor
    """int32 [N * (longest chain + 1) + 4 N]"""
    size: int

    @property
    def tokens(self) -> Tensor:
        """[N, longest chain + 1]: accepted candidates and the token behind them, then PADDING; 0 for a broken row. All
        PADDING for a request that decides nothing."""
        return self.packed[: -4 * self.size].view(self.size, -1)

    @property
    def counts(self) -> Tensor:
        """[2, N]: tokens of each request, and its candidates that were not accepted; 0 where it decides nothing."""
        return self.packed[-4 * self.size : -2 * self.size].view(2, -1)

    @property
    def flags(self) -> Tensor:
        """[2, N]: 1 for requests that came to a broken row, and for those with a candidate outside its own
        distribution, which these kernels never find."""
        return self.packed[-2 * self.size :].view(2, -1)


def fuses(logits: Tensor) -> bool:
    """Whether these are for kernels of Triton."""
    return not logits.is_cpu and available() and logits.shape[-1] <= MOST_TOKENS


def room_on(device: torch.device) -> Callable[..., Tensor]:
    """Makes a tensor of any content of a shape, int32 unless `dtype` says otherwise."""
    return partial(torch.empty, dtype=torch.int32, device=device)


class Surveyed(NamedTuple):
    """Results of the first two launches on R rows in P parts; all other launches read them."""

    maxima: Tensor
    best: Tensor
    winners: Tensor
    row_broken: Tensor
    row_floats: Tensor
    found: Tensor
    parts: int
    blocks: Mapping[str, int]
    """Sizes of a part and of its groups, as kernels take them."""
    padded: int
    """The power of 2 from P on."""


def survey(read: tuple[Tensor, ...], block: int, group: int) -> Surveyed:
    """Launches `survey` and `prepare` of `fused_sampling`. `read`: logits [R, V], their settings as int64 and as
    float64, and what else the kernels read; `block`, `group`: tokens of a part, and those that share a maximum."""
    from slipstream.engine.kernels import fused_sampling as kernels

    logits = read[0]
    (count, size), room = logits.shape, room_on(logits.device)
    parts = -(-size // block)
    groups, padded, blocks = parts * (block // group), _power(parts), {"BLOCK": block, "GROUP": group}
    maxima, best = room(count, groups, dtype=torch.float32), room(count, parts, dtype=torch.float64)
    winners, broken = room(2, count, parts)
    row_broken, found = room(2, count)
    row_floats, stride = room(count, 3, dtype=torch.float32), logits.stride(0)
    launch(kernels.survey, (count, parts), read, maxima, best, winners, broken, size, stride, parts, **blocks)
    launch(
        kernels.prepare, (count,), *read[1:3], maxima, broken, row_broken, row_floats, found, size, parts, groups,
        GROUP=group, GROUPS=_power(groups), PARTS=padded,
    )  # fmt: skip
    return Surveyed(maxima, best, winners, row_broken, row_floats, found, parts, blocks, padded)


def decide(
    logits: Tensor,
    rows: npt.NDArray[np.void],
    requests: npt.NDArray[np.int64],
    drafts: npt.NDArray[np.int64],
    masks: npt.NDArray[np.uint8] | None = None,
    adjusted: Adjusted | None = None,
) -> Decided:
    """logits [R, V] of any float type, SETTINGS [R], and of each of N requests its first row, its candidates, and
    whether it decides anything [N, 3]; drafts: all requests' candidates, one after the other; masks: uint8
    [M, ceil(V / 8)] the allowed tokens' bits.

    Raises ValueError for masks or tables of another vocabulary.
    """
    from slipstream.engine.kernels import fused_sampling as kernels

    count, size = logits.shape
    device = logits.device
    if masks is not None and masks.shape[1] != -(-size // 8):
        raise ValueError(f"masks of {masks.shape[1]} bytes for {size} logits")
    if adjusted is not None and adjusted.counts.shape[1] != size:
        raise ValueError(f"counts of {adjusted.counts.shape[1]} tokens for {size} logits")
    packed = upload(torch.from_numpy(np.concatenate([rows.view(np.int64), requests.ravel(), drafts])), device)
    settings, chains, candidates = packed.split([rows.nbytes // 8, requests.size, len(drafts)])
    # What is not there has the type of what may be: another one would be another kernel.
    floats, integers, octets = (packed.view(dtype) for dtype in (torch.float32, torch.int32, torch.uint8))
    bits = upload(torch.from_numpy(masks), device) if masks is not None else octets
    tables = [floats, octets, floats, integers, octets]
    if adjusted is not None:
        tables = [adjusted.counts, adjusted.prompt.view(torch.uint8), *adjusted[2:]]
    read = (logits, settings, settings.view(torch.float64), bits, candidates, *tables)
    room, stride = room_on(device), logits.stride(0)
    maxima, best, winners, row_broken, row_floats, found, parts, blocks, padded = survey(read, BLOCK, GROUP)
    if not rows["greedy"].all():
        cuts = (((rows["top_k"] > 0) & (rows["top_k"] < size)) | (rows["top_p"] < 1.0)).any()
        capacity = CAPACITY if cuts else 1
        values, tokens = room(count, capacity, dtype=torch.float32), room(count, capacity)
        sums = room(count, parts, dtype=torch.int64)
        state = (best, winners, row_broken, row_floats, found, values, tokens, sums, size, stride, parts)
        launch(kernels.race, (count, parts), read, maxima, *state, CAPACITY=capacity, **blocks)
        if cuts:
            launch(kernels.cut, (count,), read, *state, CAPACITY=capacity, CHUNK=CHUNK, WAYS=WAYS, PARTS=padded)
    total, width = len(requests), int(requests[:, 1].max(initial=0)) + 1
    decided = Decided(room(total * (width + 4)), total)
    launch(
        kernels.accept, (total,), settings, chains, candidates, best, winners, row_broken, decided.packed, parts, width,
        total, PARTS=padded, PADDING=PADDING,
    )  # fmt: skip
    return decided


def count(adjusted: Adjusted, places: Tensor, tokens: Tensor) -> None:
    """Adds decided tokens int32 [K, width] to the counts at these places int64 [K]; tokens below 0 are none."""
    from slipstream.engine.kernels import fused_sampling as kernels

    grid = (len(places), tokens.shape[1])
    launch(kernels.count, grid, places, tokens, adjusted.counts, adjusted.touched, adjusted.counts.shape[1], grid[1])


def warm_up(vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compiles the kernels for logits of this type, so that no step has to: some seconds."""
    rows = np.zeros(1, SETTINGS)
    for name, value in (("mask", -1), ("place", -1), ("temperature", 1.0), ("top_p", 0.5), ("repetition", 1.0)):
        rows[name] = value
    logits = torch.zeros(1, vocabulary, dtype=dtype, device=device)
    decided = decide(logits, rows, np.array([[0, 0, 1]]), np.empty(0, np.int64))
    counts = torch.zeros(1, vocabulary, device=device)
    touched = torch.zeros(1, -(-vocabulary // 32), dtype=torch.int32, device=device)
    none = torch.zeros(1, dtype=torch.int64, device=device)
    count(Adjusted(counts, counts, counts, touched, touched), none, decided.tokens)


def _power(number: int) -> int:
    """The next power of 2."""
    return 1 << (number - 1).bit_length()
