"""From the op's tensors to one kernel launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from k3fuse.kernels.attention_projection.builder import BUILDER, rows_shape
from k3fuse.kernels.attention_projection.config import MAX_WEIGHTS
from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.build.variant import Variant, parameter_names
from k3fuse.kernels.common.operands import ALIGNMENT, address, pitch, readable
from k3fuse.kernels.common.policy import Row, chip_of
from k3fuse.kernels.common.runtime import RUNTIME, Runtime


@lru_cache(maxsize=256)
def variant(row: Row, target: str, k: int, rows: tuple[int, ...]) -> Variant:
    """The kernel that a policy row launches for weights [rows_i, k].

    Raises VariantError for sizes outside the kernel.
    """
    arch, _ = chip_of(target)
    return BUILDER.variant(arch, {"m": row.m_max, "k": k, **rows_shape(rows)}, {})


def misfit(row: Row, target: str, x: Tensor, weights: Sequence[Tensor]) -> str:
    """Why the kernel cannot serve these operands, "" where it can.

    x [M, K] of any stride, weights [N_i, K].
    """
    for name, tensor in (("x", x), *((f"weights[{i}]", w) for i, w in enumerate(weights))):
        if tensor.dtype != torch.bfloat16:
            return f"{name} is {tensor.dtype}, the kernel takes torch.bfloat16"
    for i, weight in enumerate(weights):
        if not weight.is_contiguous():
            return f"weights[{i}] has strides {weight.stride()}, the kernel reads contiguous rows"
        if weight.data_ptr() % ALIGNMENT:
            return f"weights[{i}] starts at no multiple of {ALIGNMENT} bytes"
    if len(weights) > MAX_WEIGHTS:
        return f"there are {len(weights)} weights, the kernel takes {MAX_WEIGHTS}"
    try:
        variant(row, target, x.shape[1], _heights(weights))
    except VariantError as error:
        return str(error)
    return ""


def launch(
    row: Row, target: str, x: Tensor, weights: Sequence[Tensor], *, runtime: Runtime = RUNTIME
) -> list[Tensor]:
    """Run a policy row's kernel on operands without a `misfit`; returns [M, N_i] each, BF16.

    x [M, K] may have any stride: rows that cannot be read in place are copied. Raises LaunchError.
    """
    rows = readable(x)
    outs = [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights]
    chosen = variant(row, target, x.shape[1], _heights(weights))
    values = {
        "x": address(rows),
        **{f"weight{i}": address(weight) for i, weight in enumerate(weights)},
        **{f"out{i}": address(out) for i, out in enumerate(outs)},
        "m": x.shape[0],
        "x_pitch": pitch(rows),
    }
    runtime.kernel(chosen)(*(values[name] for name in parameter_names(chosen)))
    return outs


def _heights(weights: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(weight.shape[0] for weight in weights)
