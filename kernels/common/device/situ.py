"""SiTU of single elements: beta tanh(gate / beta) sigmoid(gate) linear_beta tanh(up / linear_beta).

Errors are a few units in the last place of FP32, far below the rounding to BF16 that follows.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32

from k3fuse.kernels.common.device import ptx

# tanh(x) = x (1 - x^2/3 + 2 x^4/15 - 17 x^6/315 + 62 x^8/2835 - ...): below NEAR the rest is less
# than 1e-8 of it. From there on (1 - e) / (1 + e) with e = exp(-2 |x|) loses two bits at most.
NEAR = 0.25
SERIES = (62 / 2835, -17 / 315, 2 / 15, -1 / 3, 1.0)


def tanh(x: Any) -> Any:
    """tanh of a Float32; NaN stays NaN."""
    size = ptx.as_f32(ptx.as_i32(x) & 0x7FFFFFFF)
    e = ptx.exp(size * Float32(-2.0))
    far = (Float32(1.0) - e) * ptx.reciprocal(Float32(1.0) + e)
    square = x * x
    near = Float32(SERIES[0])
    for factor in SERIES[1:]:
        near = near * square + Float32(factor)
    signed = ptx.select(x < Float32(0.0), -far, far)
    return ptx.select(size < Float32(NEAR), near * x, signed)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)) of a Float32."""
    return ptx.reciprocal(Float32(1.0) + ptx.exp(-x))


def situ(gate: Any, up: Any, beta: Any, linear_beta: Any) -> Any:
    """SiTU of one gate and one up, all Float32."""
    squashed = beta * tanh(gate * ptx.reciprocal(beta)) * sigmoid(gate)
    return squashed * (linear_beta * tanh(up * ptx.reciprocal(linear_beta)))
