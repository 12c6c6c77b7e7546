"""From the op's tensors to the launch: operands in place, kernels per count, what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from attention_runs import BF16, band, exact, operands, store
from torch import Tensor

from k3fuse.kernels.attention_projection import op
from k3fuse.kernels.attention_projection.builder import KDA, MLA, config_of
from k3fuse.kernels.attention_projection.launch import launch, misfit, variant
from k3fuse.kernels.attention_projection.policy import STATIONARY, TABLE
from k3fuse.kernels.common import dispatch
from k3fuse.kernels.common.policy import Row
from k3fuse.kernels.common.tolerances import compare
from k3fuse.kernels.simulator import Inside, Launch, simulate_sequence

TARGET = "gb300:tp16"


class Recorder:
    """A runtime that keeps what would have been launched."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, tuple[int, ...]]] = []

    def kernel(self, chosen: Any) -> Any:
        return lambda *values: self.launched.append((chosen, values))


def row_of(m: int, target: str = TARGET) -> Row:
    row = TABLE.lookup(target, m)
    assert row is not None
    return row


def simulate(recorder: Recorder, tensors: list[Tensor]) -> None:
    """Run the one launch; every address must lie in one of the tensors."""
    ((chosen, numbers),) = recorder.launched
    built = store().get(chosen)
    params: list[Any] = []
    for parameter, number in zip(built.plan.parameters, numbers, strict=True):
        if parameter.kind != "pointer":
            params.append(number)
            continue
        inside = [t for t in tensors if 0 <= number - t.data_ptr() < t.nbytes]
        assert len(inside) == 1
        params.append(Inside(inside[0], number - inside[0].data_ptr()))
    plan = built.plan
    names = [p.name for p in plan.parameters]
    made = Launch(
        built.ptx, plan.grid, plan.block, [params], cluster=plan.cluster,
        dynamic_smem=plan.dynamic_smem, pdl=plan.pdl, names=names,
    )  # fmt: skip
    simulate_sequence([made], ranks=1)


@pytest.mark.parametrize(("m", "strided"), [(3, False), (17, True)])
def test_the_launch_computes_the_op(m: int, strided: bool) -> None:
    pytest.importorskip("cutlass")
    rows, k = (64, 40, 6), 512
    x, weights = operands(m, rows, k, seed=m)
    if strided:
        wide = torch.full((m, k + 8), float("nan"), dtype=BF16)
        wide[:, :k] = x
        x = wide[:, :k]
    recorder = Recorder()
    runtime: Any = recorder
    assert misfit(row_of(m), TARGET, x, weights) == ""
    outs = launch(row_of(m), TARGET, x, weights, runtime=runtime)
    assert [tuple(out.shape) for out in outs] == [(m, n) for n in rows]
    whole = x if not strided else wide
    simulate(recorder, [whole, *weights, *outs])
    for out, weight in zip(outs, weights, strict=True):
        assert compare(out, exact(x, weight), band(k)).ok


@pytest.mark.parametrize("tp", [8, 16])
def test_every_token_count_has_a_kernel_that_holds_it(tp: int) -> None:
    target = f"gb300:tp{tp}"
    for m in range(1, 65):
        row = row_of(m, target)
        assert (row.kernel, row.launches) == (STATIONARY, 1)
        for rows in (*KDA[tp], *MLA[tp]):
            config = config_of(variant(row, target, 7168, rows))
            assert m <= config.m <= max(8, 2 * m)
            assert config.rows == rows


def test_operands_that_do_not_fit_are_named() -> None:
    x, (weight,) = operands(2, (64,), 512)
    row = row_of(2)
    aligned = torch.zeros(64 * 512 + 8, dtype=BF16)
    odd = aligned[4:-4].view(64, 512)
    for bad, said in (
        ([weight.float()], r"weights\[0\] is torch.float32"),
        ([weight, weight.t().contiguous().t()], r"weights\[1\] has strides \(1, 64\)"),
        ([torch.zeros(64, 1024, dtype=BF16)[:, ::2]], "strides"),
        ([odd], r"weights\[0\] starts at no multiple of 16 bytes"),
        ([weight] * 9, "there are 9 weights, the kernel takes 8"),
        ([torch.zeros(8000, 512, dtype=BF16)], "rows=8000"),
    ):
        message = misfit(row, TARGET, x, bad)
        assert re.search(said, message), message
    assert "x is torch.float32" in misfit(row, TARGET, x.float(), [weight])
    narrow = torch.zeros(64, 520, dtype=BF16)
    assert "k=520" in misfit(row, TARGET, narrow[:2], [narrow])
    assert misfit(row, TARGET, x, [weight]) == ""  # the control


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def test_what_does_not_fit_runs_the_composition(monkeypatch: pytest.MonkeyPatch) -> None:
    x, (weight,) = operands(2, (64,), 512)
    asked: list[str] = []

    def call(operand: Tensor) -> list[Tensor]:
        def judge(row: Row) -> str:
            asked.append(misfit(row, TARGET, x, [operand]))
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
