"""Feature kernels for sm_90a: on the simulator always, and bit by bit on a GPU where there is one.

    python -m pytest -m gpu tests/kernels

docs/simulator.md says which instructions may differ.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass")

from features import APPROXIMATE, EXACT, FEATURES, FLOATS, Tensors, gemv_tensors, gemv_variant
from k3fuse.kernels.build.cache import Cache
from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.launch import Launcher
from k3fuse.kernels.build.variant import builder
from k3fuse.kernels.check import run
from tolerances import assert_close

ARCH, CAPABILITY = "sm_90a", (9, 0)
GEMV = "workbench_gemv"


def no_gpu() -> str:
    """Why no GPU can run these kernels; "" where one can."""
    if not torch.cuda.is_available():
        return "no CUDA device in torch"
    found = torch.cuda.get_device_capability()
    return "" if found == CAPABILITY else f"compute capability {found}, needs {CAPABILITY}"


def made(op: str, folder: Path) -> tuple[Built, Tensors, tuple[str, ...]]:
    """The kernel, its tensors, names of its outputs."""
    if op == GEMV:
        return Cache(folder).get(gemv_variant(ARCH)), gemv_tensors(), ("y",)
    feature = FEATURES[op]
    return Cache(folder).get(feature.variant(ARCH, {}, {})), feature.tensors(), feature.outputs


@pytest.mark.parametrize("op", [*FEATURES, GEMV])
def test_features_on_the_simulator(op: str, tmp_path: Path) -> None:
    built, tensors, outputs = made(op, tmp_path)
    assert f".target {ARCH}" in built.ptx
    before = {name: tensors[name].clone() for name in outputs}
    run(built, [tensors])
    for name in outputs:
        assert not torch.equal(tensors[name], before[name])
    if op in FEATURES:
        for name, wanted in FEATURES[op].expected(tensors).items():
            assert_close(tensors[name], wanted, k=16, what=name)
    if op == "features:LANEWISE":
        x, rows = tensors["x"], dict(zip(EXACT, tensors["y"], strict=True))
        value = x.view(torch.float32)
        rounded = (value * value.new_tensor(1.2345679)).view(torch.int32)
        assert torch.equal(rows["mul.rn.f32"], rounded)
        assert torch.equal(rows["popc.b32"][:2].sum(), torch.tensor(
            sum(bin(int(v) & 0xFFFFFFFF).count("1") for v in x[:2])))  # fmt: skip
    if op == "features:APPROX":
        x, rows = tensors["x"].view(torch.float32), tensors["y"].view(torch.float32)
        root = rows[list(APPROXIMATE).index("rsqrt.approx.ftz.f32")]
        assert_close(root, x.double().rsqrt().float(), k=1)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [*FEATURES, GEMV])
def test_features_on_a_gpu(op: str, tmp_path: Path) -> None:
    if why := no_gpu():
        pytest.skip(why)
    built, tensors, outputs = made(op, tmp_path)
    there = {name: tensor.cuda() for name, tensor in tensors.items()}
    run(built, [tensors])
    launch = Launcher(built)
    launch(*(there[p.name].data_ptr() for p in built.plan.parameters))
    torch.cuda.synchronize()
    wrong = [w for n in outputs for w in differences(op, there[n].cpu(), tensors[n])]
    assert not wrong, "; ".join(wrong)


def differences(op: str, actual: torch.Tensor, expected: torch.Tensor) -> list[str]:
    """What lies further apart than the feature allows, one line a row."""
    bounds = FEATURES[op].bounds if op in FEATURES else ()
    named = {"features:LANEWISE": list(EXACT), "features:APPROX": list(APPROXIMATE)}.get(op)
    rows = zip(named or [op], actual if named else [actual], expected if named else [expected],
               strict=True)  # fmt: skip
    found = []
    for place, (name, have, want) in enumerate(rows):
        bound = bounds[place if len(bounds) > 1 else 0] if bounds else 0.0
        by = apart(have, want, exact=not bounds, nan=name in FLOATS)
        if by > bound:
            found.append(f"{name} differs by {by}, {bound} is allowed")
    return found


def apart(actual: torch.Tensor, expected: torch.Tensor, *, exact: bool, nan: bool = False) -> float:
    """0 for equal bits; else infinite, or the largest error, relative above 1, where not exact.

    nan: bits that are NaN as FP32 on both sides are equal.
    """
    have, want = (t.contiguous().view(torch.uint8) for t in (actual, expected))
    same = have == want
    if nan:
        both = actual.view(torch.float32).isnan() & expected.view(torch.float32).isnan()
        same = same.view(-1, 4).all(1) | both
    if bool(same.all()):
        return 0.0
    if exact:
        return math.inf
    x, y = (t.contiguous().view(torch.float32).double() for t in (actual, expected))
    error = ((x - y).abs() / y.abs().clamp(min=1.0)).max()
    return float(error) if error.isfinite() else math.inf


def test_the_comparison_sees_a_bit() -> None:
    one = torch.ones(4)
    other = torch.nextafter(one, torch.tensor(2.0))
    assert apart(one, one.clone(), exact=True) == 0.0
    assert apart(other, one, exact=True) == math.inf
    assert apart(other, one, exact=False) == 2.0**-23
    assert apart(torch.full((4,), math.nan), one, exact=False) == math.inf
    assert apart(torch.tensor([0.0]), torch.tensor([-0.0]), exact=True) == math.inf
    payload = torch.tensor([0x7FC00000, 0x7FFFFFFF], dtype=torch.int32)
    assert apart(payload[:1], payload[1:], exact=True) == math.inf
    assert apart(payload[:1], payload[1:], exact=True, nan=True) == 0.0
    rows = torch.zeros(len(EXACT), 128, dtype=torch.int32)
    wrong = rows.clone()
    wrong[list(EXACT).index("popc.b32"), 7] = 1
    assert differences("features:LANEWISE", rows, rows) == []
    assert differences("features:LANEWISE", wrong, rows) == [
        "popc.b32 differs by inf, 0.0 is allowed"
    ]
    ones = torch.ones(len(APPROXIMATE), 128)
    near = ones * (1 + 2.0**-20)
    told = differences("features:APPROX", near.view(torch.int32), ones.view(torch.int32))
    assert [line.split()[0] for line in told] == [n for n in APPROXIMATE if "tanh" not in n]


def test_builders_of_the_features_are_found_by_place() -> None:
    assert all(builder(op) is feature for op, feature in FEATURES.items())
