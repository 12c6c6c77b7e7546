"""Read the launch geometry out of the host code that the DSL compiles beside a kernel.

The DSL's host function fills a launch configuration, a struct of grid, block, dynamic shared memory
and a list of attributes, with constants. k3fuse launches through cuda-python instead, from a plan
that the builder states; the host code is a second, independent source to check that plan against.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from k3fuse.kernels.build.variant import Dim3
from k3fuse.kernels.common.tensor_map import TileMap

_CONSTANT = re.compile(r"(%\w+) = llvm\.mlir\.constant\((-?\d+) : i(?:32|64)\)")
_STORE = re.compile(r"llvm\.store (%\w+), (%\w+) : i(?:32|64)")
_PLACE = re.compile(
    r"(%\w+) = llvm\.getelementptr (%\w+)\[0, (\d)(?:, (\d))?\].*-> !llvm\.ptr, !llvm\.(struct<.*>)"
)
# Fields: grid, block, dynamic shared memory, stream, attributes, their number.
_CONFIG = "struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"
# Fields: id, padding, value.
_ATTRIBUTE = "struct<(i32, array<4 x i8>, array<64 x i8>)>"
_DIMENSIONS = "struct<(i32, i32, i32)>"
# CUlaunchAttributeID of cuda.h.
_CLUSTER, _PDL = 4, 6


_MAP_PLACE = re.compile(
    r"(%\w+) = llvm\.getelementptr (%\w+)\[0, (\d+)\] : .*-> !llvm\.ptr, !llvm\.array<16 x i64>"
)


@dataclass(frozen=True)
class HostLaunch:
    """Grid in CTAs, block in threads, dynamic shared memory in bytes, cluster in CTAs, PDL."""

    grid: Dim3
    block: Dim3
    dynamic_smem: int
    cluster: Dim3 = (1, 1, 1)
    pdl: bool = False


def launch_of(text: str) -> HostLaunch | None:
    """Return the one launch in LLVM-dialect MLIR; None where it is not constant or not found."""
    for function in re.split(r"^\s*llvm\.func ", text, flags=re.M)[1:]:
        constants = {n: int(v) for n, v in _CONSTANT.findall(function)}
        places = {
            n: (base, int(i), int(j or 0), kind) for n, base, i, j, kind in _PLACE.findall(function)
        }
        config: dict[tuple[int, int], int] = {}
        ids: dict[str, int] = {}
        values: dict[str, dict[int, int]] = {}
        for value, place in _STORE.findall(function):
            if place not in places or value not in constants:
                continue
            base, i, j, kind = places[place]
            if kind == _CONFIG:
                config[i, j] = constants[value]
            elif kind == _ATTRIBUTE and i == 0:
                ids[base] = constants[value]
            elif kind == _ATTRIBUTE and i == 2:
                values.setdefault(base, {})[0] = constants[value]
            elif kind == _DIMENSIONS and base in places:
                # Of the value of an attribute: one step further to the attribute.
                values.setdefault(places[base][0], {})[i] = constants[value]
        attributes = {ids[base]: found for base, found in values.items() if base in ids}
        try:
            grid, block = ((config[f, 0], config[f, 1], config[f, 2]) for f in (0, 1))
            size = attributes.get(_CLUSTER, {0: 1, 1: 1, 2: 1})
            return HostLaunch(
                grid,
                block,
                config[2, 0],
                (size[0], size[1], size[2]),
                bool(attributes.get(_PDL, {0: 0})[0]),
            )
        except KeyError:
            continue
    return None


def tensor_maps_of(text: str) -> list[TileMap | None]:
    """Return the tensor maps that the host code fills in, in the order of the kernel's parameters.

    None where a word other than the address is not constant, or the map is not understood.
    """
    for function in re.split(r"^\s*llvm\.func ", text, flags=re.M)[1:]:
        constants = {n: int(v) for n, v in _CONSTANT.findall(function)}
        places = {n: (base, int(i)) for n, base, i in _MAP_PLACE.findall(function)}
        words: dict[str, dict[int, int | None]] = {}
        for value, place in _STORE.findall(function):
            if place in places:
                base, i = places[place]
                words.setdefault(base, {})[i] = constants.get(value)
        if words:
            return [_map_of(found) for found in words.values()]
    return []


def _map_of(words: dict[int, int | None]) -> TileMap | None:
    """The map of the constant words 1 to 7; the address, word 0, is not known when compiling."""
    values = [words.get(i) for i in range(1, 8)]
    known = [value & (1 << 64) - 1 for value in values if value is not None]
    if len(known) != len(values):
        return None
    try:
        return TileMap.decode(struct.pack("<16Q", 0, *known, *[0] * 8))[1]
    except ValueError:
        return None
