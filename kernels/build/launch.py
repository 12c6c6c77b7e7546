"""Launch compiled kernels on the current torch stream, without the DSL.

A `Launcher` is made once for a kernel: it loads the cubin, sets what a function needs set once, and
fills in the launch configuration. A call then writes the parameters into one buffer and launches:
no device memory is allocated and nothing is waited for, so calls may be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.elf import read_cubin
from k3fuse.kernels.build.errors import LaunchError
from k3fuse.kernels.build.variant import Dim3, Parameter, offsets
from k3fuse.kernels.common.tensor_map import ALIGNMENT, TileMap

# Without an opt-in a CTA gets at most this much shared memory, static and dynamic (CUDA C++
# Programming Guide, "Shared Memory" of compute capability 7.x and later); clusters of at most 8
# CTAs are portable.
FREE_SMEM = 48 * 1024
PORTABLE_CLUSTER = 8

_FORMATS = {"pointer": "Q", "u64": "Q", "i64": "q", "u32": "I", "i32": "i", "tensor_map": "128s"}


class Rows(NamedTuple):
    """What a tensor map with open rows is made for.

    address: of the first row; number: rows; pitch: bytes from one row to the next.
    """

    address: int
    number: int
    pitch: int


@dataclass(frozen=True)
class LaunchConfig:
    """What the driver is told besides the parameters.

    grid, block, cluster in x, y, z; dynamic_smem in bytes; pdl: may start before its predecessor
    in the stream has ended; priority: of the grid, lower numbers first, None for the stream's;
    carveout: shared memory an SM should offer, in percent of its maximum, None for the driver's.
    """

    grid: Dim3
    block: Dim3
    cluster: Dim3
    dynamic_smem: int
    pdl: bool = False
    priority: int | None = None
    carveout: int | None = None

    def __post_init__(self) -> None:
        if self.carveout is not None and not 0 <= self.carveout <= 100:
            raise LaunchError(f"carveout {self.carveout} is no percentage; use 0 to 100 or None")


class Driver(Protocol):
    """The part of the CUDA driver that a launch needs. Handles are opaque."""

    def arch(self) -> str:
        """Architecture of the current device, without suffix: "sm_103"."""

    def load(self, cubin: bytes, entry: str) -> Any:
        """Load one kernel on the current device; returns its handle."""

    def allow_dynamic_smem(self, function: Any, size: int) -> None:
        """Let a kernel use up to `size` bytes of dynamic shared memory."""

    def allow_large_cluster(self, function: Any) -> None:
        """Let a kernel use clusters of more than 8 CTAs."""

    def encode_tensor_map(self, tiles: TileMap, address: int) -> bytes:
        """Return the 128 bytes of a tensor map over the tensor at a device address."""

    def configure(self, config: LaunchConfig) -> Any:
        """Turn a configuration into what `launch` takes; returns its handle."""

    def launch(self, config: Any, function: Any, stream: int, parameters: int) -> None:
        """Launch on a stream. parameters: address of an array of one pointer a parameter."""


class Launcher:
    """One kernel, ready to launch on the device that was current when this was made.

    Takes one integer a parameter, in kernel order: `tensor.data_ptr()` for pointers and for tensor
    maps, which are encoded when their address is first seen and kept until another one comes;
    `Rows` for those with open rows. Nothing checks what the addresses point to. Not for use by
    several threads at once: calls share one buffer (the driver copies it before a call returns).
    """

    def __init__(
        self,
        built: Built,
        driver: Driver | None = None,
        *,
        pdl: bool | None = None,
        priority: int | None = None,
        carveout: int | None = None,
        stream: Callable[[], int] | None = None,
    ) -> None:
        """Load the kernel. pdl None: as the kernel was built; True needs a kernel built with it.

        Raises LaunchError for a device of another architecture, a missing driver, bad options.
        """
        plan = built.plan
        if pdl and not plan.pdl:
            raise LaunchError(
                f"{built.variant.label} does not wait for its predecessor, so pdl=True would read "
                "unfinished data; build the variant with pdl"
            )
        self.config = LaunchConfig(
            plan.grid, plan.block, plan.cluster, plan.dynamic_smem,
            plan.pdl if pdl is None else pdl, priority, carveout,
        )  # fmt: skip
        self.label = built.variant.label
        self._driver = driver or _cuda_python()
        self._stream = stream or current_stream
        device = self._driver.arch()
        # "a" cubins run on exactly the chip they are named after.
        if built.variant.arch.rstrip("a") != device:
            raise LaunchError(
                f"{self.label} was built for {built.variant.arch}, this device is {device}; "
                f"build it with --arch {device}a"
            )
        _check_cubin(built)
        self._function = self._driver.load(built.cubin, built.entry)
        if built.smem_bytes > FREE_SMEM:
            self._driver.allow_dynamic_smem(self._function, plan.dynamic_smem)
        x, y, z = plan.cluster
        if x * y * z > PORTABLE_CLUSTER:
            self._driver.allow_large_cluster(self._function)
        self._prepared = self._driver.configure(self.config)
        self._parameters = ParameterBuffer(plan.parameters)
        self._maps = [
            _KeptMap(place, parameter.name, parameter.tiles, parameter.open_rows)
            for place, parameter in enumerate(plan.parameters)
            if parameter.tiles is not None
        ]

    def __call__(self, *values: int | Rows, stream: int | None = None) -> None:
        """Launch once. stream: a raw CUstream; torch's current one by default.

        Raises LaunchError for parameters that do not fit, or where the driver refuses.
        """
        self._parameters.write(self._with_maps(values) if self._maps else values)
        self._driver.launch(
            self._prepared,
            self._function,
            self._stream() if stream is None else stream,
            self._parameters.address,
        )

    def _with_maps(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values with the bytes of tensor maps in the place of addresses."""
        result = list(values)
        for kept in self._maps:
            if kept.place < len(values):
                result[kept.place] = kept.at(values[kept.place], self._driver)
        return tuple(result)


