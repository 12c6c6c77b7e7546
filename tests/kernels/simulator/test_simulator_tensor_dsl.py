"""Tensor core kernels as CuTe DSL writes them: its layouts, tiles and descriptors, exact inputs.

The sums stay below 2**24 in steps of a power of two, so float32 holds them whatever the order, and
the results must be equal.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from k3fuse.kernels.simulator import BarrierError, Fresh, MemoryAccessError, TensorMemoryError
from k3fuse.kernels.simulator.formats import E2M1

pytest.importorskip("cutlass")
pytest.importorskip("cuda.bindings.driver")

from cutlass import BFloat16, Float4E2M1FN, Float8E4M3FN, Float8E5M2, Float16
from cutlass.cute.nvgpu.tcgen05 import SmemLayoutAtomKind as Kind

import dsl_block_scaled as scaled
import dsl_tensor as dsl

_TORCH = {BFloat16: torch.bfloat16, Float16: torch.float16}


def factors(m: int, n: int, k: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(m + n + k)
    return [torch.randint(-8, 9, (r, k), generator=generator).to(dtype) for r in (m, n)]


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double().T).float()


def run_gemm(
    m: int, n: int, k: int, majors: tuple[str, str] = ("k", "k"), *, seed: int | None = None,
    change: Any = None, races: bool = False, **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, Any]:  # fmt: skip
    kernel = dsl.gemm(m, n, k, a_major=majors[0], b_major=majors[1], **options)
    a, b = factors(m, n, k, _TORCH[options.get("dtype", BFloat16)])
    d = torch.zeros(m, n)
    parameters = dsl.gemm_parameters(kernel, a, b, Fresh(d), majors)
    if change is not None:
        kernel, parameters = change(kernel, parameters)
    report = kernel.run(parameters, seed=seed, names=["state", "a", "b", "d"], races=races)
    return d, product(a, b), report


def test_a_k3_like_tile() -> None:
    """128 x 8 x 64 in BF16 with 128-byte swizzled tiles."""
    for seed in (None, *range(5)):
        got, wanted, report = run_gemm(128, 8, 64, seed=seed)
        assert torch.equal(got, wanted)
        assert report.traffic[0, "a", 0, "read"].requested == 2 * 128 * 64
        assert report.traffic[0, "b", 0, "read"].distinct == 2 * 8 * 64
        assert report.traffic[0, "d", 0, "write"].distinct == 4 * 128 * 8


@pytest.mark.parametrize(
    ("m", "n", "k", "majors", "options"),
    [
        (128, 32, 64, ("k", "k"), {"dtype": Float16}),
        (64, 8, 64, ("k", "k"), {"load": "16x256b"}),
        (64, 32, 64, ("mn", "k"), {"load": "16x128b"}),
        (64, 16, 64, ("k", "mn"), {"load": "16x64b"}),
        (128, 64, 64, ("mn", "mn"), {}),
        (128, 32, 32, ("k", "mn"), {}),
        (128, 32, 16, ("k", "k"), {}),
        (128, 256, 64, ("k", "mn"), {}),
        (128, 32, 32, ("k", "k"), {"kinds": (Kind.K_INTER, Kind.K_SW32)}),
        (128, 32, 64, ("k", "k"), {"kinds": (Kind.K_SW64, Kind.K_SW128)}),
        (128, 32, 32, ("mn", "mn"), {"kinds": (Kind.MN_INTER, Kind.MN_SW32)}),
        (128, 32, 32, ("mn", "mn"), {"kinds": (Kind.MN_SW128, Kind.MN_SW64)}),
    ],
)
def test_layouts_that_the_dsl_makes(
    m: int, n: int, k: int, majors: tuple[str, str], options: dict[str, Any]
) -> None:
    got, wanted, _ = run_gemm(m, n, k, majors, **options)
    assert torch.equal(got, wanted)


def test_a_tile_without_the_swizzle_that_the_descriptor_says() -> None:
    def change(kernel: Any, parameters: list[Any]) -> Any:
        plain = dsl.map_of(parameters[1].tensor, kernel.maps[0], swizzle=0)
        return kernel, [parameters[0], plain, *parameters[2:]]

    assert torch.equal(*run_gemm(128, 8, 64)[:2])
    got, wanted, _ = run_gemm(128, 8, 64, change=change)
    assert not torch.equal(got, wanted)
    assert torch.equal(got[::8], wanted[::8]), "row 0 of 8 is not permuted"


def test_a_descriptor_with_another_swizzle() -> None:
    """64-byte instead of 128-byte swizzle in the constants that the compiler put into the PTX."""

    def change(kernel: Any, parameters: list[Any]) -> Any:
        text = kernel.ptx
        for word in {int(x) for x in text.replace(";", " ").replace(",", " ").split()
                     if x.isdigit() and int(x) >> 61 == 2}:  # fmt: skip
            text = text.replace(str(word), str(word ^ 6 << 61))
        assert text != kernel.ptx
        return replace(kernel, ptx=text), parameters

    got, wanted, _ = run_gemm(128, 8, 64)
    assert torch.equal(got, wanted)
    got, wanted, _ = run_gemm(128, 8, 64, change=change)
    assert not torch.equal(got, wanted)


def without_wait(which: int) -> Any:
    """A change of the kernel: the wait for the tiles (0) or for the product (1) never waits."""

    def change(kernel: Any, parameters: list[Any]) -> Any:
        waits = re.findall(r"mbarrier\.try_wait\S* P1, [^;]*;", kernel.ptx)
        assert len(waits) == 2
        return replace(kernel, ptx=kernel.ptx.replace(waits[which], "mov.pred P1, -1;")), parameters

    return change


@pytest.mark.parametrize("which", [0, 1])
def test_missing_waits_are_found(which: int) -> None:
    change = without_wait(which)
    found = 0
    for seed in range(10):
        try:
            got, wanted, _ = run_gemm(128, 8, 64, change=change, seed=seed)
            found += not torch.equal(got, wanted)
        except (MemoryAccessError, TensorMemoryError, BarrierError):
            found += 1
    assert found >= 8


def test_the_race_checker_sees_what_the_tensor_core_reads() -> None:
    """The tile is read before its mbarrier says that it is there; a control has no race."""
    for seed in (None, 1):
        _, _, report = run_gemm(128, 8, 64, seed=seed, races=True)
        assert report.races == ()
    _, _, report = run_gemm(128, 8, 64, change=without_wait(0), races=True)
    assert any("tcgen05.mma" in str(race) for race in report.races)


# --- block scales -----------------------------------------------------------------------------


def arranged(scales: torch.Tensor) -> torch.Tensor:
    """[rows, 4] scale bytes in the 512-byte block of 128 rows: 16 * (r % 32) + 4 * (r / 32) + k."""
    result = torch.full((512,), 127, dtype=torch.uint8)
    rows = torch.arange(len(scales))
    for k in range(4):
        result[16 * (rows % 32) + 4 * (rows // 32) + k] = scales[:, k]
    return result


def operand(dtype: Any, rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes as they lie in global memory, values) of [rows, 128]."""
    if dtype is Float4E2M1FN:
        codes = torch.randint(0, 16, (rows, 128), generator=generator)
        packed = codes[:, 0::2] | codes[:, 1::2] << 4
        return packed.to(torch.uint8), torch.from_numpy(E2M1)[codes].double()
    small = torch.float8_e4m3fn if dtype is Float8E4M3FN else torch.float8_e5m2
    values = torch.randint(-8, 9, (rows, 128), generator=generator).float().to(small)
    return values.view(torch.uint8), values.double()


