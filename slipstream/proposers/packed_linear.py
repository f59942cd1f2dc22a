"""Linear layers of heads as the engine has them: laid out for passes of few rows, of which each is computed alike."""

from __future__ import annotations

from torch import Tensor, nn

from slipstream.engine.models.linear import lay_out


class PackedLinear(nn.Module):
    """x [..., in] -> [..., out] by the fastest kernel of this machine; it has no parameters that could be trained."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach()
        self._multiply = lay_out([linear.weight.detach()], bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = self._multiply(x.reshape(-1, x.shape[-1]).contiguous())
        return rows.reshape(*x.shape[:-1], rows.shape[-1])


def pack(module: nn.Module) -> None:
    """Replaces every linear layer below `module` that is on a CPU. torch's own take four times as long for four rows
    in bfloat16, and are most of a head's pass."""
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            if child.weight.device.type == "cpu":
                setattr(module, name, PackedLinear(child))
        else:
            pack(child)
