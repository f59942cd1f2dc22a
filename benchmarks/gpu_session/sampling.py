"""The fused coupled kernels beside torch's operators: equal tokens, time by rows, and no wait while they judge."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from benchmarks.gpu_session.timing import Bench, Figures
from slipstream.engine.sampler import fused
from slipstream.engine.sampler.coupled_sampling import choose
from slipstream.engine.sampler.logits_processor import CUTS, sharpen
from slipstream.speculation import noise
from slipstream.speculation.noise import Purpose

ROWS = (9, 64, 320, 512)
TEMPERATURE = 0.8


def measure(bench: Bench) -> Figures:
    found = Figures()
    vocabulary = 512 if bench.small else 128_256
    for rows in ROWS[:1] if bench.small else ROWS:
        torch.manual_seed(rows)
        logits = torch.randn(rows, vocabulary, device=bench.device).mul_(3.0)
        for top_p in (1.0, 0.9):
            name = f"{rows} rows" + (", top-p 0.9" if top_p < 1.0 else "")
            by_kernels, by_torch = partial(_kernels, logits, top_p), partial(_torch, logits, top_p)
            chosen = by_kernels().tokens[:, 0].tolist()
            found[f"{name}: rows that differ"] = sum(a != b for a, b in zip(chosen, by_torch().tolist(), strict=True))
            found[f"{name}: waits"] = waits(bench, by_kernels)
            if not bench.small:
                found[f"{name}: kernels, us"] = 1e6 * bench.seconds(by_kernels)
                found[f"{name}: torch, us"] = 1e6 * bench.seconds(by_torch)
    return found


def waits(bench: Bench, run: partial[fused.Decided]) -> bool:
    """Whether the host waits for the GPU in it."""
    if bench.device.type != "cuda":
        return False
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
        return False
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _kernels(logits: torch.Tensor, top_p: float) -> fused.Decided:
    size = len(logits)
    rows = np.zeros(size, fused.SETTINGS)
    rows["key"] = noise.keys(np.arange(size, dtype=np.uint64), np.arange(size), Purpose.COUPLED)
    rows["mask"] = rows["place"] = -1
    rows["repetition"], rows["temperature"], rows["top_p"], rows["floor"] = 1.0, TEMPERATURE, top_p, -np.inf
    requests = np.stack([np.arange(size), np.zeros(size, np.int64), np.ones(size, np.int64)], axis=1)
    return fused.decide(logits, rows, requests, np.empty(0, np.int64), None)


def _torch(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    size = len(logits)
    cuts = np.full(size, np.array((0, top_p, -np.inf), CUTS))
    processed = sharpen(logits, np.full(size, TEMPERATURE, np.float32), cuts)
    seeds = np.arange(size, dtype=np.uint64)
    return choose(processed, np.zeros(size, bool), seeds, np.arange(size))[0]
