"""The device a model runs on, and copies of small tensors to it and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.errors import FailedPrecondition, InvalidArgument

AUTO = "auto"
_KINDS = ("cpu", "cuda")


def find_device(name: str) -> torch.device:
    """`auto` (the first GPU, else the CPU), `cpu`, `cuda` or `cuda:N`; a GPU always with its number.

    Raises InvalidArgument for a name that is none of these, FailedPrecondition for a GPU that is not there.
    """
    if name == AUTO:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise _unknown(name) from error
    if device.type not in _KINDS:
        raise _unknown(name)
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    number = device.index or 0
    if number >= count:
        raise FailedPrecondition(
            f"{name} is not there: this process sees {count} GPUs. Install a torch with CUDA, give the process a GPU, "
            "or set the device to cpu.",
            reason="DEVICE_MISSING",
        )
    return torch.device("cuda", number)


def _unknown(name: str) -> InvalidArgument:
    return InvalidArgument(f"device {name!r} is unknown; choose auto, cpu, cuda or cuda:N.")


def activate(device: torch.device) -> None:
    """Makes a GPU the calling thread's own: kernels go to the thread's current device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to the device without waiting for it."""
    return _staged(host, device).to(device, non_blocking=True)


def take_rows(table: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows, in this order: the table itself where it is all of them, else a copy; without a wait."""
    if len(rows) == len(table) and all(row == index for index, row in enumerate(rows)):
        return table
    return table[upload(torch.tensor(rows, dtype=torch.int64), table.device)]


def download(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one device on the CPU, by one copy: the host waits for each copy. Integers below 2^53 stay what they
    are."""
    if tensors[0].is_cpu:
        return tensors
    together = torch.cat([tensor.double().flatten() for tensor in tensors]).cpu()
    parts = together.split([tensor.numel() for tensor in tensors])
    return tuple(part.view(each.shape).to(each.dtype) for part, each in zip(parts, tensors, strict=True))


def _staged(host: Tensor, device: torch.device) -> Tensor:
    """In pinned memory for a GPU: a copy from ordinary memory would first wait for everything the device still has to
    do. The allocator does not reuse pinned memory before it was read.
    """
    return host if device.type == "cpu" else host.pin_memory()
