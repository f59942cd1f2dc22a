"""`logits_processor.sharpen` and `coupled_sampling.rank` for rows on a GPU, in five launches that read the logits twice
and wait for nothing.

The tokens are those of torch's operators, but for what `slipstream.engine.sampler.fused` says of last bits, and where
torch leaves the order of equal logits open: here the lowest id is first. Confidences differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.devices import upload
from slipstream.engine.kernels.triton_launch import launch
from slipstream.engine.sampler import fused
from slipstream.engine.sampler.logits_processor import CUTS, NO_CUTS, cuts_of
from slipstream.speculation import noise
from slipstream.speculation.noise import Purpose
from slipstream.speculation.sampling_params import SamplingParams

SHORT = 256
"""Tokens that noise may bring to the front, as in `coupled_sampling.rank`."""
BLOCK, GROUP, CHUNK, CAPACITY, WAYS, PAIRS = 4096, 32, 256, 8192, 64, 16

UNFUSED = tuple(name for name in CUTS.names or () if name not in (fused.SETTINGS.names or ()))
"""Cuts that the kernels do not know."""


def ranks(logits: Tensor, samplings: Sequence[SamplingParams], count: int) -> bool:
    """Whether these are for kernels of Triton. top-p among more tokens of a top-k than a shortlist holds is not."""
    size = logits.shape[-1]
    cuts = np.array([cuts_of(each) for each in samplings], CUTS)
    unknown = any((cuts[name] != NO_CUTS[name]).any() for name in UNFUSED)
    wide = any(SHORT < each.top_k < size and each.top_p < 1.0 and not each.greedy for each in samplings)
    return fused.fuses(logits) and count <= min(SHORT, size) and not (wide or unknown)


def rank(
    logits: Tensor, samplings: Sequence[SamplingParams], positions: Sequence[int], count: int, sharpness: float
) -> tuple[Tensor, Tensor]:
    """logits [R, V] of any float type, after masks, penalties and bias -> (tokens int64 [R, count], confidences float32
    [R, count]), as `coupled_sampling.rank` returns them."""
    from slipstream.engine.kernels import fused_ranking as kernels

    (rows, size), device = logits.shape, logits.device
    settings = upload(torch.from_numpy(_settings(samplings, positions, count, size).view(np.int64)), device)
    floats, integers, octets = (settings.view(dtype) for dtype in (torch.float32, torch.int32, torch.uint8))
    # No row has a mask or a place in tables: these are never read.
    read = (logits, settings, settings.view(torch.float64), octets, settings, floats, octets, floats, integers, octets)
    room, stride = fused.room_on(device), logits.stride(0)
    maxima, _, _, row_broken, row_floats, found, parts, blocks, padded = fused.survey(read, BLOCK, GROUP)
    state = (row_broken, row_floats, found, room(rows, CAPACITY, dtype=torch.float32), room(rows, CAPACITY))
    sums = room(rows, parts, dtype=torch.int64)
    launch(
        kernels.gather, (rows, parts), read, maxima, *state, sums, sharpness, size, stride, parts, **blocks,
        CAPACITY=CAPACITY,
    )  # fmt: skip
    listed = (room(rows, SHORT, dtype=torch.float32), room(rows, SHORT), room(rows))
    launch(
        kernels.shortlist, (rows,), read, *state, *listed, size, stride, CAPACITY=CAPACITY, CHUNK=CHUNK, WAYS=WAYS,
        SHORT=SHORT,
    )  # fmt: skip
    tokens, confidences = room(rows, count, dtype=torch.int64), room(rows, count, dtype=torch.float32)
    launch(
        kernels.finish, (rows,), *read[1:3], row_floats, sums, *listed, tokens, confidences, sharpness, parts, count,
        PARTS=padded, SHORT=SHORT, PAIRS=PAIRS,
    )  # fmt: skip
    return tokens, confidences


def warm_up(vocabulary: int, device: torch.device) -> None:
    """Compiles the kernels for float32 logits, so that no step has to: some seconds."""
    logits = torch.zeros(1, vocabulary, device=device)
    if ranks(logits, [SamplingParams()], 1):
        rank(logits, [SamplingParams()], [0], 1, 1.5)


def _settings(
    samplings: Sequence[SamplingParams], positions: Sequence[int], count: int, size: int
) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """fused.SETTINGS [R]. `top_k`: how many of the likeliest tokens decide; `depth`: 1 where a share of all is asked
    for: a confidence of a greedy row, or top-p of a row without top-k."""
    rows = np.zeros(len(samplings), fused.SETTINGS)
    cuts = np.array([cuts_of(each) for each in samplings], CUTS)
    greedy = np.array([each.greedy for each in samplings])
    is_cut = (cuts["top_k"] > 0) & (cuts["top_k"] < size)
    rows["key"] = noise.keys([each.seed for each in samplings], positions, Purpose.COUPLED)
    rows["greedy"], rows["mask"], rows["place"], rows["repetition"] = greedy, -1, -1, 1.0
    rows["top_k"] = np.where(greedy, count, np.where(is_cut, np.minimum(cuts["top_k"], SHORT), SHORT))
    rows["depth"] = greedy | ((cuts["top_p"] < 1.0) & ~is_cut)
    rows["temperature"] = [1.0 if each.greedy else each.temperature for each in samplings]
    rows["top_p"], rows["floor"] = cuts["top_p"], cuts["floor"]
    return rows
