"""The name of an arithmetic: everything that decides a logit's bits, as far as the same tokens are promised.

Two workers with equal names write the same text from the same request; what is promised is in the name, and nothing
that is promised depends on what is not in it. Where only the distribution is promised (GPUs, operators of torch whose
rows depend on each other) the name holds weights, type and engine alone: more would separate what need not be equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import transformers

from slipstream.engine.attention.batch_invariant import MOST_NODES, least_rows
from slipstream.engine.forward import Forward
from slipstream.engine.kernels import compiled
from slipstream.engine.kernels.attention import fits
from slipstream.engine.kernels.compiled import find_kernels
from slipstream.engine.kvcache.store import AttentionLayer
from slipstream.engine.model_info import MOST_CANDIDATES
from slipstream.version import running_version

ENGINE = "embedded"
LEVELS = {1: "avx2", 2: "avx512", 3: "avx512bf16"}
"""Names of the levels of kernels.c."""


@dataclass(frozen=True, slots=True)
class Computation:
    """Description of the computation of a checkpoint's logits on this machine."""

    weights: str
    """The revision of the weights, by content."""
    precision: str
    """The type, behind the quantiser if there is one: "bfloat16", "int8/bfloat16"."""
    path: str
    """`slipstream.engine.forward.Forward.path`."""
    rowwise: bool
    """Whether all but attention computes a row alike in every pass."""
    device: str
    """Kind of the device: "cpu", "cuda"."""
    kernels: str
    """Name of the compiled kernels; empty for none."""
    attends: bool
    """Whether kernels compute the attention of every layer."""
    steady: bool
    """Whether torch's products in float32 have rows that do not depend on the other rows."""
    torch: str
    """Version, and the instructions that torch's own operators use."""
    threads: int
    engine: str
    """With its version."""

    @property
    def batch_invariant(self) -> bool:
        """True if a row has the same bits in every pass, so that the same tokens are promised."""
        if self.device != "cpu":
            return False
        return (self.rowwise and self.attends) or (self.precision == "float32" and self.steady)

    @property
    def most_candidates(self) -> int:
        """See `ModelInfo`: above it torch computes the attention of the whole pass, or cuts its sums in two."""
        return MOST_NODES if self.batch_invariant and not self.attends else MOST_CANDIDATES

    @property
    def name(self) -> str:
        precision = self.precision.replace("/", "-")
        if not self.batch_invariant:
            return "/".join((self.weights, precision, ENGINE))
        parts = [self.weights, precision, self.engine, self.kernels or "plain"]
        if self.path == "library":
            parts.append(f"transformers-{transformers.__version__}")
        # oneDNN may add up in parts, one for each thread.
        if self.path not in ("kernels", "library") or not self.attends:
            parts.append(f"{self.path}-{self.threads}threads")
        return "/".join((*parts, self.torch))


def computation_of(weights: str, precision: str, forward: Forward, layers: Sequence[AttentionLayer]) -> Computation:
    """The computation of a loaded checkpoint with these attention layers, on this machine as it is."""
    device = layers[0].device.type
    on_cpu = device == "cpu"
    attends = on_cpu and find_kernels() is not None
    attends &= all(fits(layer.group, layer.key_dim, layer.value_dim) for layer in layers)
    shapes = {(layer.heads, layer.key_dim, layer.value_dim) for layer in layers}
    kept = forward.path != "library" or not forward.uneven
    tried = on_cpu and kept and precision == "float32" and not attends
    return Computation(
        weights=weights,
        precision=precision,
        path=forward.path,
        rowwise=not forward.uneven,
        device=device,
        kernels=kernels_name() if on_cpu else "",
        attends=attends,
        steady=tried and all(least_rows(*shape) is not None for shape in shapes),
        torch=f"torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability().lower()}",
        threads=torch.get_num_threads(),
        engine=f"{ENGINE}-{running_version()}",
    )


@cache
def kernels_name() -> str:
    """Such as "kernels-9-avx2-1f3c9a": version of the calls, instructions, and digest of the compiled file, for the
    version does not change with each sum. Empty where there are none."""
    kernels = find_kernels()
    if kernels is None:
        return ""
    digest = hashlib.sha256(Path(kernels.path).read_bytes()).hexdigest()[:6]
    return f"kernels-{compiled.VERSION}-{LEVELS.get(kernels.level, kernels.level)}-{digest}"
