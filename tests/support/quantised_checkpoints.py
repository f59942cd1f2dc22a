"""Checkpoints as others quantise them, made from random ones: their files, and the numbers that these stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

BLOCK = 32
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""What the lower three bits of an MXFP4 number stand for; the fourth is its sign."""


def state_of(folder: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return state


def save_fp8(folder: Path, out: Path) -> dict[str, Tensor]:
    """As DeepSeek and Qwen publish them: e4m3 with a scale for each block of weights. Returns the weights."""
    files: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for name, weight in state_of(folder).items():
        if not name.endswith("proj.weight"):
            files[name] = numbers[name] = weight.to(torch.bfloat16)
            continue
        rows, columns = weight.shape
        parts = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scales = parts.abs().amax(dim=(1, 3)) / 448.0
        packed = (parts / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        files[name] = packed.view(rows, columns)
        files[f"{name}_scale_inv"] = scales
        numbers[name] = (packed.float() * scales[:, None, :, None]).view(rows, columns).to(torch.bfloat16)
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    _save(folder, out, files, method)
    return numbers


def save_mxfp4(folder: Path, out: Path) -> dict[str, Tensor]:
    """As gpt-oss is published: experts of two numbers a byte with a power of two for each 32. Returns the weights."""
    files: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    draw = torch.Generator().manual_seed(3)
    for name, weight in state_of(folder).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            files[name] = numbers[name] = weight.to(torch.bfloat16)
            continue
        experts, inputs, outputs = weight.shape
        nibbles = torch.randint(16, (experts, outputs, inputs // BLOCK, BLOCK), generator=draw)
        exponents = torch.randint(-4, -1, (experts, outputs, inputs // BLOCK), generator=draw)
        files[f"{name}_blocks"] = (nibbles[..., 0::2] + 16 * nibbles[..., 1::2]).to(torch.uint8)
        files[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
        values = E2M1[nibbles % 8] * torch.where(nibbles >= 8, -1.0, 1.0) * torch.exp2(exponents.float())[..., None]
        numbers[name] = values.flatten(2).transpose(1, 2).to(torch.bfloat16)
    _save(folder, out, files, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    return numbers


def name_method(folder: Path, out: Path, method: dict[str, Any]) -> Path:
    """A folder whose configuration names a method, and whose weights nothing may read."""
    _save(folder, out, {}, method)
    (out / "model.safetensors").write_bytes(b"not read")
    return out


def _save(folder: Path, out: Path, files: dict[str, Tensor], method: dict[str, Any]) -> None:
    out.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in files.items()}, out / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16", "quantization_config": method}
    (out / "config.json").write_text(json.dumps(config))
    shutil.copy(folder / "tokenizer.json", out)
