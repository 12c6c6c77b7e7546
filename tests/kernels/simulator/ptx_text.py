"""Small PTX kernels by hand: a frame around a body, and one call for lane-wise instructions."""

from __future__ import annotations

from typing import Any

import torch

from k3fuse.kernels.simulator import SimReport, simulate

HEAD = ".version 8.8\n.target sm_103a\n.address_size 64\n"


def kernel(body: str, *, params: int = 2, block: int = 32, shared: int = 0) -> str:
    """A kernel whose `%d0`, `%d1` ... are its parameters, `%r0` the thread, `%r1` the CTA.

    `%d10` is 4 times the thread; `buffer` is a static shared array of `shared` bytes.
    """
    declared = ", ".join(f".param .u64 p{i}" for i in range(params))
    loads = "\n".join(f"ld.param.u64 %d{i}, [p{i}];" for i in range(params))
    array = f".shared .align 16 .b8 buffer[{shared}];" if shared else ""
    return f"""{HEAD}
.visible .entry k({declared}) .reqntid {block}, 1, 1
{{
  .reg .pred %p<16>;
  .reg .b16 %h<32>;
  .reg .b32 %r<64>;
  .reg .b64 %d<32>;
  {array}
  {loads}
  mov.u32 %r0, %tid.x;
  mov.u32 %r1, %ctaid.x;
  mul.wide.u32 %d10, %r0, 4;
{body}
  ret;
}}
"""


def run(text: str, tensors: list[Any], **options: Any) -> SimReport:
    """Simulate one rank of a kernel made by `kernel`, one CTA unless told otherwise."""
    options.setdefault("grid", (1, 1, 1))
    options.setdefault("block", (32, 1, 1))
    return simulate(text, params=[tensors], **options)


_LETTER = {8: "h", 16: "h", 32: "r", 64: "d"}
_INTEGER = {16: torch.int16, 32: torch.int32, 64: torch.int64}


def lanewise(
    lines: str, inputs: list[torch.Tensor], width: int = 32, out: torch.dtype | None = None
) -> torch.Tensor:
    """Apply instructions that read `%x0`, `%x1` ... and write `%y` to every element of `inputs`.

    Elements are loaded as raw bits of their size; the result has `width` bits.
    """
    count = inputs[0].numel()
    padded = -(-count // 128) * 128
    tensors = []
    body = ["mad.lo.u32 %r2, %r1, 128, %r0;"]
    for place, tensor in enumerate(inputs):
        full = torch.zeros(padded, dtype=tensor.dtype)
        full[:count] = tensor.reshape(-1)
        tensors.append(full)
        size = tensor.element_size()
        bits = 8 * size
        body.append(f".reg .b{max(bits, 16)} %x{place};")
        body.append(f"mad.wide.u32 %d20, %r2, {size}, %d{place};")
        body.append(f"ld.global.b{bits} %x{place}, [%d20];")
    result = torch.zeros(padded, dtype=out or _INTEGER[width])
    body.append(f".reg .b{width} %y;")
    body.append(lines)
    body.append(f"mad.wide.u32 %d20, %r2, {width // 8}, %d{len(inputs)};")
    body.append(f"st.global.b{width} [%d20], %y;")
    text = kernel("\n".join(body), params=len(inputs) + 1, block=128)
    run(text, [*tensors, result], grid=(padded // 128, 1, 1), block=(128, 1, 1))
    return result[:count]


def ints(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Unsigned values as a tensor of a signed type of the same size."""
    bits = torch.iinfo(dtype).bits
    wrapped = [(v + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1)) for v in values]
    return torch.tensor(wrapped, dtype=dtype)
