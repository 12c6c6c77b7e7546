"""A builder with tensor maps among its parameters, for the tests; its device code is beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from k3fuse.kernels.build.variant import Parameter, Plan, Variant, pairs
from k3fuse.kernels.common.tensor_map import TileMap

ROWS, BOX = 32, 16


def tiles(box: int = BOX, swizzle: int = 128) -> TileMap:
    return TileMap("bf16", (64, ROWS), (128,), (64, box), swizzle)


PLAIN = tiles()


@dataclass(frozen=True)
class TileCopyBuilder:
    op: str = "tile_copy"
    summary: str = "copies rows of 64 BF16 in tiles"
    stated: TileMap = PLAIN

    def variant(self, arch: str, shape: Mapping[str, int], config: Mapping[str, int]) -> Variant:
        return Variant(self.op, "plain", arch, pairs(shape), pairs(config))

    def variants(self, arch: str) -> tuple[Variant, ...]:
        return (self.variant(arch, {}, {}),)

    def plan(self, variant: Variant) -> Plan:
        parameters = (
            Parameter("source", "tensor_map", self.stated),
            Parameter("skip", "i32"),
            Parameter("target", "tensor_map", tiles()),
        )
        return Plan((ROWS // BOX, 1, 1), (32, 1, 1), (1, 1, 1), 1024 + 128 * BOX, parameters)

    def trace(self, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        import tile_device

        return tile_device.TileCopy(ROWS, BOX), tile_device.arguments(ROWS, 64)


BUILDER = TileCopyBuilder()
