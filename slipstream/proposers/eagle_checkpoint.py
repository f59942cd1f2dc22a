"""EAGLE checkpoints: the original layouts and that of `speculators`, read for one target and written.

| layout | configuration | tensors |
|---|---|---|
| EAGLE-1 and EAGLE-2 | a Llama's, perhaps `bias` | `fc.*`, `layers.0.*` without an input norm |
| the same of `speculators` | `transformer_layer_config`, `fusion_bias` | `fusion_fc.*`, `transformer.*` |
| EAGLE-3 | a Llama's, `draft_vocab_size`, `eagle_config` | `fc.weight`, `midlayer.*`, `norm`, `lm_head`, `d2t`, `t2d` |
| the same of `speculators` | `transformer_layer_config`, flags beside it | `layers.0.*` in place of `midlayer.*` |

`d2t` holds offsets: row i of the output is the target's token i + d2t[i]. A head of either kind may lack
`embed_tokens.weight`; it takes the target's then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from slipstream.proposers.eagle_head import EagleConfig, EagleHead
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
PREFIXES = ("model.", "draft_model.")
RENAMED = {
    "midlayer.": "layers.0.",
    "transformer.": "layers.0.",
    "fusion_fc.": "fc.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
OFFSETS, KNOWN = "d2t", "t2d"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
FAMILIES = ("llama", "qwen3")


@dataclass(frozen=True, slots=True)
class EagleTarget:
    """What a head has to fit."""

    name: str
    output: Tensor
    """[vocabulary, width]."""
    layer_count: int

    @property
    def vocabulary(self) -> int:
        return self.output.shape[0]


def read_target(name: str) -> EagleTarget:
    """Raises what `output_weight` raises."""
    output = output_weight(name)
    raw = read_json(tokenizer_file(name, "config.json"))
    text = raw.get("text_config") or raw
    return EagleTarget(name, output, int(text["num_hidden_layers"]))


@dataclass(slots=True)
class HeadFile:
    """The tensors of one folder, taken one by one: what is left is an error."""

    name: str
    raw: dict[str, Any]
    """Its configuration."""
    tensors: dict[str, Tensor]
    original: dict[str, str]
    """How the file calls each tensor."""

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

    def fill(self, head: nn.Module, target: EagleTarget, of_target: Collection[str], dtype: torch.dtype) -> None:
        """Gives a head its tensors, in this type; those of `of_target` may be the target's own. Raises
        FailedPrecondition for tensors that are missing, left over, of another shape, not finite, or never trained."""
        state: dict[str, Tensor] = {}
        for key, wanted in head.state_dict().items():
            shape, padded = tuple(wanted.shape), key in (EMBEDDING, OUTPUT)
            if key in self.tensors:
                state[key] = fitted(self.name, self.original[key], self.tensors.pop(key), shape, padded).to(dtype)
            elif key in of_target:
                own = embedding_weight(target.name) if key == EMBEDDING else target.output
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


def default_layers(layer_count: int) -> tuple[int, ...]:
    """The layers that EAGLE-3 heads read where their configuration names none."""
    return 2, layer_count // 2, layer_count - 3


def open_head(config: EagleConfig, target: EagleTarget, token_ids: Tensor | None = None) -> EagleHead:
    """A head with random weights and the target's embeddings and output; `token_ids`, ascending: the tokens that
    EAGLE-3's own output knows, else all."""
    head = EagleHead(config)
    with torch.no_grad():
        head.embed_tokens.weight.copy_(embedding_weight(target.name))
        head.lm_head.weight.copy_(target.output if token_ids is None else target.output[token_ids])
    if token_ids is not None:
        head.target_ids = token_ids
    return head


def load_head(name: str, target: EagleTarget, dtype: torch.dtype) -> EagleHead:
    """The head in a folder, in this type.

    Raises NotFound without such files, FailedPrecondition for a configuration that cannot be followed and for tensors
    that are missing, left over, of another shape than the target's, not finite, or never trained.
    """
    file = HeadFile.read(name, _plain)
    config = _read_config(file, target)
    with torch.device("meta"):
        head = EagleHead(config)
    head.rotary = type(head.rotary)(config.layer)  # its frequencies are computed, not read
    rows = config.draft_vocabulary if config.layers else config.vocabulary
    head.target_ids = file.target_ids(rows, config.vocabulary)
    of_target = [EMBEDDING] if config.width == config.target_width else []
    file.fill(head, target, of_target + [OUTPUT] * (not config.layers), dtype)
    return head


