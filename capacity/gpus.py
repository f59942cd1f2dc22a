"""Seconds of a pass on a GPU, from what data sheets say of it: for plans of machines that are not there yet.

A pass reads its weights once, at `READ` of the memory's bandwidth, and multiplies each token with them, at `COMPUTED`
of the tensor cores' rate. What takes longer is what it takes. Beside that a captured graph takes `GRAPH_S`; without one
the host starts each layer, `LAYER_S`, and the GPU may wait for it. Several GPUs divide weights and arithmetic, and meet
twice a layer. Measured costs replace all of this (`slipstream plan --measure`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from capacity.names import refuse_unknown, suggested
from slipstream.engine.emulated.model import LinearCost
from slipstream.errors import InvalidArgument

READ = 0.85
"""Share of the bandwidth that kernels reach which read weights for one token."""
COMPUTED = 0.5
"""Share of the dense rate of the tensor cores that a pass over many tokens reaches."""
GRAPH_S, EAGER_S, LAYER_S = 0.00035, 0.001, 0.000335
"""Around a captured graph; around a pass without one; and what the host needs to start a layer."""
MEETING_S = 0.000012
"""An all-reduce of few tokens between GPUs of one machine."""
BITS = (16, 8, 4)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's data sheet: bytes a second, dense operations a second in 16 and in 8 bits, bytes of memory."""

    bandwidth: float
    half: float
    eighth: float
    memory: float


GPUS = {
    "T4": Gpu(0.320e12, 65e12, 130e12, 16e9),
    "A10G": Gpu(0.600e12, 70e12, 140e12, 24e9),
    "L4": Gpu(0.300e12, 121e12, 242e12, 24e9),
    "L40S": Gpu(0.864e12, 362e12, 733e12, 48e9),
    "A100": Gpu(2.039e12, 312e12, 624e12, 80e9),
    "H100": Gpu(3.35e12, 989e12, 1979e12, 80e9),
    "H200": Gpu(4.8e12, 989e12, 1979e12, 141e9),
    "B200": Gpu(7.7e12, 2250e12, 4500e12, 180e9),
}


@dataclass(frozen=True, slots=True)
class GpuCost:
    """`cost = { gpu = "L4", parameters = 1.24e9, layers = 16, bits = 8 }` in a plan."""

    gpu: str
    parameters: float
    """Those that a token is multiplied with: of a mixture of experts the active ones, and its reading is a guess."""
    layers: int
    bits: int = 16
    """Bits of a weight: 16, 8 or 4. Arithmetic is in 8 bits where the weights are, and else in 16."""
    head_parameters: float = 0.0
    """Those of the output layer, which stays in 8 bits where the others have 4."""
    number: int = 1
    """GPUs that share the model."""
    graphs: bool = True
    """Passes are captured graphs, as vLLM's are; false: the host starts every kernel."""
    kv_bytes: float = 0.0
    """KV of a token, of all layers: 2 * layers * KV heads * dimension * bytes of a number."""
    context: float = 1000.0
    """Tokens of a session whose KV a pass reads, on average."""

    def __post_init__(self) -> None:
        if self.gpu not in GPUS:
            name = suggested(self.gpu, GPUS)
            raise InvalidArgument(f"the plan knows no GPU {name}; it has {', '.join(GPUS)}, or write base_s.")
        if self.bits not in BITS:
            raise InvalidArgument(f"bits is {self.bits}; weights have {', '.join(map(str, BITS))}.")
        if min(self.parameters, self.layers, self.number) <= 0 or not 0 <= self.head_parameters <= self.parameters:
            raise InvalidArgument("a cost on a GPU has parameters, layers and a number of GPUs above 0.")

    @property
    def weight_bytes(self) -> float:
        head = self.head_parameters * max(self.bits, 8)
        return ((self.parameters - self.head_parameters) * self.bits + head) / 8.0

    @property
    def fits(self) -> bool:
        """Whether the weights leave a tenth of the memory for KV and activations."""
        return self.weight_bytes <= 0.9 * self.number * GPUS[self.gpu].memory

    def line(self) -> LinearCost:
        """Figures that a plan computes with."""
        gpu = GPUS[self.gpu]
        bandwidth = READ * self.number * gpu.bandwidth
        read_s = self.weight_bytes / bandwidth
        rate = COMPUTED * self.number * (gpu.eighth if self.bits == 8 else gpu.half)
        token_s = 2.0 * self.parameters / rate
        around_s = GRAPH_S if self.graphs else EAGER_S + max(0.0, self.layers * LAYER_S - read_s)
        meetings_s = 2 * self.layers * MEETING_S if self.number > 1 else 0.0
        session_s = self.context * self.kv_bytes / bandwidth
        return LinearCost(read_s + around_s + meetings_s, token_s, session_s, max(1, int(read_s / token_s)))


def gpu_cost(value: Mapping[str, Any], where: str = "a cost on a GPU") -> LinearCost:
    """The cost that a plan names by its GPU. Raises InvalidArgument for fields that are missing or unknown."""
    known = {each.name for each in fields(GpuCost)}
    refuse_unknown(where, value, known)
    try:
        return GpuCost(**value).line()
    except TypeError as error:
        raise InvalidArgument(f"{where} needs gpu, parameters and layers: {error}.") from error


def level_times(parameters: float, layers: int, head_parameters: float = 0.0) -> dict[str, dict[int, float | None]]:
    """Seconds of one draft level of this model, a token of one session, by GPU and by the bits of its weights, with
    captured graphs; None where the weights do not fit."""
    found: dict[str, dict[int, float | None]] = {}
    for name in GPUS:
        costs = {bits: GpuCost(name, parameters, layers, bits, head_parameters) for bits in BITS}
        found[name] = {bits: each.line()(1, 1) if each.fits else None for bits, each in costs.items()}
    return found
