"""Files of draft heads with a layer of their own, EAGLE's, read for one target: every tensor has to be there, fit and
be used, and what does not is refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from slipstream.proposers.weights import (
    checkpoint_files,
    embedding_weight,
    fitted,
    output_weight,
    read_tensors,
    unfit,
)
from slipstream.tokenizer.vocabulary import model_folder, read_json, tokenizer_file

FILES = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin")
EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
OFFSETS, KNOWN = "d2t", "t2d"
FAMILIES = ("llama", "qwen3")


@dataclass(frozen=True, slots=True)
class HeadTarget:
    """Properties of a target that a head has to fit."""

    name: str
    output: Tensor
    """[vocabulary, width]."""
    layer_count: int

    @property
    def vocabulary(self) -> int:
        return self.output.shape[0]


def read_target(name: str) -> HeadTarget:
    """Raises what `output_weight` raises."""
    output = output_weight(name)
    raw = read_json(tokenizer_file(name, "config.json"))
    text = raw.get("text_config") or raw
    return HeadTarget(name, output, int(text["num_hidden_layers"]))


@dataclass(slots=True)
class HeadFile:
    """The tensors of one folder, taken one by one: what is left is an error."""

    name: str
    raw: dict[str, Any]
    """Its configuration."""
    tensors: dict[str, Tensor]
    original: dict[str, str]
    """The file's name of each tensor."""

    @classmethod
    def read(cls, name: str, plain: Callable[[str], str]) -> HeadFile:
        """`plain` gives each tensor the name that the module has for it. Raises NotFound and FailedPrecondition."""
        folder = model_folder(name)
        raw = read_json(folder / "config.json") if (folder / "config.json").is_file() else None
        files = checkpoint_files(folder, FILES)
        if raw is None:
            raise unfit(f"{folder} has no config.json, which a head's shapes are read from.")
        held = read_tensors(files, lambda key: True)
        original = {plain(key): key for key in held}
        return cls(str(folder), raw, {own: held[key] for own, key in original.items()}, original)

    def fill(
        self,
        head: nn.Module,
        target: HeadTarget,
        of_target: Collection[str],
        dtype: torch.dtype,
        rows: Tensor | None = None,
    ) -> None:
        """Gives a head its tensors, in this type; those of `of_target` may be the target's own, of its output the
        `rows` that the head knows. Raises
        FailedPrecondition for tensors that are missing, left over, of another shape, not finite, or never trained."""
        state: dict[str, Tensor] = {}
        for key, wanted in head.state_dict().items():
            shape, padded = tuple(wanted.shape), key in (EMBEDDING, OUTPUT)
            if key in self.tensors:
                state[key] = fitted(self.name, self.original[key], self.tensors.pop(key), shape, padded).to(dtype)
            elif key in of_target:
                own = embedding_weight(target.name) if key == EMBEDDING else target.output
                if key == OUTPUT and rows is not None and len(rows) < len(own):
                    own = own[rows]
                state[key] = fitted(target.name, key, own, shape, padded).to(dtype)
            else:
                midlayer = any("midlayer." in each for each in self.original.values())
                shown = key.replace("layers.0.", "midlayer.") if midlayer else key
                raise unfit(f"{self.name} lacks the tensor {shown} {list(shape)}.")
        if self.tensors:
            left = self.original[min(self.tensors)]
            raise unfit(f"{self.name} has the tensor {left}, which no layout of such heads knows.")
        if not bool(state["fc.weight"].any()):
            raise unfit(f"the head in {self.name} is not trained: fc.weight is zero.")
        head.load_state_dict(state, assign=True)
        head.eval().requires_grad_(False)

    def target_ids(self, rows: int, vocabulary: int) -> Tensor:
        """The target's token of each row of the output. Raises FailedPrecondition where the two maps disagree."""
        offsets, known = self.tensors.pop(OFFSETS, None), self.tensors.pop(KNOWN, None)
        if offsets is None:
            return torch.arange(rows)
        ids = torch.arange(rows) + offsets.long()
        ascending = bool((ids.diff() > 0).all())
        if not ascending or int(ids[0]) < 0 or int(ids[-1]) >= vocabulary:
            raise unfit(f"{self.name}: the offsets {OFFSETS} [{rows}] must lead to ascending token ids below "
                        f"{vocabulary}.")  # fmt: skip
        if known is not None:
            known = fitted(self.name, KNOWN, known, (vocabulary,), padded=True)
            if int(known.sum()) != rows or not bool(known[ids].all()):
                raise unfit(f"{self.name}: {KNOWN} [{vocabulary}] and {OFFSETS} [{rows}] mean different tokens.")
        return ids


def read_layer(name: str, fields: dict[str, Any], target: HeadTarget, count: int | None = None) -> PretrainedConfig:
    """The configuration of draft layers, of which there have to be `count`. Raises FailedPrecondition for others than
    are read."""
    family = fields.get("model_type", "llama")
    if family not in FAMILIES:
        raise unfit(f"{name}: the draft layer is a {family!r} one; these are read: {', '.join(FAMILIES)}.")
    if count is not None and fields.get("num_hidden_layers", 1) != count:
        raise unfit(f"{name} has {fields['num_hidden_layers']} draft layers; the method eagle reads heads with one.")
    if fields.get("hidden_act", "silu") != "silu":
        raise unfit(f"{name}: hidden_act is {fields['hidden_act']!r}; only 'silu' is read.")
    wanted = {key: value for key, value in fields.items() if key not in ("model_type", "vocab_size", "architectures")}
    try:
        return AutoConfig.for_model(family, **wanted, vocab_size=target.vocabulary)
    except (TypeError, ValueError) as error:
        raise unfit(f"{name}: config.json is no {family} layer's: {str(error).splitlines()[0]}") from error
