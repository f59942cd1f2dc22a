"""Linear layers that are joined and laid out for few rows, by each kernel that this machine can run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from slipstream.engine.kernels import compiled as kernels_file
from slipstream.engine.kernels import products
from slipstream.engine.kernels.compiled import Kernels, find_kernels
from slipstream.engine.kernels.products import PackedProduct, multiplies
from slipstream.engine.models import linear as module
from slipstream.engine.models.linear import Linear, OneDnn, packs
from tests.support.kernels import kernels

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SHAPES = [(64, 199, 1), (1536, 96, 3), (2176, 64, 1), (96, 256, 1), (34, 3, 1)]
"""Width, features and threads."""
MOST_ROWS = 450
SAME_ROWS = {torch.float32: 70, torch.bfloat16: 32}
"""Most rows of a pass of oneDNN's for which a row's bits do not depend on the others."""
Way = Callable[[torch.Tensor, torch.Tensor | None], PackedProduct | OneDnn]


@pytest.fixture(params=["AVX2", "AVX-512", "AVX-512, pairs", "oneDNN"])
def way(request: pytest.FixtureRequest, compiled: Path) -> Way:
    if request.param == "oneDNN":
        return OneDnn
    found = kernels(compiled, request.param != "AVX2", request.param == "AVX-512, pairs")
    return lambda weight, bias: PackedProduct(found, weight, bias)


def rows(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(width)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "features", "threads"), SHAPES)
@torch.inference_mode()
def test_a_row_is_the_same_in_every_pass(
    way: Way, width: int, features: int, dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN sums widths beyond 1024 in blocks, whose order depends on whether a row is alone; in bf16 on CPUs with
    AMX it sums in another order above SAME_ROWS rows: there a row is the same up to rounding."""
    monkeypatch.setattr(kernels_file, "FEW", 0)
    weight, bias = rows(features, width, dtype) / width**0.5, rows(1, features, dtype)[0]
    if way is OneDnn and not packs(weight):
        pytest.skip("no packed kernels for the dtype on this machine")
    multiply = way(weight, bias)
    x = rows(MOST_ROWS, width, dtype)
    same = x[: SAME_ROWS[dtype]] if isinstance(multiply, OneDnn) else x
    full = multiply(same)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for count in (0, 1, 2, 3, 5, 6, 7, 8, 12, 13, 17, 32, 64, 256, 384, 385):
            if count <= len(same):
                assert torch.equal(multiply(same[:count]), full[:count])
                assert torch.equal(multiply(same[len(same) - count :]), full[len(same) - count :])
    finally:
        torch.set_num_threads(before)
    expected = linear(x.double(), weight.double(), bias.double())
    assert torch.allclose(multiply(x).double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def odd(weight: torch.Tensor, share: int) -> torch.Tensor:
    """Some weights, one in `share`, are such as no training leaves: of all sizes, zeros, infinities and no numbers."""
    strange = torch.tensor([2.0**-120, 0.0, -0.0, float("inf"), float("nan"), -(2.0**90), 2.0**-133, 1e-3, 77.0])
    flat = weight.flatten()
    places = torch.arange(0, len(flat), share)
    flat[places] = strange[torch.arange(len(places)) % len(strange)].bfloat16()
    return flat.view_as(weight)


@pytest.mark.parametrize("share", [0, 40_000, 3000], ids=["as trained", "some odd groups", "many odd groups"])
@pytest.mark.parametrize(("width", "features"), [(576, 960), (1536, 64), (66, 199), (130, 32), (2, 40)])
@torch.inference_mode()
def test_weights_in_twelve_bits_give_the_same_bits(
    compiled: Path, width: int, features: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = kernels(compiled, True, True)
    weight = (rows(features, width, torch.bfloat16) / width**0.5).bfloat16()
    weight = odd(weight, share) if share else weight
    squeezed = PackedProduct(found, weight, None)
    monkeypatch.setattr(products, "squeeze", lambda *_: None)
    plain = PackedProduct(found, weight, None)
    if width >= 576 and not share:
        assert squeezed.nbytes < 0.8 * plain.nbytes
    x = rows(70, width, torch.bfloat16)
    for count in (1, 2, 3, 4, 5, 8, 12, 13, 31, 70):
        assert torch.equal(squeezed(x[:count]).view(torch.int16), plain(x[:count]).view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_rows_and_weights_may_lie_apart(compiled: Path, dtype: torch.dtype) -> None:
    """Weights that are stored transposed, and rows cut out of wider ones at an odd place."""
    weight, wide = rows(40, 66, dtype), rows(9, 131, dtype)
    x = wide[::2, 3:69]
    multiply = PackedProduct(kernels(compiled, False), weight, None)
    expected = multiply(x.clone(memory_format=torch.contiguous_format))
    assert torch.equal(multiply(x), expected)
    assert torch.equal(PackedProduct(kernels(compiled, False), weight.T.contiguous().T, None)(x), expected)


@torch.inference_mode()
def test_rows_that_do_not_fit_the_weights_are_refused(compiled: Path) -> None:
    """The kernel would read beyond their end."""
    multiply = PackedProduct(kernels(compiled, False), torch.ones(4, 8), None)
    strange = (rows(2, 7, torch.float32), rows(2, 8, torch.bfloat16), rows(2, 8, torch.float32).to("meta"))
    for x in (*strange, torch.ones(8)):
        with pytest.raises(ValueError):
            multiply(x)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_nan_and_inf_stay_in_their_row_and_feature(compiled: Path, dtype: torch.dtype) -> None:
    for wide in (False, True):
        weight, x = rows(37, 200, dtype), rows(15, 200, dtype)
        multiply = PackedProduct(Kernels(compiled, wide), weight, None)
        expected = multiply(x)
        x[3, 150] = float("nan")
        x[8, 7] = float("inf")
        found = multiply(x)
        assert found[3].isnan().all()
        assert (found[8].isinf() | found[8].isnan()).all()
        others = [row for row in range(15) if row not in (3, 8)]
        assert torch.equal(found[others], expected[others])
        weight[36] = float("nan")
        found = PackedProduct(Kernels(compiled, wide), weight, None)(x[others])
        assert found[:, 36].isnan().all()
        assert torch.equal(found[:, :36], expected[others, :36])


@torch.inference_mode()
def test_products_in_several_threads_do_not_interfere(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_file, "FEW", 0)
    multiply = PackedProduct(kernels(compiled, False), rows(999, 64, torch.float32), None)
    inputs = [rows(count, 64, torch.float32) for count in (1, 5, 13, 20)]
    expected = [multiply(x) for x in inputs]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(4) as pool:
            for found in pool.map(lambda _: [multiply(x) for x in inputs], range(40)):
                assert all(map(torch.equal, found, expected))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_all_cpus_round_sums_alike_except_for_pairs_of_bf16(compiled: Path, dtype: torch.dtype) -> None:
    narrow, wide, pairs = (kernels(compiled, *each) for each in ((False,), (True,), (True, True)))
    weight, x = rows(199, 1538, dtype), rows(20, 1538, dtype)
    found = [PackedProduct(each, weight, None)(x) for each in (narrow, wide, pairs)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2]) or dtype is torch.bfloat16
    assert torch.allclose(found[0], found[2], rtol=2.0**-8)  # a step of bf16


@torch.inference_mode()
def test_products_in_bf16_are_rounded_once_to_the_nearest(compiled: Path) -> None:
    """Sums that lie between two numbers of bf16, and what is no number."""
    multiply = PackedProduct(kernels(compiled, False), torch.eye(2, dtype=torch.bfloat16), torch.tensor([0.0, 0.0]))
    multiply._bias[:] = torch.tensor([1.0 + 3 * 2.0**-8, 1.0 + 2.0**-8])  # type: ignore[index]
    found = multiply(torch.zeros(1, 2, dtype=torch.bfloat16))
    assert found.tolist() == [[1.0 + 2.0**-6, 1.0]]
    strange = torch.tensor([[float("nan"), float("inf")]], dtype=torch.bfloat16)
    assert multiply(strange).isnan().all()
    multiply._bias[:] = torch.tensor([float("inf"), 3.4e38])  # type: ignore[index]
    assert multiply(torch.zeros(1, 2, dtype=torch.bfloat16)).isinf().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_joined_linear_layers_equal_their_parts_side_by_side(dtype: torch.dtype, bias: bool) -> None:
    parts = [torch.nn.Linear(40, size, bias=bias, dtype=dtype) for size in (5, 3, 8)]
    x = rows(7, 40, dtype)
    expected = torch.cat([part(x) for part in parts], dim=1)
    joined = Linear(parts)
    for count in (0, 1, 7):
        assert torch.allclose(joined(x[:count]), expected[:count], atol=TOLERANCE[dtype])
        assert joined(x[:count]).shape == (count, 16)


@pytest.mark.parametrize("keep", [False, True])
def test_the_parts_weights_are_taken_unless_they_are_tied(keep: bool) -> None:
    part = torch.nn.Linear(8, 4)
    Linear([part], keep=keep)
    assert hasattr(part, "weight") == keep


@torch.inference_mode()
def test_weights_without_a_kernel_are_multiplied_by_torch(compiled: Path) -> None:
    for left in (torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(0, 4), torch.ones(4, 0)):
        assert not multiplies(Kernels(compiled, False), left)
    for dtype in (torch.float64, torch.float16):
        part = torch.nn.Linear(8, 4, dtype=dtype)
        x = rows(3, 8, dtype)
        expected = part(x)
        assert not packs(part.weight) and not multiplies(Kernels(compiled, False), part.weight)
        assert torch.equal(Linear([part])(x), expected)


@torch.inference_mode()
def test_without_a_compiled_file_onednn_multiplies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_file, "__file__", str(tmp_path / "products.py"))
    find_kernels.cache_clear()
    try:
        assert find_kernels() is None
        assert isinstance(module.lay_out([torch.ones(4, 4)], None), OneDnn)
    finally:
        find_kernels.cache_clear()


def test_a_file_of_another_version_is_left_out(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_file, "VERSION", -1)
    with pytest.raises(OSError, match="another version"):
        Kernels(compiled, False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("shape", [(64, 199, 1), (1537, 96, 2), (34, 3, 1)])
@torch.inference_mode()
def test_products_with_bytes_are_those_of_scaled_whole_numbers(
    shape: tuple[int, int, int], wide: bool, dtype: torch.dtype, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    depth, features, threads = shape
    monkeypatch.setattr(kernels_file, "FEW", 0 if threads > 1 else kernels_file.FEW)
    chance = torch.Generator().manual_seed(depth)
    weight = torch.randint(-128, 128, (features, depth), generator=chance, dtype=torch.int8)
    scales, bias = torch.rand(features, generator=chance).to(dtype), torch.randn(features, generator=chance).to(dtype)
    multiply = PackedProduct(kernels(compiled, wide), weight, bias, scales, dtype)
    x = rows(MOST_ROWS, depth, dtype)
    found = multiply(x)
    exact = (x.double() @ weight.double().T) * scales.double() + bias.double()
    assert found.dtype is dtype
    assert (found.double() - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()
    for count in (1, 2, 13):
        assert torch.equal(multiply(x[:count]), found[:count])
    with pytest.raises(ValueError, match="rows have"):
        multiply(x[:, 1:])


@pytest.mark.parametrize(("wide", "pairs"), [(False, False), (True, False), (True, True)])
@torch.inference_mode()
def test_weights_that_are_bf16_numbers_take_half_the_bytes_and_give_the_same_bits(
    compiled: Path, wide: bool, pairs: bool
) -> None:
    """One more output feature, no bf16 number, keeps the others' weights in fp32."""
    found = kernels(compiled, wide, pairs)
    halves = rows(70, 258, torch.bfloat16).float()
    halved = PackedProduct(found, halves, rows(1, 70, torch.float32)[0])
    bias = torch.cat((rows(1, 70, torch.float32)[0], torch.zeros(1)))
    full = PackedProduct(found, torch.cat((halves, torch.full((1, 258), 1.0 / 3.0))), bias)
    assert halved._weights.dtype is torch.bfloat16
    assert full._weights.dtype is torch.float32
    x = rows(MOST_ROWS, 258, torch.float32)
    for count in (1, 2, 3, 4, 5, 6, 7, 12, 13, 20, 100, MOST_ROWS):
        assert torch.equal(halved(x[:count]), full(x[:count])[:, :70])
