"""Rotary embeddings of a GGUF file: what transformers' reader of such files leaves out, put into the configuration.

That reader takes base and dimensions alone. A file says the rest in its header (`rope.scaling.*`), or as a tensor of
divisors, one for each frequency: those of Llama 3.1 and later are no parameters any more, so they are found again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from slipstream.engine.models.gguf_file import OWN_FOLDER, GgufFile, refused

FACTORS = (8.0, 32.0, 2.0, 4.0, 16.0, 64.0)
LENGTHS = (8192, 4096, 2048, 16384, 32768)
"""Original lengths in tokens that `llama3` scaling is tried with; 8 and 32 with 8192 are those of published models."""
LOW, HIGH = 1.0, 4.0
CLOSE = 1e-3
"""Relative difference of two divisors that are one: files hold them in float32."""


def rope_parameters(header: GgufFile, found: dict[str, Any], dimensions: int) -> dict[str, Any]:
    """The parameters for the configuration, from those that transformers read. `dimensions`: of a head's rotation.

    Raises FailedPrecondition for a scaling that cannot be expressed.
    """
    kind = str(header.field("rope.scaling.type") or "none")
    base = {"rope_theta": float(header.field("rope.freq_base") or found.get("rope_theta") or 10000.0)}
    original = header.field("rope.scaling.original_context_length")
    if "rope_factors_long" in header.rope:
        return base | _two_lists(header, original)
    if "rope_freqs" in header.rope:
        return base | _llama3(header, header.rope["rope_freqs"], base["rope_theta"], dimensions)
    if kind == "none" or (kind == "linear" and float(header.field("rope.scaling.factor") or 1.0) == 1.0):
        return {"rope_type": "default"} | found | base
    factor = header.field("rope.scaling.factor")
    if kind == "linear":
        return base | {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn" and factor and original:
        return base | {
            "rope_type": "yarn",
            "factor": float(factor),
            "original_max_position_embeddings": int(original),
            "beta_fast": float(header.field("rope.scaling.yarn_beta_fast") or 32.0),
            "beta_slow": float(header.field("rope.scaling.yarn_beta_slow") or 1.0),
        }
    raise refused(header.file, f"its positions are scaled by {kind!r}, which is not known here", OWN_FOLDER)


def llama3_divisors(theta: float, dimensions: int, factor: float, original: int) -> list[float]:
    """The divisor of each of `dimensions` / 2 frequencies in Llama 3.1's scaling, as llama.cpp's converter has it."""
    divisors = []
    for at in range(0, dimensions, 2):
        wave = 2 * math.pi * theta ** (at / dimensions)
        if wave < original / HIGH:
            divisors.append(1.0)
        elif wave > original / LOW:
            divisors.append(factor)
        else:
            smooth = (original / wave - LOW) / (HIGH - LOW)
            divisors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return divisors


def _llama3(header: GgufFile, divisors: Sequence[float], theta: float, dimensions: int) -> dict[str, Any]:
    if all(abs(each - 1.0) < CLOSE for each in divisors):
        return {"rope_type": "default"}
    for original in LENGTHS:
        for factor in FACTORS:
            wanted = llama3_divisors(theta, dimensions, factor, original)
            if len(wanted) == len(divisors) and all(
                abs(one - other) < CLOSE * other for one, other in zip(divisors, wanted, strict=True)
            ):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": LOW,
                    "high_freq_factor": HIGH,
                    "original_max_position_embeddings": original,
                }
    raise refused(header.file, "its tensor rope_freqs is no scaling that is known here", OWN_FOLDER)


def _two_lists(header: GgufFile, original: Any) -> dict[str, Any]:
    long, short = header.rope["rope_factors_long"], header.rope.get("rope_factors_short")
    if short is None or not original:
        raise refused(header.file, "it has no short factors or no original length for its positions", OWN_FOLDER)
    return {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "original_max_position_embeddings": int(original),
    }
