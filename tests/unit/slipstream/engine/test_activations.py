"""Functions of single numbers by the installed kernels, which are torch's where none are."""

from __future__ import annotations

import pytest
import torch

from slipstream.engine.kernels.activations import FUNCTIONS, Activation
from slipstream.engine.kernels.compiled import Kernels, find_kernels

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float64: 1e-12}


@pytest.fixture
def installed() -> Kernels:
    found = find_kernels()
    if found is None:
        pytest.skip("no compiled kernels")
    return found


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_installed_activations_equal_those_of_torch(name: str, dtype: torch.dtype, installed: Kernels) -> None:
    x = torch.cat([torch.linspace(-30, 30, 2001), torch.tensor([0.0, 1e-6, -1e-6, 100.0, -100.0])]).to(dtype)
    found, expected = Activation(installed, name)(x), FUNCTIONS[name](x.double())
    assert found.dtype is dtype
    assert torch.allclose(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert Activation(installed, name)(x[:1] * torch.nan).isnan().all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_value_has_the_same_bits_at_every_place_of_an_array(
    name: str, dtype: torch.dtype, threads: int, installed: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In arrays of any length, whatever part of them a thread takes: where torch's own has others (below)."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr("slipstream.engine.kernels.compiled.FEW", 0)
    own = Activation(installed, name)
    x = (3 * torch.randn(3 * 4096 + 5, generator=torch.Generator().manual_seed(1))).to(dtype)
    whole = own(x)
    for first, end in ((0, 1), (1, 18), (4090, 4103), (7, len(x)), (12_291, 12_293)):
        assert torch.equal(own(x[first:end]), whole[first:end])
    assert torch.equal(own(x[:12_288].view(96, 128).t()), whole[:12_288].view(96, 128).t())


def test_torch_s_own_depends_on_how_many_numbers_there_are() -> None:
    """Why there are ours. Where this fails torch has mended it."""
    x = 3 * torch.randn(1024, generator=torch.Generator().manual_seed(1))
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("of x86")
    alone = torch.cat([torch.nn.functional.silu(each) for each in x.split(1)])
    assert not torch.equal(torch.nn.functional.silu(x), alone)
