"""Reads single tensors of a checkpoint: safetensors, or pickled files without running what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from slipstream.errors import FailedPrecondition, NotFound
from slipstream.tokenizer.vocabulary import EMULATED, is_local, model_folder, read_json, tokenizer_file

EMBEDDING_NAMES = ("model.embed_tokens.weight", "embed_tokens.weight", "transformer.wte.weight")
OUTPUT_NAMES = (
    *("lm_head.weight", "model.lm_head.weight", "embed_out.weight"),
    *EMBEDDING_NAMES,
)
"""Names of a target's output head; a tied one is only there as the embeddings."""
PADDING = 128
"""Most rows by which a head's tensor may be longer than the vocabulary: some are padded."""


def unfit(sentence: str) -> FailedPrecondition:
    """The error for heads that do not fit their format or their target."""
    return FailedPrecondition(sentence, reason="HEAD_UNFIT")


def fitted(name: str, key: str, tensor: torch.Tensor, shape: tuple[int, ...], padded: bool) -> torch.Tensor:
    """The tensor where it has this shape, or is a `padded` one with more rows, which are cut. Raises FailedPrecondition
    for another shape and for numbers that are not finite."""
    extra = PADDING if padded else 0
    same = len(shape) == tensor.dim() and tensor.shape[1:] == shape[1:]
    if not same or not shape[0] <= tensor.shape[0] <= shape[0] + extra:
        raise unfit(
            f"{name}: the tensor {key} is {list(tensor.shape)}, this target needs {list(shape)}; "
            "it was trained for another model."
        )
    if not bool(tensor.isfinite().all()):
        raise unfit(f"{name}: the tensor {key} {list(shape)} holds numbers that are not finite.")
    return tensor[: shape[0]].contiguous()


def read_tensors(files: list[Path], wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """The tensors of these files whose names are wanted. Raises FailedPrecondition for a file that cannot be read."""
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors |= _read_safetensors(file, wanted) if file.suffix == ".safetensors" else _read_pickled(file, wanted)
        except Exception as error:  # torch and safetensors raise many kinds for files that are broken or hostile
            raise unfit(f"{file} cannot be read as tensors: {str(error).splitlines()[0]}") from error
    return tensors


def checkpoint_files(folder: Path, names: tuple[str, ...]) -> list[Path]:
    """The first of these files that the folder has; of an index, the shards that it names. Raises NotFound for none."""
    for name in names:
        file = folder / name
        if file.is_file() and name.endswith(".index.json"):
            shards = read_json(file).get("weight_map", {})
            return [folder / shard for shard in sorted(set(shards.values()))]
        if file.is_file():
            return [file]
    raise NotFound(f"The folder {folder} has none of {', '.join(names)}.", reason="FILE_MISSING")


def output_weight(target: str) -> torch.Tensor:
    """[vocabulary, hidden]: what the target turns its last hidden states into logits with.

    Raises NotFound or FailedPrecondition for a target whose files do not hold it.
    """
    return _weight_of(target, OUTPUT_NAMES)


def embedding_weight(target: str) -> torch.Tensor:
    """[vocabulary, hidden]: the target's embeddings. Raises like `output_weight`."""
    return _weight_of(target, EMBEDDING_NAMES)


def _weight_of(target: str, names: tuple[str, ...]) -> torch.Tensor:
    if target.startswith(f"{EMULATED}:"):
        raise FailedPrecondition(f"{target} has no hidden states; choose a method that reads none.")
    held = {name: file for file, names_of in _files_of(target) for name in names_of}
    for name in names:
        for known, file in held.items():
            if known == name or known.endswith(f".{name}"):
                return read_tensors([file], known.__eq__)[known]
    raise unfit(f"the target {target} has none of the tensors {', '.join(names)}.")


def _files_of(target: str) -> Iterator[tuple[Path, list[str]]]:
    """The target's safetensors files, each with the names of its tensors."""
    if is_local(target):
        files = checkpoint_files(model_folder(target), ("model.safetensors.index.json", "model.safetensors"))
    else:
        try:
            index = read_json(tokenizer_file(target, "model.safetensors.index.json"))
            shards = sorted(set(index["weight_map"].values()))
        except NotFound:
            shards = ["model.safetensors"]
        files = [tokenizer_file(target, shard) for shard in shards]
    for file in files:
        with safe_open(file, "pt") as opened:
            yield file, list(opened.keys())


def _read_safetensors(file: Path, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys() if wanted(name)}  # noqa: SIM118


def _read_pickled(file: Path, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    held = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(held, Mapping):
        raise unfit(f"{file} holds no named tensors.")
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor) and wanted(name)}
