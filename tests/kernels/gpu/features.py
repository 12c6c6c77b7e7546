"""Portable feature kernels: each on the simulator and, where there is one, on a GPU, bit by bit.

`bounds` says how far results may lie apart on a GPU: empty is bit-equal; else the largest relative
error of an element (absolute below 1), one for each row or one for all, from the PTX ISA's accuracy
of the instruction. Tensor cores: 2**-20, sixteen roundings of FP32 on sums of about 16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from k3fuse.kernels.build.variant import Dim3, Parameter, Plan, Variant, builder, pairs

sys.path.append(str(Path(__file__).parents[1] / "simulator"))

# 16 bits in, 16 or 32 out: the register of the snippets.
HALF = "{{ .reg .b16 h; {0} }}".format

# Name -> PTX that writes $0 from $1; results are defined bit by bit.
EXACT = {
    "add.rn.f32": "add.rn.f32 $0, $1, 0f3F9E0652;",
    "mul.rn.f32": "mul.rn.f32 $0, $1, 0f3F9E0652;",
    "fma.rn.f32": "fma.rn.f32 $0, $1, $1, 0f3F9E0652;",
    "div.rn.f32": "div.rn.f32 $0, 0f3F9E0652, $1;",
    "sqrt.rn.f32": "sqrt.rn.f32 $0, $1;",
    "min.f32": "min.f32 $0, $1, 0f3F9E0652;",
    "cvt.rn.bf16.f32": HALF("cvt.rn.bf16.f32 h, $1; cvt.u32.u16 $0, h;"),
    "cvt.rn.f16.f32": HALF("cvt.rn.f16.f32 h, $1; cvt.u32.u16 $0, h;"),
    "cvt.f32.bf16": HALF("cvt.u16.u32 h, $1; cvt.f32.bf16 $0, h;"),
    "cvt.rni.s32.f32": "cvt.rni.s32.f32 $0, $1;",
    "cvt.rn.f32.s32": "cvt.rn.f32.s32 $0, $1;",
    "cvt.e4m3x2.f32": HALF("cvt.rn.satfinite.e4m3x2.f32 h, $1, 0f3FC00000; cvt.u32.u16 $0, h;"),
    # Without NaN, the only value of e4m3 with all bits set.
    "cvt.f16x2.e4m3x2": HALF("cvt.u16.u32 h, $1; and.b16 h, h, 65278; cvt.rn.f16x2.e4m3x2 $0, h;"),
    "mul.hi.u32": "mul.hi.u32 $0, $1, 2654435769;",
    "mad.lo.u32": "mad.lo.u32 $0, $1, $1, 17;",
    "prmt.b32": "prmt.b32 $0, $1, 305419896, 29554;",
    "lop3.b32": "lop3.b32 $0, $1, 305419896, 252645135, 150;",
    "shf.l.wrap.b32": "shf.l.wrap.b32 $0, $1, 305419896, 7;",
    "popc.b32": "popc.b32 $0, $1;",
    "clz.b32": "clz.b32 $0, $1;",
    "bfe.u32": "bfe.u32 $0, $1, 5, 11;",
    "shfl.sync.bfly": "shfl.sync.bfly.b32 $0, $1, 5, 31, -1;",
    "shfl.sync.up": "shfl.sync.up.b32 $0, $1, 3, 0, -1;",
    "redux.sync.add": "redux.sync.add.s32 $0, $1, -1;",
    "vote.sync.ballot": "{ .reg .pred p; setp.lt.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, -1; }",
    "match.any.sync": "match.any.sync.b32 $0, $1, -1;",
}
# Rows with FP32 results: a NaN is one whatever its payload, which the simulator does not keep.
FLOATS = ("add.rn.f32", "mul.rn.f32", "fma.rn.f32", "div.rn.f32", "sqrt.rn.f32", "cvt.f32.bf16")
# Name -> (PTX, largest relative error by the PTX ISA); inputs are in [1, 2).
APPROXIMATE = {
    "ex2.approx.ftz.f32": ("ex2.approx.ftz.f32 $0, $1;", 2.0**-22),
    "rcp.approx.ftz.f32": ("rcp.approx.ftz.f32 $0, $1;", 2.0**-23),
    "rsqrt.approx.ftz.f32": ("rsqrt.approx.ftz.f32 $0, $1;", 2.0**-22),
    "sqrt.approx.ftz.f32": ("sqrt.approx.ftz.f32 $0, $1;", 2.0**-22),
    "lg2.approx.ftz.f32": ("lg2.approx.ftz.f32 $0, $1;", 2.0**-22),
    "tanh.approx.f32": ("tanh.approx.f32 $0, $1;", 2.0**-11),
}

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Feature:
    """A builder of one feature kernel, with its tensors. Outputs start as given in `tensors`.

    expected: of the outputs, where PyTorch can say. bounds: see the module.
    """

    op: str
    summary: str
    grid: Dim3
    block: Dim3
    smem: int
    parameters: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: Callable[[], Tensors]
    device: Callable[[], tuple[Any, tuple[Any, ...]]]
    expected: Callable[[Tensors], Tensors] = lambda tensors: {}
    bounds: tuple[float, ...] = ()
    cluster: Dim3 = (1, 1, 1)

    def variant(self, arch: str, shape: Mapping[str, int], config: Mapping[str, int]) -> Variant:
        return Variant(self.op, "one", arch, pairs(shape), pairs(config))

    def variants(self, arch: str) -> tuple[Variant, ...]:
        return (self.variant(arch, {}, {}),)

    def plan(self, variant: Variant) -> Plan:
        parameters = tuple(Parameter(name, "pointer") for name in self.parameters)
        return Plan(self.grid, self.block, self.cluster, self.smem, parameters)

    def trace(self, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.device()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def patterns() -> torch.Tensor:
    """1024 words: finite floats of all sizes, integers, and the limits of both."""
    exponents = torch.randint(-30, 30, (496,), generator=seeded(1))
    floats = torch.randn(496, generator=seeded(2)) * torch.exp2(exponents.float())
    special = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 448.0, 465.0, 65504.0, 3.4e38, 1e-45, 1.2e-38, 2.5, 3.5, -0.5, 240.0,
         2.0**-9, 2.0**-10]
    )  # fmt: skip
    whole = torch.randint(-(2**31), 2**31 - 1, (512,), generator=seeded(3), dtype=torch.int32)
    # Integers that are NaN as floats have another payload on each machine.
    nan = whole.view(torch.float32).isnan()
    whole = torch.where(nan, whole & 0xFFFF, whole)
    return torch.cat([floats.view(torch.int32), special.view(torch.int32), whole])


def lanewise(codes: tuple[str, ...], words: int) -> tuple[Any, tuple[Any, ...]]:
    import feature_device as device

    rows = device.words(words), device.words(len(codes), words), device.stream()
    return device.Lanewise(codes), rows


def one_to_two() -> torch.Tensor:
    return (1 + torch.rand(128, generator=seeded(4))).view(torch.int32)


def mma() -> tuple[Any, tuple[Any, ...]]:
    import feature_device as device

    fragments = device.words(32, 4), device.words(32, 2), device.float_words(32, 4)
    return device.Mma(), (*fragments, device.stream())


def mma_tensors() -> Tensors:
    def fragment(columns: int, seed: int) -> torch.Tensor:
        values = torch.randn(32, 2 * columns, generator=seeded(seed)).bfloat16()
        return values.view(torch.int32)

    return {"a": fragment(4, 5), "b": fragment(2, 6), "d": torch.zeros(32, 4)}


def mma_expected(tensors: Tensors) -> Tensors:
    """PTX ISA, m16n8k16: lane = 4 x row + pair; register pairs by (row + 8, column + 8)."""
    a = tensors["a"].view(torch.bfloat16).view(8, 4, 2, 2, 2)  # row, pair, column 8, row 8, element
    b = tensors["b"].view(torch.bfloat16).view(8, 4, 2, 2)  # column, pair, row 8, element
    left = a.permute(3, 0, 2, 1, 4).reshape(16, 16).double()
    right = b.permute(2, 1, 3, 0).reshape(16, 8).double()
    d = (left @ right).view(2, 8, 4, 2).permute(1, 2, 0, 3).reshape(32, 4)
    return {"d": d.float()}


def atomics() -> tuple[Any, tuple[Any, ...]]:
    import feature_device as device

    return device.Atomics(), (
        device.words(512),
        device.words(16),
        device.words(16),
        device.stream(),
    )


def atomics_tensors() -> Tensors:
    x = torch.randint(0, 2**20, (512,), generator=seeded(7), dtype=torch.int32)
    zeros = {n: torch.zeros(16, dtype=torch.int32) for n in ("counts", "sums")}
    return {"x": x, **zeros}


def atomics_expected(tensors: Tensors) -> Tensors:
    x = tensors["x"].long()
    counts, sums = torch.zeros(16).long(), torch.zeros(16).long()
    counts.index_add_(0, x % 16, torch.ones_like(x))
    sums.index_add_(0, x % 16, x)
    return {"counts": counts.int(), "sums": sums.int()}


BULK_K = 4096


def bulk() -> tuple[Any, tuple[Any, ...]]:
    import cutlass

    import dsl_kernels as dsl
    import feature_device as device

    bf16, f32 = cutlass.BFloat16, cutlass.Float32
    rows = dsl.fake(bf16, BULK_K), dsl.fake(bf16, 8, BULK_K), dsl.fake(f32, 8)
    return dsl.BulkDot(BULK_K), (*rows, device.stream())


def bulk_tensors() -> Tensors:
    x, w = (torch.randn(n, BULK_K, generator=seeded(n)).bfloat16() for n in (1, 8))
    return {"x": x.view(-1), "w": w, "y": torch.zeros(8)}


def cluster() -> tuple[Any, tuple[Any, ...]]:
    import cutlass

    import dsl_kernels as dsl
    import feature_device as device

    row = dsl.fake(cutlass.Float32, 256)
    return dsl.ClusterSum(4), (row, row, device.stream())


def cluster_tensors() -> Tensors:
    return {"x": torch.randn(256, generator=seeded(8)), "y": torch.zeros(256)}


def gemv_tensors() -> Tensors:
    x, w = (torch.randn(n, 512, generator=seeded(n)).bfloat16() for n in (4, 64))
    return {"x": x, "w": w, "y": torch.zeros(4, 64).bfloat16()}


LANEWISE = Feature(
    "features:LANEWISE", "one exact instruction a row", (8, 1, 1), (128, 1, 1), 0,
    ("x", "y"), ("y",),
    lambda: {"x": patterns(), "y": torch.zeros(len(EXACT), 1024, dtype=torch.int32)},
    lambda: lanewise(tuple(EXACT.values()), 1024),
)  # fmt: skip
APPROX = Feature(
    "features:APPROX", "one approximate instruction a row", (1, 1, 1), (128, 1, 1), 0,
    ("x", "y"), ("y",),
    lambda: {"x": one_to_two(), "y": torch.zeros(len(APPROXIMATE), 128, dtype=torch.int32)},
    lambda: lanewise(tuple(code for code, _ in APPROXIMATE.values()), 128),
    bounds=tuple(error for _, error in APPROXIMATE.values()),
)  # fmt: skip
TENSOR_CORE = Feature(
    "features:TENSOR_CORE", "mma.sync m16n8k16 in BF16", (1, 1, 1), (32, 1, 1), 0,
    ("a", "b", "d"), ("d",), mma_tensors, mma, mma_expected, bounds=(2.0**-20,),
)  # fmt: skip
ATOMICS = Feature(
    "features:ATOMICS", "red.add of integers over a grid", (4, 1, 1), (128, 1, 1), 0,
    ("x", "counts", "sums"), ("counts", "sums"), atomics_tensors, atomics, atomics_expected,
)  # fmt: skip
BULK = Feature(
    "features:BULK", "cp.async.bulk and mbarriers in a ring", (8, 1, 1), (160, 1, 1), 3216,
    ("x", "w", "y"), ("y",), bulk_tensors, bulk,
)  # fmt: skip
CLUSTER = Feature(
    "features:CLUSTER", "a cluster of four reads its peers' memories", (8, 1, 1), (32, 1, 1), 128,
    ("x", "y"), ("y",), cluster_tensors, cluster, cluster=(4, 1, 1),
)  # fmt: skip
FEATURES = {
    feature.op: feature for feature in (LANEWISE, APPROX, TENSOR_CORE, ATOMICS, BULK, CLUSTER)
}


def gemv_variant(arch: str) -> Variant:
    """The workbench's GEMV: vector loads, shuffles, shared memory, FP32 sums in a fixed order."""
    return builder("workbench_gemv").variant(arch, {"m": 4, "n": 64, "k": 512}, {})
