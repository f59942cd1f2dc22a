"""Safetensors checkpoints read and written piece by piece, so that neither side is ever whole in memory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from slipstream.errors import FailedPrecondition

SHARD_BYTES = 2 << 30
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class StoredWeights:
    """The tensors of a checkpoint folder by name, read when asked for."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(folder.glob("*.safetensors"))
        if not self._paths:
            raise FailedPrecondition(f"{folder} has no safetensors weights; convert the checkpoint first.")
        opened = [safe_open(path, framework="pt") for path in self._paths]
        self._files: dict[str, Any] = {name: file for file in opened for name in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise FailedPrecondition(f"The checkpoint has no tensor {name}; its layout is not the usual one.")
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def suffixes(self, layer: int) -> list[str]:
        """Names of one layer's tensors without `model.layers.N.`, sorted."""
        prefix = f"model.layers.{layer}."
        return sorted(name.removeprefix(prefix) for name in self._files if name.startswith(prefix))

    def fingerprint(self) -> str:
        """Changes whenever a weight does."""
        digest = hashlib.sha256()
        for path in self._paths:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


class ShardWriter:
    """Collects tensors and writes a file whenever `SHARD_BYTES` are together."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._limit = folder, shard_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._bytes = self._total = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor; it may be written at once."""
        if self._waiting and self._bytes + tensor.nbytes > self._limit:
            self._flush()
        self._waiting[name] = tensor.contiguous()
        self._bytes += tensor.nbytes
        self._total += tensor.nbytes

    def close(self) -> None:
        """Write what is left and give the files their final names."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            self._part(1).replace(self._folder / SINGLE)
            return
        places: dict[str, str] = {}
        for number, names in enumerate(self._shards, 1):
            final = f"model-{number:05}-of-{count:05}.safetensors"
            self._part(number).replace(self._folder / final)
            places |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self._total}, "weight_map": places}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        self._shards.append(list(self._waiting))
        save_file(self._waiting, self._part(len(self._shards)), metadata={"format": "pt"})
        self._waiting, self._bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"
