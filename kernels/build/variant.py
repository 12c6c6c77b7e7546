"""One description of a kernel to build, and the registry of what can be built."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Protocol

from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.common.tensor_map import ALIGNMENT, BYTES, TileMap

# The architectures kernels are compiled for: Hopper, B200/GB200, B300/GB300. The "a" forms carry
# the architecture-specific instructions (wgmma, tcgen05); their cubins run on that chip alone.
ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")

# Bytes of each kind of kernel parameter; alignment equals size, but for tensor maps (64).
PARAMETER_BYTES = {"pointer": 8, "i32": 4, "u32": 4, "i64": 8, "u64": 8, "tensor_map": BYTES}

# op -> "module:attribute" of its Builder; resolved when asked for.
BUILDERS = {
    "workbench_gemv": "k3fuse.kernels.build.workbench_gemv:BUILDER",
    "attention_projection": "k3fuse.kernels.attention_projection.builder:BUILDER",
    "attention_projection_sharded": "k3fuse.kernels.attention_projection.sharded_builder:BUILDER",
    "attn_res": "k3fuse.kernels.attn_res.builder:BUILDER",
    "output_projection": "k3fuse.kernels.output_projection.builder:BUILDER",
    "router_front": "k3fuse.kernels.router.front_builder:BUILDER",
    "router_route": "k3fuse.kernels.router.route_builder:BUILDER",
    "tail": "k3fuse.kernels.tail.builder:BUILDER",
    "experts": "k3fuse.kernels.experts.builder:BUILDER",
    "shared_gate_up": "k3fuse.kernels.experts.gate_up:BUILDER",
    "l2_prefetch": "k3fuse.kernels.prefetch.builder:BUILDER",
}

Pairs = tuple[tuple[str, int], ...]
Dim3 = tuple[int, int, int]


def check_arch(arch: str) -> None:
    """Raise VariantError unless `arch` is one of ARCHITECTURES."""
    if arch not in ARCHITECTURES:
        raise VariantError(f"arch {arch!r} is not covered; use one of {', '.join(ARCHITECTURES)}")


@dataclass(frozen=True, order=True)
class Variant:
    """One kernel: what it computes, for which chip, which sizes and which tuning.

    op: key of BUILDERS. name: readable and unique among the op's variants of one arch.
    shape, config: (name, value) pairs sorted by name; sizes in elements.
    """

    op: str
    name: str
    arch: str
    shape: Pairs
    config: Pairs

    @property
    def label(self) -> str:
        """Spelling for people: "op/name@arch"."""
        return f"{self.op}/{self.name}@{self.arch}"

    def size(self, name: str) -> int:
        """Return one size of the shape, or raise VariantError."""
        return _value(self.shape, name, self.label)

    def tuning(self, name: str) -> int:
        """Return one number of the config, or raise VariantError."""
        return _value(self.config, name, self.label)

    def to_json(self) -> dict[str, Any]:
        """Plain data, read back by `from_json`."""
        return {
            "op": self.op,
            "name": self.name,
            "arch": self.arch,
            "shape": dict(self.shape),
            "config": dict(self.config),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Variant:
        """Read `to_json`. Raises VariantError where the data is of another form."""
        try:
            return cls(
                str(data["op"]), str(data["name"]), str(data["arch"]),
                pairs(data["shape"]), pairs(data["config"]),
            )  # fmt: skip
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise VariantError(f"no kernel variant: {error!r} in {dict(data)!r}") from None


def pairs(values: Mapping[str, int]) -> Pairs:
    """Sorted (name, value) pairs."""
    return tuple(sorted((str(k), int(v)) for k, v in values.items()))


def _value(values: Pairs, name: str, label: str) -> int:
    for key, value in values:
        if key == name:
            return value
    raise VariantError(f"{label} has no {name!r}; it has {', '.join(k for k, _ in values)}")


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter. kind: a key of PARAMETER_BYTES; pointers are device addresses.

    tiles: of a tensor map, its shape, all but the address of the tensor. open_rows: each launch
    says how many rows the tensor has, at most those of `tiles`, and how far apart they lie.
    """

    name: str
    kind: str
    tiles: TileMap | None = None
    open_rows: bool = False

    def __post_init__(self) -> None:
        if self.kind not in PARAMETER_BYTES:
            raise VariantError(
                f"parameter {self.name!r}: kind {self.kind!r} is unknown; "
                f"use one of {', '.join(PARAMETER_BYTES)}"
            )
        if (self.tiles is None) is (self.kind == "tensor_map"):
            raise VariantError(
                f"parameter {self.name!r} of kind {self.kind!r}: give tiles=TileMap(...) for a "
                "tensor_map, and only there"
            )
        if self.open_rows and (self.tiles is None or len(self.tiles.dims) != 2):
            raise VariantError(
                f"parameter {self.name!r}: open_rows needs tiles=TileMap(...) of two dimensions"
            )

    @property
    def size(self) -> int:
        """Bytes."""
        return PARAMETER_BYTES[self.kind]

    @property
    def alignment(self) -> int:
        """Bytes."""
        return ALIGNMENT if self.kind == "tensor_map" else self.size

    def to_json(self, offset: int) -> dict[str, Any]:
        """Plain data, read back by `from_json`; the offset and the size are for people."""
        data = {"name": self.name, "kind": self.kind, "offset": offset, "size": self.size}
        if self.tiles is None:
            return data
        given = {**data, "tiles": asdict(self.tiles)}
        return {**given, "open_rows": True} if self.open_rows else given

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Parameter:
        """Read `to_json`. Raises VariantError for a tensor map that is none."""
        tiles = data.get("tiles")
        if tiles is not None:
            tiles = {k: tuple(v) if isinstance(v, list) else v for k, v in tiles.items()}
        try:
            known = TileMap(**tiles) if tiles else None
            return cls(data["name"], data["kind"], known, bool(data.get("open_rows", False)))
        except ValueError as error:
            raise VariantError(f"parameter {data['name']!r}: {error}") from None


