"""Guard symbols that the families share, and the guards that many of them ask."""

from __future__ import annotations

from typing import Any

import sympy
from sympy import And, Eq, Ge, Le, Or
from torch import fx

from k3fuse.rewriter.canonical import dtype_of, value_of
from k3fuse.rewriter.guards import Guard, Value, dtype_name, to_value
from k3fuse.rewriter.guards import name as name
from k3fuse.rewriter.reasons import Code

M, K, N, H, TP = sympy.symbols("M K N H TP", integer=True, nonnegative=True)
X_DTYPE, W_DTYPE, NORM_DTYPE = sympy.symbols("x_dtype w_dtype norm_dtype")
WEIGHT_ROWS_CONTIGUOUS = sympy.Symbol("weight_rows_contiguous")
BIAS = sympy.Symbol("bias")

BF16, FP32 = name("bfloat16"), name("float32")
YES, NO = name("yes"), name("no")

# Published config of Kimi K3: hidden size, attention heads x value head dim.
HIDDEN = 7168
ATTENTION_WIDTH = 96 * 128

TOKENS = Guard(
    And(Ge(M, 1), Le(M, 64)),
    Code.M_OUT_OF_RANGE,
    "a decode or verify step; the op decides at run time where M is symbolic",
    proof="reachable",
)
TP_SIZE = Guard(
    Or(Eq(TP, 8), Eq(TP, 16)), Code.TP_UNSUPPORTED, "the kernels cover TP8 and TP16", scope="kernel"
)
HIDDEN_SIZE = Guard(Eq(H, HIDDEN), Code.SHAPE_MISMATCH, "Kimi K3's hidden size", scope="kernel")
ROWS_BF16 = Guard(Eq(X_DTYPE, BF16), Code.DTYPE_MISMATCH, "activations are BF16", scope="kernel")
WEIGHTS_BF16 = Guard(Eq(W_DTYPE, BF16), Code.DTYPE_MISMATCH, "weights are BF16", scope="kernel")
SAME_DTYPE = Guard(Eq(X_DTYPE, W_DTYPE), Code.DTYPE_MISMATCH, "rows and weights share a dtype")
NORM_BF16 = Guard(
    Eq(NORM_DTYPE, BF16), Code.DTYPE_MISMATCH, "norm and score weights are BF16", scope="kernel"
)
NO_BIAS = Guard(Eq(BIAS, NO), Code.INTERPOSED_OP, "K3's linears have no bias")
IN_PLACE = Guard(
    Eq(WEIGHT_ROWS_CONTIGUOUS, YES),
    Code.STRIDE_OR_ALIGN,
    "weights are read in place by 16-byte loads: rows contiguous, row pitch a multiple of 16 bytes",
)


def yes(condition: bool) -> Value:
    """Return the guard value of a yes-or-no fact."""
    return YES if condition else NO


def rows_contiguous(*weights: fx.Node) -> Value:
    """Whether each weight has unit stride along its rows and a 16-byte row pitch."""
    for weight in weights:
        tensor = value_of(weight)
        pitch = tensor.stride(0) * tensor.element_size() if tensor.dim() == 2 else 16
        if tensor.stride(-1) != 1 or (isinstance(pitch, int) and pitch % 16):
            return NO
    return YES


def common_dtype(*nodes: fx.Node | None) -> Value:
    """Return the dtype all nodes share, or "mixed"."""
    dtypes = {dtype_of(n) for n in nodes if n is not None}
    found = dtypes.pop() if len(dtypes) == 1 else None
    return dtype_name(found) if found is not None else name("mixed")


def value(anything: Any) -> Value:
    """Shorthand of guards.to_value."""
    return to_value(anything)
