"""Shared by the tests: the stored packed file, kernels without cubins, a fake driver."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.launch import LaunchConfig
from k3fuse.kernels.build.resources import Resources
from k3fuse.kernels.build.variant import Parameter, Plan, Variant, builder
from k3fuse.kernels.common.tensor_map import TileMap

OP = "workbench_gemv"
ARCHS = ("sm_90a", "sm_100a", "sm_103a")
SMALL = {"m": 2, "n": 8, "k": 64}

# Three cubins of the small shape, one an architecture; written by
#   k3fuse kernels pack workbench_gemv --arch sm_90a --arch sm_100a --arch sm_103a
#       --shape m=2,n=8,k=64 --no-ptx -o gemv.k3pack
STORED = Path(__file__).parents[2] / "data" / "kernels" / "gemv.k3pack"


def gemv(arch: str = "sm_103a", **config: int) -> Variant:
    return builder(OP).variant(arch, SMALL, config)


def made(variant: Variant | None = None, *, cubin: bytes = b"cubin", **plan: Any) -> Built:
    """A kernel that was never compiled."""
    chosen = variant or gemv()
    stated = replace(builder(OP).plan(chosen), **plan)
    return Built(chosen, stated, ".entry k", cubin, "k", Resources(32, 0, 0, 0, {"FFMA": 3}))


def mixed_plan() -> Plan:
    """Parameters of every kind, with a hole between the second and the third."""
    kinds = ("pointer", "i32", "u64", "u32", "i64")
    return Plan((6, 1, 1), (64, 1, 1), (1, 1, 1), 0, tuple(Parameter(f"p_{k}", k) for k in kinds))


@dataclass
class FakeDriver:
    """Records every call in order; reads the parameters' bytes as the driver would."""

    device: str = "sm_103"
    sizes: tuple[int, ...] = (8, 8, 8)
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def arch(self) -> str:
        return self.device

    def load(self, cubin: bytes, entry: str) -> Any:
        self.calls.append(("load", cubin, entry))
        return "function"

    def allow_dynamic_smem(self, function: Any, size: int) -> None:
        self.calls.append(("allow_dynamic_smem", function, size))

    def allow_large_cluster(self, function: Any) -> None:
        self.calls.append(("allow_large_cluster", function))

    def encode_tensor_map(self, tiles: TileMap, address: int) -> bytes:
        self.calls.append(("encode_tensor_map", tiles, address))
        return tiles.encode(address)

    def configure(self, config: LaunchConfig) -> Any:
        self.calls.append(("configure", config))
        return "prepared"

    def launch(self, config: Any, function: Any, stream: int, parameters: int) -> None:
        pointers = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        read = tuple(ctypes.string_at(pointers[i], size) for i, size in enumerate(self.sizes))
        self.calls.append(("launch", config, function, stream, read))

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [c for c in self.calls if c[0] == name]
