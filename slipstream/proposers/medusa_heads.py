"""Medusa's heads (Cai et al. 2024, arXiv 2401.10774) in every published layout, which the tensors' names distinguish.

Head i reads the target's last hidden state f_t, of which the target's own output makes token t+1, and proposes token
t+2+i: W_i R(f), with one or more residual blocks R(x) = x + SiLU(A x + b) before it.

| layout | tensors |
|---|---|
| Medusa-1 | `{i}.{j}.linear.weight`, `{i}.{j}.linear.bias`, `{i}.{blocks}.weight` |
| Medusa-2, a whole target | the same behind `medusa_head.`, beside the target's |
| TGI's second | `{i}.0.linear.weight`, `{i}.0.linear.bias`; W is the target's output head |
| vLLM's | `blocks.{i}.layers.{j}.weight`, perhaps a bias, `lm_heads.{i}.weight` or one `lm_head.weight`, `token_map` |

Configurations are not believed: published ones state the wrong number of heads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch.nn.functional import linear, silu

from slipstream.engine.models.fast_dtype import dtype_on
from slipstream.proposers.weights import checkpoint_files, fitted, output_weight, read_tensors, unfit
from slipstream.tokenizer.vocabulary import model_folder

FILES = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin",
)
INSIDE_TARGET = "medusa_head."
PREFIXES = ("medusa_heads.", INSIDE_TARGET)
_BLOCK = re.compile(r"(?:(\d+)\.(\d+)\.linear|blocks\.(\d+)\.layers\.(\d+))\.(weight|bias)")
_OUTPUT = re.compile(r"(?:(\d+)\.(\d+)|lm_heads\.(\d+))\.weight")
SHARED_OUTPUT, TOKEN_MAP = "lm_head.weight", "token_map"

Block = tuple[torch.Tensor, torch.Tensor | None]
"""A [hidden, hidden] and b [hidden]."""


@dataclass(frozen=True)
class MedusaHeads:
    blocks: list[list[Block]]
    """Residual blocks of each head."""
    outputs: list[torch.Tensor]
    """[rows, hidden] W of each head; all of them one tensor where they share it."""
    vocabulary: int
    token_ids: torch.Tensor | None = None
    """int64 [rows]: the token of each row of W, where heads know a part of the vocabulary."""

    def __len__(self) -> int:
        return len(self.blocks)

    def on(self, place: torch.device) -> MedusaHeads:
        """The heads on this device, which the target's hidden states come on; on a CPU in the type that is fastest
        there. An output that heads share stays one tensor."""
        dtype = dtype_on(place, self.outputs[0].dtype)
        moved = {id(each): each.to(place, dtype) for each in self.outputs}
        blocks = [
            [(weight.to(place, dtype), None if bias is None else bias.to(place, dtype)) for weight, bias in head]
            for head in self.blocks
        ]
        ids = None if self.token_ids is None else self.token_ids.to(place)
        return replace(self, blocks=blocks, outputs=[moved[id(each)] for each in self.outputs], token_ids=ids)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [heads, rows, vocabulary] from last hidden states [rows, hidden]; -inf for tokens unknown to a
        head."""
        found = [self.logits_of(head, states) for head in range(len(self))]
        stacked = torch.stack(found).float()
        if self.token_ids is not None:
            everything = stacked.new_full((*stacked.shape[:2], self.vocabulary), -torch.inf)
            return everything.index_copy_(2, self.token_ids, stacked)
        return stacked

    def logits_of(self, head: int, states: torch.Tensor) -> torch.Tensor:
        x = states.to(self.outputs[head].dtype)
        for weight, bias in self.blocks[head]:
            x = x + silu(linear(x, weight, bias))
        return linear(x, self.outputs[head])


def load_heads(name: str, target: str) -> MedusaHeads:
    """Heads from a folder or file, for this target, in the target's type.

    Raises NotFound without such files, FailedPrecondition for tensors that are missing, left over, of another shape
    than the target's, not finite, or never trained.
    """
    path = Path(name).expanduser()
    files = [path] if path.is_file() else checkpoint_files(model_folder(name), FILES)
    inside = files[0].name.startswith("model.safetensors") or files[0].suffix == ".bin"
    held = read_tensors(files, lambda key: True)
    if inside and any(key.startswith(INSIDE_TARGET) for key in held):
        held = {key: value for key, value in held.items() if key.startswith(INSIDE_TARGET)}
    tensors = {_bare(key): value for key, value in held.items()}
    return _HeadReader(name, tensors, output_weight(target)).read()