@dataclass
class _KeptMap:
    """A tensor map parameter, and the bytes for the value of the last call."""

    place: int
    name: str
    tiles: TileMap
    open_rows: bool = False
    value: Any = None
    content: bytes = b""

    def at(self, value: Any, driver: Driver) -> bytes:
        """Return the bytes for an address, or `Rows`.

        Raises LaunchError for what a map cannot hold.
        """
        if value != self.value or not self.content:
            address = value.address if isinstance(value, Rows) else value
            fits = isinstance(value, Rows) is self.open_rows
            if not fits or not isinstance(address, int) or not 0 <= address < 2**64:
                wanted = "Rows(address, number, pitch)" if self.open_rows else "tensor.data_ptr()"
                raise LaunchError(f"parameter {self.name}={value!r} is no tensor_map ({wanted})")
            tiles = self.tiles
            try:
                tiles.check_address(address)
                if isinstance(value, Rows):
                    tiles = tiles.with_rows(value.number, value.pitch)
            except ValueError as error:
                raise LaunchError(f"parameter {self.name}: {error}") from None
            self.content = driver.encode_tensor_map(tiles, address)
            self.value = value
        return self.content


def _check_cubin(built: Built) -> None:
    """Refuse a cubin of another chip than its description says; what is no ELF, the driver does."""
    if not built.cubin.startswith(b"\x7fELF"):
        return
    found = read_cubin(built.cubin).arch
    if found != built.variant.arch:
        raise LaunchError(
            f"{built.variant.label} holds a cubin for {found}; build it again with "
            f"--arch {built.variant.arch}"
        )


class ParameterBuffer:
    """The parameters of one kernel in memory, as the driver takes them.

    address: of an array of pointers, one to each parameter's bytes.
    """

    def __init__(self, parameters: tuple[Parameter, ...]) -> None:
        self._parameters = parameters
        form, end = "<", 0
        places = offsets(parameters)
        for parameter, at in zip(parameters, places, strict=True):
            form += "x" * (at - end) + _FORMATS[parameter.kind]
            end = at + parameter.size
        self._struct = struct.Struct(form)
        # Aligned as tensor maps need it; ctypes allocates with malloc.
        self._bytes = ctypes.create_string_buffer(end + ALIGNMENT)
        self._skip = -ctypes.addressof(self._bytes) % ALIGNMENT
        start = ctypes.addressof(self._bytes) + self._skip
        self._pointers = (ctypes.c_void_p * max(len(places), 1))(*(start + at for at in places))
        self.address = ctypes.addressof(self._pointers)

    def write(self, values: tuple[Any, ...]) -> None:
        """Replace all values: integers, and the bytes of tensor maps.

        Raises LaunchError naming the parameter that does not fit.
        """
        try:
            self._struct.pack_into(self._bytes, self._skip, *values)
        except (struct.error, OverflowError):
            raise LaunchError(self._complaint(values)) from None

    def _complaint(self, values: tuple[Any, ...]) -> str:
        names = ", ".join(f"{p.name} ({p.kind})" for p in self._parameters)
        if len(values) != len(self._parameters):
            return f"{len(values)} parameters given, the kernel takes {names}"
        for parameter, value in zip(self._parameters, values, strict=True):
            try:
                struct.pack("<" + _FORMATS[parameter.kind], value)
            except (struct.error, OverflowError):
                hint = " (tensor.data_ptr())" if parameter.kind == "pointer" else ""
                return f"parameter {parameter.name}={value!r} is no {parameter.kind}{hint}"
        return f"parameters {values!r} do not fit {names}"


def current_stream() -> int:
    """Torch's current stream on the current device, as a raw CUstream."""
    import torch

    return int(torch.cuda.current_stream().cuda_stream)


def _cuda_python() -> Driver:
    from k3fuse.kernels.build.cuda_driver import CudaPythonDriver

    return CudaPythonDriver()
