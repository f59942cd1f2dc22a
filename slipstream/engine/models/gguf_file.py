"""A GGUF file before its weights are read: what stands in its header, and the refusals that the header decides."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import FailedPrecondition

MAGIC = b"GGUF"
EXTRA = "pip install 'slipstream-serve[gguf]'"
MERGE = "merge the parts with llama.cpp's `llama-gguf-split --merge FIRST_PART OUT.gguf`"
OWN_FOLDER = "serve the model's own checkpoint (safetensors) instead"
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to the configuration and not to the weights."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a file that can be converted as far as it says."""

    file: Path
    architecture: str
    fields: Mapping[str, Any]
    """Key to value: numbers, strings, and lists of them."""
    types: Mapping[str, int]
    """Names of the weights' types, as `Q4_K` or `F32`, to how many numbers are of each; without the smaller tensors,
    which every file has in float32."""
    values: int
    """Numbers in all tensors of weights."""
    rope: Mapping[str, list[float]]
    """Tensors that hold factors of rotary embeddings, without `.weight`."""

    def field(self, key: str) -> Any:
        """The architecture's own value under a key without its name (`rope.freq_base`); None for none."""
        return self.fields.get(f"{self.architecture}.{key}")

    @property
    def dtype(self) -> str:
        """The type that its weights are written in: the file's own where that is a float type; bfloat16 for blocks of
        a quantisation, whose error is larger than this type's."""
        most = max(self.types, key=lambda name: self.types[name], default="F32")
        return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def refused(file: Path, why: str, remedy: str) -> FailedPrecondition:
    return FailedPrecondition(f"{file.name} cannot be served: {why}; {remedy}.", reason="GGUF_UNREADABLE")


def read_header(file: Path) -> GgufFile:
    """Raises FailedPrecondition for what is no GGUF file or not whole, a part of one, no language model, weights in a
    type that cannot be read, and where the package `gguf` is missing."""
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise FailedPrecondition(
            f"Reading {file.name} needs the package {error.name}, which is not installed: {EXTRA}.",
            reason="GGUF_MISSING",
        ) from error
    with file.open("rb") as opened:
        if opened.read(4) != MAGIC:
            raise refused(file, "it is no GGUF file", "download it again")
    if _PART.search(file.name):
        raise refused(file, "it is one part of several", MERGE)
    try:
        reader = gguf.GGUFReader(file)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except Exception as error:  # the reader raises many kinds for files that are broken
        raise refused(file, f"it is broken or not whole ({_first_line(error)})", "download it again") from error
    _check_kind(file, fields)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    rope = {name.removesuffix(".weight"): np.asarray(tensors[name].data, np.float32).tolist()
            for name in _ROPE_TENSORS if name in tensors}  # fmt: skip
    weights = [tensor for name, tensor in tensors.items() if name not in _ROPE_TENSORS]
    types: dict[str, int] = {}
    for tensor in weights:
        _check_type(file, tensor.tensor_type)
        if len(tensor.shape) > 1:
            types[tensor.tensor_type.name] = types.get(tensor.tensor_type.name, 0) + int(tensor.n_elements)
    values = sum(int(tensor.n_elements) for tensor in weights)
    return GgufFile(file, str(fields["general.architecture"]), fields, types, values, rope)


def _check_kind(file: Path, fields: Mapping[str, Any]) -> None:
    if int(fields.get("split.count") or 0) > 1:
        raise refused(file, f"it is one part of {fields['split.count']}", MERGE)
    kind, architecture = fields.get("general.type", "model"), fields.get("general.architecture")
    if kind != "model" or architecture in (None, "clip"):
        raise refused(file, f"it holds no language model but {kind} ({architecture})", "name the model's own file")
    if "tokenizer.ggml.tokens" not in fields:
        raise refused(file, "it has no vocabulary", OWN_FOLDER)


def _check_type(file: Path, kind: Any) -> None:
    """Raises FailedPrecondition for a type without a reader: one block of zeros is tried."""
    import gguf

    if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
        return
    _, size = gguf.GGML_QUANT_SIZES[kind]
    try:
        with np.errstate(all="ignore"):
            gguf.dequantize(np.zeros((1, size), np.uint8), kind)
    except Exception as error:
        raise refused(
            file,
            f"the package gguf cannot read weights of type {kind.name}",
            f"take a file in another quantisation (Q4_K_M, Q8_0, BF16), or {OWN_FOLDER}",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