def _bare(key: str) -> str:
    for prefix in PREFIXES:
        key = key.removeprefix(prefix)
    return key


@dataclass
class _HeadReader:
    """Takes one file's tensors apart; what is left is an error."""

    name: str
    tensors: dict[str, torch.Tensor]
    target_output: torch.Tensor
    used: set[str] = field(default_factory=set)

    def read(self) -> MedusaHeads:
        blocks, outputs = self._keys(_BLOCK), self._keys(_OUTPUT)
        if not blocks:
            some = ", ".join(sorted(self.tensors)[:3]) or "nothing"
            raise unfit(f"{self.name} holds no Medusa heads: it has {some} where 0.0.linear.weight is expected.")
        token_ids = self._token_map()
        rows = None if token_ids is None else len(token_ids)
        heads = sorted({head for head, _ in blocks})
        made = []
        for number in range(heads[-1] + 1):
            depth = 1 + max((block for head, block in blocks if head == number), default=0)
            made.append([self._block(number, block, blocks) for block in range(depth)])
        found = self._outputs(len(made), outputs, rows)
        if left := self.tensors.keys() - self.used:
            raise unfit(f"{self.name} has the tensor {min(left)}, which no layout of Medusa heads knows.")
        if all(not bool(block[0].any()) for head in made for block in head):
            raise unfit(f"the heads in {self.name} are not trained: every block is zero.")
        return MedusaHeads(made, found, self.target_output.shape[0], token_ids)

    def _keys(self, pattern: re.Pattern[str]) -> dict[tuple[int, int], str]:
        """(head, place in the head) -> the name of its weight."""
        found: dict[tuple[int, int], str] = {}
        for key in self.tensors:
            if (match := pattern.fullmatch(key)) and key.endswith("weight"):
                numbers = [int(each) for each in match.groups() if each is not None and each.isdecimal()]
                found[numbers[0], numbers[1] if len(numbers) > 1 else 0] = key
        return found

    def _block(self, head: int, block: int, keys: dict[tuple[int, int], str]) -> Block:
        width = self.target_output.shape[1]
        key = keys.get((head, block), f"{head}.{block}.linear.weight")
        bias = key.removesuffix("weight") + "bias"
        needs_bias = key.endswith(".linear.weight")
        weight = self._tensor(key, (width, width))
        return weight, self._tensor(bias, (width,)) if needs_bias or bias in self.tensors else None

    def _outputs(self, heads: int, keys: dict[tuple[int, int], str], rows: int | None) -> list[torch.Tensor]:
        shape = (self.target_output.shape[0] if rows is None else rows, self.target_output.shape[1])
        if keys:
            named = {head: key for (head, _), key in keys.items()}
            return [self._tensor(named.get(head, f"{head}.1.weight"), shape) for head in range(heads)]
        if SHARED_OUTPUT in self.tensors:
            return [self._tensor(SHARED_OUTPUT, shape)] * heads
        if rows is not None:
            raise unfit(f"{self.name} has a {TOKEN_MAP} and lacks the tensor {SHARED_OUTPUT} {list(shape)}.")
        return [self.target_output] * heads

    def _token_map(self) -> torch.Tensor | None:
        ids = self.tensors.get(TOKEN_MAP)
        if ids is None:
            return None
        self.used.add(TOKEN_MAP)
        size = self.target_output.shape[0]
        if ids.dim() != 1 or len(set(ids.tolist())) != len(ids) or not all(0 <= each < size for each in ids.tolist()):
            raise unfit(f"{self.name}: {TOKEN_MAP} {list(ids.shape)} must hold different token ids below {size}.")
        return ids.long()

    def _tensor(self, key: str, shape: tuple[int, ...]) -> torch.Tensor:
        if key not in self.tensors:
            raise unfit(f"{self.name} lacks the tensor {key} {list(shape)}.")
        self.used.add(key)
        padded = len(shape) == 2 and shape[0] != shape[1]
        return fitted(self.name, key, self.tensors[key], shape, padded).to(self.target_output.dtype)
