"""From the op's tensors to the launch: operands in place, kernels per count, what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_runs import BF16, band, exact, operands
from torch import Tensor

from k3fuse.kernels.attention_projection import op, policy
from k3fuse.kernels.attention_projection.builder import KDA, MLA, config_of
from k3fuse.kernels.attention_projection.launch import launch, misfit, variant
from k3fuse.kernels.attention_projection.policy import STATIONARY, STREAM, TABLE, row_of
from k3fuse.kernels.build.launch import Rows
from k3fuse.kernels.common import dispatch
from k3fuse.kernels.common.policy import Row, Table
from k3fuse.kernels.common.tolerances import compare
from k3fuse.kernels.simulator import Inside, Launch, TensorMap, simulate_sequence
from stored import store

TARGET = "gb300:tp16"


class Recorder:
    """A runtime that keeps what would have been launched."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, tuple[Any, ...]]] = []

    def kernel(self, chosen: Any) -> Any:
        return lambda *values: self.launched.append((chosen, values))


def row(m: int, target: str = TARGET, kernel: str = "") -> Row:
    """The policy's row, or one like it with another kernel."""
    found = TABLE.lookup(target, m)
    assert found is not None
    return replace(found, kernel=kernel) if kernel else found


def simulate(recorder: Recorder, tensors: list[Tensor]) -> None:
    """Run the one launch; every address must lie in one of the tensors."""
    ((chosen, numbers),) = recorder.launched
    built = store().get(chosen)
    params: list[Any] = []
    for parameter, number in zip(built.plan.parameters, numbers, strict=True):
        if parameter.kind == "i32":
            params.append(number)
            continue
        address = number.address if isinstance(number, Rows) else number
        (inside,) = [t for t in tensors if 0 <= address - t.data_ptr() < t.nbytes]
        if isinstance(number, Rows):
            assert parameter.tiles is not None
            assert address == inside.data_ptr()
            tiles = parameter.tiles.with_rows(number.number, number.pitch)
            params.append(TensorMap.of(inside, tiles))
        else:
            params.append(Inside(inside, address - inside.data_ptr()))
    plan = built.plan
    names = [p.name for p in plan.parameters]
    made = Launch(
        built.ptx, plan.grid, plan.block, [params], cluster=plan.cluster,
        dynamic_smem=plan.dynamic_smem, pdl=plan.pdl, names=names,
    )  # fmt: skip
    simulate_sequence([made], ranks=1)


