"""EAGLE checkpoints: the original layouts and that of `speculators`, read for one target and written.

| layout | configuration | tensors |
|---|---|---|
| EAGLE-1 and EAGLE-2 | a Llama's, perhaps `bias` | `fc.*`, `layers.0.*` without an input norm |
| the same of `speculators` | `transformer_layer_config`, `fusion_bias` | `fusion_fc.*`, `transformer.*` |
| EAGLE-3 | a Llama's, `draft_vocab_size`, `eagle_config` | `fc.weight`, `midlayer.*`, `norm`, `lm_head`, `d2t`, `t2d` |
| the same of `speculators` | `transformer_layer_config`, flags beside it | `layers.0.*` in place of `midlayer.*` |

`d2t` holds offsets: row i of the output is the target's token i + d2t[i]. A head of either kind may lack
`embed_tokens.weight` and `lm_head.weight`; it takes the target's then, of the output the rows that `d2t` names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.proposers.eagle_head import EagleConfig, EagleHead
from slipstream.proposers.head_file import EMBEDDING, KNOWN, OFFSETS, OUTPUT, HeadFile, HeadTarget, read_layer
from slipstream.proposers.weights import embedding_weight, unfit

PREFIXES = ("model.", "draft_model.")
RENAMED = {
    "midlayer.": "layers.0.",
    "transformer.": "layers.0.",
    "fusion_fc.": "fc.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def default_layers(layer_count: int) -> tuple[int, ...]:
    """The layers that EAGLE-3 heads read where their configuration names none."""
    return 2, layer_count // 2, layer_count - 3


def open_head(config: EagleConfig, target: HeadTarget, token_ids: Tensor | None = None) -> EagleHead:
    """A head with random weights and the target's embeddings and output; `token_ids`, ascending: the tokens that
    EAGLE-3's own output knows, else all."""
    head = EagleHead(config)
    with torch.no_grad():
        head.embed_tokens.weight.copy_(embedding_weight(target.name))
        head.lm_head.weight.copy_(target.output if token_ids is None else target.output[token_ids])
    if token_ids is not None:
        head.target_ids = token_ids
    return head


def load_head(name: str, target: HeadTarget, dtype: torch.dtype) -> EagleHead:
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
    same_width = config.layer.hidden_size == config.target_width
    file.fill(head, target, of_target + [OUTPUT] * (not config.layers or same_width), dtype, head.target_ids)
    return head


def _plain(key: str) -> str:
    for prefix in PREFIXES:
        key = key.removeprefix(prefix)
    for old, new in RENAMED.items():
        if key.startswith(old):
            return new + key.removeprefix(old)
    return key


def _read_config(file: HeadFile, target: HeadTarget) -> EagleConfig:
    name, raw, tensors = file.name, file.raw, file.tensors
    kind = raw.get("speculators_model_type")
    if kind not in (None, "eagle", "eagle3"):
        raise unfit(f"{name} is a {kind!r} drafter of speculators; the method eagle reads eagle and eagle3.")
    if kind == "eagle" and raw.get("layernorms"):
        raise unfit(f"{name} has norms before its fusion (layernorms), which no maintained format has; train it anew.")
    fields = raw if kind is None else raw.get("transformer_layer_config") or {}
    third = "layers.0.hidden_norm.weight" in tensors
    if third and fields.get("num_hidden_layers") == target.layer_count:
        fields = fields | {"num_hidden_layers": 1}  # some name the target's layers; the file has one of its own
    layer = read_layer(name, fields, target, 1)
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


def _layers(name: str, raw: dict[str, Any], nested: dict[str, Any], target: HeadTarget) -> tuple[int, ...]:
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
    """Writes `config.json` and `model.safetensors`, in the layout of `speculators` (EAGLE-3 only) or the original.

    Embeddings that are the target's are left out: they are most of the file where the vocabulary is large."""
    config = head.config
    tensors = {key: value.detach().clone().contiguous() for key, value in head.state_dict().items()}
    if torch.equal(tensors[EMBEDDING], embedding_weight(target).to(tensors[EMBEDDING].dtype)):
        del tensors[EMBEDDING]
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
