"""From the op's tensors to one kernel launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from k3fuse.kernels.attention_projection.builder import BUILDER, rows_shape
from k3fuse.kernels.attention_projection.config import MAX_WEIGHTS
from k3fuse.kernels.attention_projection.policy import STREAM
from k3fuse.kernels.attention_projection.stream_config import ELEMENT
from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.build.launch import Rows
from k3fuse.kernels.build.variant import Variant, parameter_names
from k3fuse.kernels.common import placement
from k3fuse.kernels.common.operands import ALIGNMENT, address, pitch, readable
from k3fuse.kernels.common.policy import Row, chip_of
from k3fuse.kernels.common.runtime import RUNTIME, Runtime


@lru_cache(maxsize=256)
def variant(row: Row, target: str, k: int, rows: tuple[int, ...]) -> Variant:
    """The kernel that a policy row launches for weights [rows_i, k].

    Raises VariantError for sizes outside the kernel.
    """
    arch, _ = chip_of(target)
    shape = {"m": row.m_max, "k": k, **rows_shape(rows)}
    return BUILDER.variant(arch, shape, {"stream": int(row.kernel == STREAM)})


def misfit(row: Row, target: str, x: Tensor, weights: Sequence[Tensor]) -> str:
    """Why the kernel cannot serve these operands, "" where it can.

    x [M, K] of any stride, weights [N_i, K]. The stream kernel reads rows of weights that lie
    apart, the stationary one contiguous weights.
    """
    unfit = unreadable(row.kernel == STREAM, x, weights)
    if unfit:
        return unfit
    if len(weights) > MAX_WEIGHTS:
        return f"there are {len(weights)} weights, the kernel takes {MAX_WEIGHTS}"
    try:
        variant(row, target, x.shape[1], _heights(weights))
    except VariantError as error:
        return str(error)
    return ""


def unreadable(stream: bool, x: Tensor, weights: Sequence[Tensor]) -> str:
    """Why an engine cannot read operands, "" where it can. stream: the stream kernel."""
    if unfit := narrow(x, weights):
        return unfit
    for i, weight in enumerate(weights):
        if reason := misplaced(stream, weight):
            return f"weights[{i}] {reason}"
    return ""


def narrow(x: Tensor, weights: Sequence[Tensor]) -> str:
    """Why no engine multiplies operands of their dtypes, "" where they are BF16."""
    for name, tensor in (("x", x), *((f"weights[{i}]", w) for i, w in enumerate(weights))):
        if tensor.dtype != torch.bfloat16:
            return f"{name} is {tensor.dtype}, the kernel takes torch.bfloat16"
    return ""


def misplaced(stream: bool, weight: Tensor) -> str:
    """Why an engine cannot read a weight [N, K] in place, "" where it can."""
    if not stream:
        return placement.misplaced(weight)
    apart = _apart(weight)
    if weight.stride(1) != 1 or apart % ALIGNMENT or apart < weight.shape[1] * ELEMENT:
        return (
            f"has strides {weight.stride()}, the kernel reads rows of neighbouring elements that"
            f" lie a multiple of {ALIGNMENT} bytes apart"
        )
    return placement.unaligned(weight)


def launch(
    row: Row, target: str, x: Tensor, weights: Sequence[Tensor], *, runtime: Runtime = RUNTIME
) -> list[Tensor]:
    """Run a policy row's kernel on operands without a `misfit`; returns [M, N_i] each, BF16.

    x [M, K] may have any stride: rows that cannot be read in place are copied. Raises LaunchError.
    """
    rows = readable(x)
    outs = [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights]
    chosen = variant(row, target, x.shape[1], _heights(weights))
    read = inputs(row.kernel == STREAM, rows, weights)
    values = {**read, **{f"out{i}": address(out) for i, out in enumerate(outs)}, "m": x.shape[0]}
    runtime.kernel(chosen)(*(values[name] for name in parameter_names(chosen)))
    return outs


def inputs(stream: bool, rows: Tensor, weights: Sequence[Tensor]) -> dict[str, int | Rows]:
    """The parameters for readable rows of x and for weights, by name. stream: the stream kernel."""
    if stream:
        return {"x": _rows(rows), **{f"weight{i}": _rows(w) for i, w in enumerate(weights)}}
    read = {"x": address(rows), **{f"weight{i}": address(w) for i, w in enumerate(weights)}}
    return {**read, "x_pitch": pitch(rows)}


def _heights(weights: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(weight.shape[0] for weight in weights)


def _rows(matrix: Tensor) -> Rows:
    """What a tensor map of a matrix is made for."""
    return Rows(address(matrix), matrix.shape[0], _apart(matrix))


def _apart(matrix: Tensor) -> int:
    """Bytes from one row to the next."""
    return pitch(matrix) * ELEMENT