# Where parameters start in their constant bank, modulo 64, where that is not 0: a tensor map is
# aligned there, so on sm_90a (0x210) a first one lies at offset 48. Seen in compiled kernels.
_BASE = {"sm_90a": 0x210 % ALIGNMENT}


def offsets(parameters: tuple[Parameter, ...], arch: str = "") -> tuple[int, ...]:
    """Byte offset of each parameter in the parameter space: declaration order, aligned.

    Source: PTX ISA, "Kernel function parameters"; compiled kernels are checked against it.
    """
    base = _BASE.get(arch, 0)
    result, end = [], 0
    for parameter in parameters:
        start = -(-(base + end) // parameter.alignment) * parameter.alignment - base
        result.append(start)
        end = start + parameter.size
    return tuple(result)


@dataclass(frozen=True)
class Plan:
    """How a variant is launched, stated by its builder and checked against the compiled kernel.

    grid, block (threads) and cluster (CTAs) in x, y, z; dynamic_smem in bytes a CTA; parameters in
    kernel order; pdl: the kernel waits for its predecessor with griddepcontrol, so the launch may
    overlap it.
    """

    grid: Dim3
    block: Dim3
    cluster: Dim3
    dynamic_smem: int
    parameters: tuple[Parameter, ...]
    pdl: bool = False

    def __post_init__(self) -> None:
        for name, limit in (("grid", 2**31 - 1), ("block", 1024), ("cluster", 16)):
            values: Dim3 = getattr(self, name)
            if min(values) < 1 or max(values) > limit:
                raise VariantError(f"{name} {values} is outside 1 to {limit}")
        if self.threads > 1024:
            raise VariantError(f"block {self.block} has {self.threads} threads; at most 1024")
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            raise VariantError(f"grid {self.grid} is no multiple of cluster {self.cluster}")
        if self.dynamic_smem < 0:
            raise VariantError(f"dynamic_smem {self.dynamic_smem} is negative")

    @property
    def threads(self) -> int:
        """Threads a CTA."""
        x, y, z = self.block
        return x * y * z

    @property
    def ctas(self) -> int:
        """CTAs of the grid."""
        x, y, z = self.grid
        return x * y * z

    def to_json(self, arch: str = "") -> dict[str, Any]:
        """Plain data, read back by `from_json`; offsets are those on `arch`."""
        places = zip(self.parameters, offsets(self.parameters, arch), strict=True)
        return {
            "grid": list(self.grid),
            "block": list(self.block),
            "cluster": list(self.cluster),
            "dynamic_smem": self.dynamic_smem,
            "pdl": self.pdl,
            "parameters": [p.to_json(at) for p, at in places],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Read `to_json`. Raises VariantError where the data is of another form."""
        try:
            return cls(
                _dim3(data["grid"]), _dim3(data["block"]), _dim3(data["cluster"]),
                int(data["dynamic_smem"]),
                tuple(Parameter.from_json(p) for p in data["parameters"]),
                bool(data["pdl"]),
            )  # fmt: skip
        except (KeyError, TypeError) as error:
            raise VariantError(f"no launch plan: {error!r} in {dict(data)!r}") from None


def _dim3(values: Any) -> Dim3:
    if len(values) != 3:
        raise VariantError(f"{values!r} is no triple")
    x, y, z = values
    return int(x), int(y), int(z)


class Builder(Protocol):
    """What one op offers the workbench. Only `trace` may import the DSL."""

    @property
    def op(self) -> str:
        """Key in BUILDERS."""

    @property
    def summary(self) -> str:
        """One line: what the kernel computes."""

    def variant(self, arch: str, shape: Mapping[str, int], config: Mapping[str, int]) -> Variant:
        """Fill in defaults; raise VariantError for names or values the kernel does not cover."""

    def variants(self, arch: str) -> tuple[Variant, ...]:
        """Return what `list` shows and a bare `build` builds for one architecture."""

    def plan(self, variant: Variant) -> Plan:
        """Return the launch geometry and the parameters."""

    def trace(self, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return a `cute.jit` callable and the stand-in arguments it is compiled with."""


def builder(op: str) -> Builder:
    """Return the builder of `op`: a key of BUILDERS, or "package.module:attribute" for one's own.

    Raises VariantError naming what can be built.
    """
    place = BUILDERS.get(op, op)
    if ":" not in place:
        raise VariantError(f"op {op!r} has no kernel to build; use one of {', '.join(BUILDERS)}")
    module, _, attribute = place.partition(":")
    try:
        found: Builder = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise VariantError(f"{place!r} names no builder ({error})") from None
    return found


@lru_cache(maxsize=1024)
def parameter_names(variant: Variant) -> tuple[str, ...]:
    """Names of a variant's parameters in kernel order; kept, since every eager call asks."""
    return tuple(parameter.name for parameter in builder(variant.op).plan(variant).parameters)
