"""A virtual GPU computes what a CPU computes, and counts what it was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.virtual_gpu import DEVICE, Remote, VirtualGPU
from slipstream.engine.devices import download, upload

NUMBERS = torch.arange(12.0).view(3, 4)


def test_operators_on_the_virtual_gpu_equal_those_on_a_cpu() -> None:
    weight = torch.randn(5, 4)
    with torch.inference_mode(), VirtualGPU():
        there = Remote(NUMBERS)
        assert not there.is_cpu and there.device == DEVICE
        product = torch.nn.functional.linear(there, Remote(weight))
        assert product.device == DEVICE
        assert torch.equal(product.cpu(), torch.nn.functional.linear(NUMBERS, weight))
        there[1] = 7.0
        assert there[1:, :1].tolist() == [[7.0], [8.0]]
    assert NUMBERS[1, 0] == 7.0  # it lies where the CPU has it
    NUMBERS[1] = torch.arange(4.0, 8.0)


@pytest.mark.parametrize(
    ("step", "launches", "read_and_written"),
    [
        (lambda x: x + 1.0, 1, 96),
        (lambda x: x.view(4, 3)[1:].t(), 0, 0),
        (lambda x: x.add_(0.0), 1, 96),
        (lambda x: x.double(), 1, 144),
        (lambda x: torch.nn.functional.softmax(x, -1), 1, 96),
        (lambda x: torch.nn.functional.linear(x, x), 1, 48 + 48 + 36),
        (lambda x: x[:1].expand(3, 4) + x, 1, 16 + 48 + 48),
        (lambda x: torch.empty_like(x), 0, 0),
    ],
)
def test_launches_and_their_bytes_are_counted(step: Callable[[Any], Any], launches: int, read_and_written: int) -> None:
    with torch.inference_mode(), VirtualGPU() as gpu:
        there = Remote(NUMBERS)
        step(there)
        work = gpu.take()
        assert (work.launches.total(), work.bytes) == (launches, read_and_written)
        assert (work.to_device, work.to_host, work.waits.total()) == (0, 0, 0)
        assert gpu.take().launches.total() == 0


@pytest.mark.parametrize(
    ("step", "to_device", "to_host", "waits"),
    [
        (lambda x: x.tolist(), 0, 1, 1),
        (lambda x: x.sum().item(), 0, 1, 1),
        (lambda x: bool((x > 1.0).any()), 0, 1, 1),
        (lambda x: x.nonzero(), 0, 1, 1),
        (lambda x: x[x > 3.0], 0, 1, 1),
        (lambda x: x.cpu(), 0, 1, 1),
        (lambda x: torch.empty(3, 4).copy_(x), 0, 1, 1),
        (lambda x: torch.equal(x, x), 0, 1, 1),
        (lambda x: x.clone().masked_fill_(x > 3.0, 0.0), 0, 0, 0),
        (lambda x: NUMBERS.to(x.device), 1, 0, 1),
        (lambda x: NUMBERS.to(x.device, non_blocking=True), 1, 0, 1),
        (lambda x: NUMBERS.pin_memory().to(x.device), 1, 0, 1),
        (lambda x: NUMBERS.pin_memory().to(x.device, non_blocking=True), 1, 0, 0),
        (lambda x: upload(NUMBERS, x.device), 1, 0, 0),
        (lambda x: download(x, x.long()), 0, 1, 1),
        (lambda x: torch.tensor([1.0], device=x.device), 1, 0, 1),
        (lambda x: x[[0, 2]], 1, 0, 1),
        (lambda x: x[upload(torch.tensor([0, 2]), x.device)], 1, 0, 0),
    ],
)
def test_copies_and_waits_are_counted(step: Callable[[Any], Any], to_device: int, to_host: int, waits: int) -> None:
    with torch.inference_mode(), VirtualGPU() as gpu:
        there = Remote(NUMBERS)
        step(there)
        work = gpu.take()
        assert (work.to_device, work.to_host, work.waits.total()) == (to_device, to_host, waits)


def test_tensors_of_two_devices_are_not_brought_together() -> None:
    with torch.inference_mode(), VirtualGPU():
        there = torch.arange(3, device=DEVICE)
        with pytest.raises(RuntimeError, match="two devices"):
            there + torch.ones(3)
        assert (there + 1).cpu().tolist() == [1, 2, 3]
    with pytest.raises(RuntimeError, match="its device was left"):
        there + 1


def test_a_download_keeps_every_number() -> None:
    with torch.inference_mode(), VirtualGPU():
        given = NUMBERS / 3.0, torch.tensor([[2**52 + 1, -1]]), torch.tensor([True, False])
        for before, after in zip(given, download(*map(Remote, given)), strict=True):
            assert after.dtype == before.dtype and torch.equal(before, after)