def _plain(key: str) -> str:
    for prefix in PREFIXES:
        key = key.removeprefix(prefix)
    for old, new in RENAMED.items():
        if key.startswith(old):
            return new + key.removeprefix(old)
    return key


def _read_config(file: HeadFile, target: EagleTarget) -> EagleConfig:
    name, raw, tensors = file.name, file.raw, file.tensors
    kind = raw.get("speculators_model_type")
    if kind not in (None, "eagle", "eagle3"):
        raise unfit(f"{name} is a {kind!r} drafter of speculators; the method eagle reads eagle and eagle3.")
    if kind == "eagle" and raw.get("layernorms"):
        raise unfit(f"{name} has norms before its fusion (layernorms), which no maintained format has; train it anew.")
    fields = raw if kind is None else raw.get("transformer_layer_config") or {}
    layer = read_layer(name, fields, target, 1)
    third = "layers.0.hidden_norm.weight" in tensors
    nested = raw.get("eagle_config") or {}
    known = tensors.get(OFFSETS)
    return EagleConfig(
        layer=layer,
        target_width=target.output.shape[1],
        layers=_layers(name, raw, nested, target) if third else (),
        draft_vocabulary=0 if not third else target.vocabulary if known is None else len(known),
        fc_bias="fc.bias" in tensors,
        **{flag: third and bool(nested.get(flag, raw.get(flag, False))) for flag in FLAGS},
    )


def read_layer(name: str, fields: dict[str, Any], target: EagleTarget, count: int | None = None) -> PretrainedConfig:
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


def _layers(name: str, raw: dict[str, Any], nested: dict[str, Any], target: EagleTarget) -> tuple[int, ...]:
    """Numbers of the residual streams that enter a layer. SpecForge numbers the layers whose output it means."""
    key = "eagle_aux_hidden_state_layer_ids"
    found = raw.get(key) or nested.get(key)
    count = target.layer_count
    numbers = tuple(int(each) for each in found) if isinstance(found, list) else default_layers(count)
    if found is not None and "speculators_model_type" not in raw and numbers == (1, count // 2 - 1, count - 4):
        numbers = tuple(each + 1 for each in numbers)
    if not all(0 <= each < count for each in numbers):
        raise unfit(f"{name} reads the target's layers {list(numbers)}; {target.name} has layers 0 to {count - 1}.")
    return numbers


def save_head(head: EagleHead, folder: Path, target: str, *, speculators: bool = True) -> None:
    """Writes `config.json` and `model.safetensors`, in the layout of `speculators` (EAGLE-3 only) or the original."""
    config = head.config
    tensors = {key: value.detach().clone().contiguous() for key, value in head.state_dict().items()}
    if config.layers and config.draft_vocabulary < config.vocabulary:
        tensors[OFFSETS] = head.target_ids - torch.arange(config.draft_vocabulary)
        tensors[KNOWN] = torch.zeros(config.vocabulary, dtype=torch.bool).index_fill_(0, head.target_ids, True)
    if not config.layers:
        del tensors[OUTPUT]
    flags: dict[str, Any] = {flag: getattr(config, flag) for flag in FLAGS}
    layer, numbers = config.layer.to_diff_dict(), list(config.layers)
    if config.layers and speculators:
        content = flags | {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "transformer_layer_config": layer,
            "draft_vocab_size": config.draft_vocabulary,
            "target_hidden_size": config.target_width,
            "eagle_aux_hidden_state_layer_ids": numbers,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": target, "architectures": []},
            },
        }
    elif config.layers:
        tensors = {key.replace("layers.0.", "midlayer."): value for key, value in tensors.items()}
        content = layer | flags | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": config.draft_vocabulary,
            "target_hidden_size": config.target_width,
            "num_aux_hidden_states": len(numbers),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": numbers,
                "use_aux_hidden_state": True,
                "norm_before_fc": config.norm_before_fc,
            },
        }  # fmt: skip
    else:
        content = layer | {"architectures": ["LlamaForCausalLM"], "bias": config.fc_bias}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
