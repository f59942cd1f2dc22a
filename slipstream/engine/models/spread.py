"""A target that is larger than one device: over what its weights are spread, and what cannot be spread.

ranks        tensor parallel, one process a device: the library's plan of the family cuts every layer, so all
             devices work on every token
device_map   one process: whole layers on several devices, in the machine's memory or on its disk, one after the
             other; the library's hooks carry activations (and offloaded weights) along. No faster, it only fits.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import FailedPrecondition, InvalidArgument

EXTRA = "pip install 'slipstream-serve[spread]'"
AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")
_KEYS = "layers.*.self_attn.k_proj"
_HEADS = ("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads")


@dataclass(frozen=True, slots=True)
class Spread:
    """By default one device has everything."""

    device: str = "auto"
    """The one device, as `slipstream.engine.devices` names it."""
    ranks: int = 1
    device_map: str = ""
    """One of AUTOMATIC, or a JSON file {module: device}, where a device is cpu, disk or the number of a GPU."""
    device_memory: tuple[str, ...] = ()
    """For AUTOMATIC: the most weights a device may get, as 0=20GiB, cpu=60GiB."""
    offload_folder: str = ""
    """Folder for weights on `disk` that the checkpoint has in another layout."""


ONE_DEVICE = Spread()


def spread_options(spread: Spread, config: Any, quantised: str) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained`. `quantised`: the quantiser of the weights, now or after loading.

    Raises InvalidArgument for settings that cannot be read or do not go together, FailedPrecondition for a model that
    cannot be cut for so many ranks and for a package that is missing.
    """
    if spread.ranks == 1 and not spread.device_map:
        if spread.device_memory or spread.offload_folder:
            raise InvalidArgument("device_memory and offload_folder need a device_map.")
        return {}
    if importlib.util.find_spec("accelerate") is None:
        raise FailedPrecondition(
            f"Spreading a model needs accelerate, which is not installed: {EXTRA}.", reason="SPREADER_MISSING"
        )
    if spread.ranks == 1:
        return _mapped(spread)
    if spread.device_map:
        raise InvalidArgument("a device_map is for one process; leave it empty, or start without torchrun.")
    if quantised:
        raise _uncuttable(f"it is quantised ({quantised})", "Choose full weights, or one process with a device_map")
    _check_cut(config, spread.ranks)
    from transformers.distributed.configuration_utils import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=spread.ranks)}


def _mapped(spread: Spread) -> dict[str, Any]:
    options: dict[str, Any] = {"device_map": spread.device_map}
    if spread.device_map not in AUTOMATIC:
        options["device_map"] = _read_map(Path(spread.device_map))
    if spread.device_memory:
        options["max_memory"] = dict(map(_memory, spread.device_memory))
    if spread.offload_folder:
        options["offload_folder"] = spread.offload_folder
    return options


def _read_map(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"device_map {file} is none of {', '.join(AUTOMATIC)}, and no JSON file that can be read: {error}."
        ) from error
    if not isinstance(found, dict) or not found or not all(isinstance(place, int | str) for place in found.values()):
        raise InvalidArgument(f'{file} must map modules to devices: {{"model.layers.0": 0, "lm_head": "cpu"}}.')
    return found


def _memory(text: str) -> tuple[int | str, str]:
    device, separator, amount = text.partition("=")
    if not device or not separator or not amount:
        raise InvalidArgument(f"device_memory {text!r} cannot be read; write 0=20GiB or cpu=60GiB.")
    return (int(device) if device.isdigit() else device), amount


def _check_cut(config: Any, ranks: int) -> None:
    text = config.get_text_config(decoder=True)
    plan: dict[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    if not plan:
        raise _uncuttable(f"the library has no plan to cut a {text.model_type}", "Start one process, with a device_map")
    if plan.get(_KEYS) != "colwise":  # every rank attends with all heads
        return
    for name in _HEADS:
        heads = getattr(text, name, None)
        if heads is not None and heads % ranks:
            raise _uncuttable(f"its {name} is {heads}", "Start as many ranks as divide that")


def _uncuttable(why: str, advice: str) -> FailedPrecondition:
    return FailedPrecondition(f"The model cannot be cut for several ranks: {why}. {advice}.", reason="NOT_DIVISIBLE")