def run_scaled(
    n: int,
    types: tuple[Any, Any],
    *,
    seed: int | None = None,
    text: Any = None,
    wrong: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    kernel = scaled.scaled_gemm(n, *types)
    generator = torch.Generator().manual_seed(n)
    (a, a_values), (b, b_values) = (
        operand(dtype, rows, generator) for dtype, rows in zip(types, (128, n), strict=True)
    )
    scales = [torch.randint(124, 131, (rows, 4), generator=generator).byte() for rows in (128, n)]
    factors_ = [2.0 ** (s.double() - 127).repeat_interleave(32, 1) for s in scales]
    wanted = product(a_values * factors_[0], b_values * factors_[1])
    if wrong:
        scales[0] = scales[0].flip(1)
    d = torch.zeros(128, n)
    maps = [dsl.map_of(x, tiles) for x, tiles in zip((a, b), kernel.maps, strict=True)]
    parameters = [bytes(12), *maps, *(arranged(s) for s in scales), Fresh(d)]
    if text is not None:
        kernel = replace(kernel, ptx=text(kernel.ptx))
    report = kernel.run(parameters, seed=seed, names=["state", "a", "b", "sa", "sb", "d"])
    return d, wanted, report


@pytest.mark.parametrize(
    ("n", "types"),
    [
        (8, (Float4E2M1FN, Float8E4M3FN)),
        (128, (Float8E4M3FN, Float4E2M1FN)),
        (64, (Float8E5M2, Float8E4M3FN)),
        (32, (Float4E2M1FN, Float4E2M1FN)),
    ],
)
def test_block_scaled_products(n: int, types: tuple[Any, Any]) -> None:
    for seed in (None, 1, 2):
        got, wanted, report = run_scaled(n, types, seed=seed)
        assert torch.equal(got, wanted)
        bits = 4 if types[0] is Float4E2M1FN else 8
        assert report.traffic[0, "a", 0, "read"].distinct == 128 * 128 * bits // 8


def test_wrong_scales_give_another_value() -> None:
    types = (Float4E2M1FN, Float8E4M3FN)
    got, wanted, _ = run_scaled(8, types)
    assert torch.equal(got, wanted)
    assert not torch.equal(*run_scaled(8, types, wrong=True)[:2])

    def one_copy_short(ptx: str) -> str:
        lines = ptx.split("\n")
        copies = [at for at, line in enumerate(lines) if "tcgen05.cp" in line]
        assert len(copies) == 2
        return "\n".join(line for at, line in enumerate(lines) if at != copies[1])

    with pytest.raises(TensorMemoryError, match="before anyone wrote it"):
        run_scaled(8, types, text=one_copy_short)


def test_types_are_taken_from_the_instruction_descriptor() -> None:
    """E4M3 bytes read as E5M2, by one bit of the descriptor, are other numbers."""
    types = (Float8E4M3FN, Float8E4M3FN)

    def changed(ptx: str) -> str:
        line = next(x for x in ptx.split("\n") if "selp.b32" in x and "1427" in x)
        word = max(
            int(x) for x in line.replace(";", ",").replace(" ", "").split(",") if x.isdigit()
        )
        return ptx.replace(str(word), str(word | 1 << 7)).replace(
            str(word - 8192), str(word - 8192 | 1 << 7)
        )

    assert torch.equal(*run_scaled(8, types)[:2])
    assert not torch.equal(*run_scaled(8, types, text=changed)[:2])