def apart(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The same rows, 16 bytes further apart, and the buffer that holds them."""
    wide = torch.full((matrix.shape[0], matrix.shape[1] + 8), float("nan"), dtype=BF16)
    wide[:, : matrix.shape[1]] = matrix
    return wide[:, : matrix.shape[1]], wide


@pytest.mark.parametrize("kernel", [STATIONARY, STREAM])
@pytest.mark.parametrize(("m", "strided"), [(3, False), (17, True)])
def test_the_launch_computes_the_op(m: int, strided: bool, kernel: str) -> None:
    pytest.importorskip("cutlass")
    rows, k = (64, 40, 6), 512
    x, weights = operands(m, rows, k, seed=m)
    buffers = [x, *weights]
    if strided:
        x, buffers[0] = apart(x)
    if strided and kernel == STREAM:
        weights[1], buffers[2] = apart(weights[1])
    recorder = Recorder()
    runtime: Any = recorder
    chosen = row(m, kernel=kernel)
    assert misfit(chosen, TARGET, x, weights) == ""
    outs = launch(chosen, TARGET, x, weights, runtime=runtime)
    assert [tuple(out.shape) for out in outs] == [(m, n) for n in rows]
    simulate(recorder, [*buffers, *outs])
    for out, weight in zip(outs, weights, strict=True):
        assert compare(out, exact(x, weight), band(k)).ok


@pytest.mark.parametrize("tp", [8, 16])
def test_every_token_count_has_a_kernel_that_holds_it(tp: int) -> None:
    target = f"gb300:tp{tp}"
    for m in range(1, 65):
        found = row(m, target)
        assert (found.kernel, found.launches) == (STREAM, 1)
        for rows in (*KDA[tp], *MLA[tp]):
            for kernel in (STREAM, STATIONARY):
                config = config_of(variant(row(m, target, kernel), target, 7168, rows))
                assert m <= config.m <= max(8, 2 * m)
                assert config.rows == rows


def test_one_engine_serves_all_counts_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for m in (1, 64):
        assert row_of(TARGET, m, batch_invariant=True) == row(m)
    assert row_of(TARGET, 65, batch_invariant=True) is None
    rows = [row(8, kernel=STATIONARY), *(row(m) for m in (16, 32, 64))]
    mixed = Table(TABLE.op, {**TABLE.rows, TARGET: tuple(rows)})
    monkeypatch.setattr(policy, "TABLE", mixed)
    few, many = (row_of(TARGET, m, batch_invariant=True) for m in (3, 64))
    assert few is not None
    assert (few.kernel, few.m_max) == (STREAM, 8)
    assert many == row(64)
    free = row_of(TARGET, 3, batch_invariant=False)
    assert free is not None
    assert free.kernel == STATIONARY


def test_what_one_engine_cannot_serve_at_every_count_it_serves_at_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, weight = torch.zeros(2, 512, dtype=BF16), torch.zeros(17_000, 512, dtype=BF16)
    assert misfit(row(2), TARGET, x, [weight]) == ""
    assert "512 columns" in misfit(row(64), TARGET, x, [weight])
    asked: list[str] = []

    def run(*_: Any, misfit: Any, **__: Any) -> list[Tensor]:
        asked.append(misfit(row(2)))
        return [torch.zeros(2, 17_000, dtype=BF16)]

    monkeypatch.setattr(dispatch, "run", run)
    for batch_invariant in (False, True):
        op._run(
            x, [weight], target=TARGET, group="", composition="", batch_invariant=batch_invariant
        )
    assert asked[0] == ""
    assert "512 columns" in asked[1]


def test_operands_that_do_not_fit_are_named() -> None:
    x, (weight,) = operands(2, (64,), 512)
    aligned = torch.zeros(64 * 512 + 8, dtype=BF16)
    odd = aligned[4:-4].view(64, 512)
    near = torch.zeros(64, 520, dtype=BF16)[:, :512]
    for kernel, bad, said in (
        (STREAM, [weight.float()], r"weights\[0\] is torch.float32"),
        (STREAM, [weight, weight.t().contiguous().t()], r"weights\[1\] has strides \(1, 64\)"),
        (STREAM, [torch.zeros(64, 1024, dtype=BF16)[:, ::2]], "strides"),
        (STREAM, [torch.zeros(64, 516, dtype=BF16)[:, :512]], r"strides \(516, 1\)"),
        (STREAM, [weight[:1].expand(64, 512)], r"strides \(0, 1\)"),
        (STATIONARY, [near], "the kernel reads contiguous rows"),
        (STREAM, [odd], r"weights\[0\] starts at no multiple of 16 bytes"),
        (STREAM, [weight] * 9, "there are 9 weights, the kernel takes 8"),
        (STATIONARY, [torch.zeros(8000, 512, dtype=BF16)], "rows=8000"),
    ):
        message = misfit(row(2, kernel=kernel), TARGET, x, bad)
        assert re.search(said, message), message
    assert "x is torch.float32" in misfit(row(2), TARGET, x.float(), [weight])
    narrow = torch.zeros(64, 520, dtype=BF16)
    assert "k=520" in misfit(row(2), TARGET, narrow[:2], [narrow])
    for good in (weight, near):  # the control
        assert misfit(row(2), TARGET, x, [good]) == ""


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def test_what_does_not_fit_runs_the_composition(monkeypatch: pytest.MonkeyPatch) -> None:
    x, (weight,) = operands(2, (64,), 512)
    asked: list[str] = []

    def call(operand: Tensor) -> list[Tensor]:
        def judge(found: Row) -> str:
            asked.append(misfit(found, TARGET, x, [operand]))
            return asked[-1]

        return dispatch.run(
            TABLE, op.NAME, target=TARGET, m=2, composition="",
            inputs=[x.as_subclass(OnGpu), operand],
            specs=[dispatch.Spec((2, 64), BF16)], reference=list,
            kernel=lambda row: [torch.zeros(2, 64, dtype=BF16)],
            misfit=judge,
        )  # fmt: skip

    with pytest.raises(RuntimeError, match=r"does not take the operands: weights\[0\] is torch.fl"):
        call(weight.float())
    assert call(weight)[0].shape == (2, 64)  # the control
    assert len(asked) == 2
    assert asked[1] == ""
