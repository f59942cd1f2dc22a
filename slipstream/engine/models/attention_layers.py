"""The shapes of a model's attention layers, read from one tiny forward pass.

Configurations name heads, windows and shared layers in a dozen ways; what reaches the attention function is the truth.
A model that asks for something we do not compute is refused here, before it serves.
"""

from __future__ import annotations

import torch

from slipstream.engine.attention.packed import planned
from slipstream.engine.kvcache.store import AttentionLayer
from slipstream.errors import FailedPrecondition

# Keywords some families give their attention function that change its result and that we do not compute.
_REFUSED = ("position_bias", "indices", "block_indices", "sinks", "is_cross_attention")


class Probe:
    """Stands in for the step plan during the watched pass; answers zeros."""

    def __init__(self) -> None:
        self.layers: list[AttentionLayer] = []
        self._keys: list[torch.Tensor] = []
        self.positions = torch.arange(2).unsqueeze(0)

    def attend(
        self,
        module: torch.nn.Module,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        extras: dict[str, object],
    ) -> torch.Tensor:
        query, key, value = states
        refused = [name for name in _REFUSED if extras.get(name) is not None and extras[name] is not False]
        if refused or not getattr(module, "is_causal", True):
            asks = f"for {', '.join(refused)}" if refused else "to look ahead"
            raise FailedPrecondition(f"{type(module).__name__} asks {asks}, which packed attention does not offer")
        same = [layer.index for layer, known in zip(self.layers, self._keys, strict=True) if known is key]
        index = int(module.layer_idx)  # type: ignore[arg-type]
        window = extras.get("sliding_window")
        self.layers.append(
            AttentionLayer(
                index=index,
                source=same[0] if same else index,
                heads=key.shape[1],
                key_dim=key.shape[3],
                value_dim=value.shape[3],
                window=window if isinstance(window, int) else None,
                dtype=key.dtype,
                device=key.device,
                group=query.shape[1] // key.shape[1],
            )
        )
        self._keys.append(key)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def probe_layers(model: torch.nn.Module, device: torch.device) -> list[AttentionLayer]:
    """The attention layers in the order they run; the model takes its tokens on `device`. Raises FailedPrecondition for
    a model that cannot be packed."""
    probe = Probe()
    run_tiny_pass(model, device, probe)
    return probe.layers


@torch.inference_mode()
def run_tiny_pass(model: torch.nn.Module, device: torch.device, probe: Probe, tokens: int = 2) -> None:
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    probe.positions = positions = torch.arange(tokens, device=device).unsqueeze(0)
    with planned(probe):
        model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=positions[0, :1])
