"""Opening an engine by name: a checkpoint's folder or hub id, or an emulated one for load and scale tests."""

from __future__ import annotations

from slipstream.engine.emulated.engine import EmulatedEngine
from slipstream.engine.emulated.model import EMULATED, read_settings
from slipstream.engine.engine import Engine
from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.errors import InvalidArgument


def open_engine(
    model: str,
    dtype: str = "auto",
    kv_tokens: int = 65_536,
    quantisation: str = "",
    lean: bool = True,
    device: str = "auto",
) -> Engine:
    """`model` on this machine, with KV room for `kv_tokens` tokens of all sessions together; `quantisation` is empty
    or one of `slipstream.engine.models.quantisation`. `lean`: see `slipstream.engine.models.lean_selection`;
    `device`: `slipstream.engine.devices`. To be called on the thread that will use the engine.

    Raises NotFound or FailedPrecondition for a checkpoint or a device that is not there or cannot be served,
    InvalidArgument for settings that do not go together, ResourceExhausted for less room than one block.
    """
    if model.startswith(EMULATED):
        if quantisation:
            raise InvalidArgument(f"{model} has no weights to quantise; leave quantisation empty.")
        if device not in ("auto", "cpu"):
            raise InvalidArgument(f"{model} has nothing to compute on {device}; leave the device at auto.")
        emulated, cost = read_settings(model)
        return EmulatedEngine(emulated, cost, BlockPool.holding(kv_tokens, block_size=32))
    # Loading transformers takes seconds; an emulated worker does without.
    from slipstream.engine.models.quantisation import silence_quantiser_logs

    silence_quantiser_logs()
    from slipstream.engine.devices import activate, find_device
    from slipstream.engine.models.checkpoint import load_checkpoint
    from slipstream.engine.torch_engine import TorchEngine

    place = find_device(device)
    activate(place)
    checkpoint = load_checkpoint(model, dtype, str(place), quantisation=quantisation, lean=lean)
    return TorchEngine(checkpoint, kv_tokens)
