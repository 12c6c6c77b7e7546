"""A CuTe DSL kernel whose host code encodes one tensor map."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from k3fuse.kernels.common.tensor_map import ELEMENTS, TileMap

_BITS = {0: 0, 32: 1, 64: 2, 128: 3}


class Mapped:
    """Take a tensor in tiles, dimension 0 first; the kernel only names its map."""

    def __init__(self, tiles: TileMap, internal: Any) -> None:
        self.box, self.bits, self.internal = tiles.box, _BITS[tiles.swizzle], internal

    @cute.jit
    def __call__(self, tensor: cute.Tensor, stream: CUstream):
        plain = cute.make_ordered_layout(self.box, order=tuple(range(len(self.box))))
        layout = cute.make_composed_layout(cute.make_swizzle(self.bits, 4, 3), 0, plain)
        op = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        atom, _ = cpasync.make_tiled_tma_atom(
            op, tensor, layout, self.box, internal_type=self.internal
        )
        self.kernel(atom).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, atom: cute.CopyAtom):
        cpasync.prefetch_descriptor(atom)


def host_code(tiles: TileMap, dtype: str, internal: str | None) -> str:
    """The host code for a tensor of a DSL type with the shape and tile of `tiles`."""
    bits = ELEMENTS[tiles.element].bits
    strides = (1, *(stride * 8 // bits for stride in tiles.strides))
    tensor = make_fake_tensor(getattr(cutlass, dtype), tiles.dims, strides, assumed_align=32)
    kernel = Mapped(tiles, getattr(cutlass, internal) if internal else None)
    made: Any = cute.compile(kernel, tensor, make_fake_stream(), options="--gpu-arch sm_103a")
    return str(made.ir_module)
