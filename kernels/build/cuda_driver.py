"""The CUDA driver through cuda-python; the one module that calls it."""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass
from typing import Any

from k3fuse.kernels.build.errors import LaunchError
from k3fuse.kernels.build.launch import LaunchConfig
from k3fuse.kernels.common.tensor_map import ALIGNMENT, BYTES, ELEMENTS, TileMap

NO_DRIVER = (
    "no CUDA driver or device on this machine; launch on a machine with an NVIDIA GPU "
    "(building, showing and packing kernels need none)"
)


_FILLS = {"zero": "NONE", "nan": "NAN_REQUEST_ZERO_FMA"}
# map, element type, dimensions, tensor, sizes, strides, box, element strides, then four modes.
_ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p,
    *[ctypes.POINTER(ctypes.c_uint64)] * 2, *[ctypes.POINTER(ctypes.c_uint32)] * 2,
    *[ctypes.c_int] * 4,
)  # fmt: skip


@dataclass
class _Prepared:
    """A CUlaunchConfig and the stream it names; -1 before the first launch."""

    structure: Any
    stream: int = -1


class CudaPythonDriver:
    """`Driver` for the device current in torch (device 0 before torch uses one).

    api: `cuda.bindings.driver`, replaceable for tests. Raises LaunchError where cuda-python or a
    driver is missing.
    """

    def __init__(self, api: Any = None, device: int | None = None) -> None:
        self._api = _bindings() if api is None else api
        try:
            status = self._api.cuInit(0)
        except Exception as error:  # cuda-python raises several types where libcuda is absent
            raise LaunchError(NO_DRIVER) from error
        if int(status[0]) != 0:
            raise LaunchError(f"{NO_DRIVER} ({_name(status[0])})")
        self._device = self._call("cuDeviceGet", _current_device() if device is None else device)
        self._use_primary_context()

    def arch(self) -> str:
        """Architecture of the device: "sm_103"."""
        attributes = self._api.CUdevice_attribute
        major, minor = (
            self._call("cuDeviceGetAttribute", a, self._device)
            for a in (
                attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        return f"sm_{int(major) * 10 + int(minor)}"

    def load(self, cubin: bytes, entry: str) -> Any:
        """Load a kernel now: a lazy load at the first launch could fall into a graph capture."""
        library = self._call("cuLibraryLoadData", cubin, None, None, 0, None, None, 0)
        kernel = self._call("cuLibraryGetKernel", library, entry.encode())
        return self._call("cuKernelGetFunction", kernel)

    def allow_dynamic_smem(self, function: Any, size: int) -> None:
        """Raise the limit of dynamic shared memory, in bytes."""
        attribute = self._api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", function, attribute, size)

    def allow_large_cluster(self, function: Any) -> None:
        """Allow clusters of more than 8 CTAs."""
        attributes = self._api.CUfunction_attribute
        attribute = attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        self._call("cuFuncSetAttribute", function, attribute, 1)

    def encode_tensor_map(self, tiles: TileMap, address: int) -> bytes:
        """`cuTensorMapEncodeTiled`, with 128-byte promotion into L2 as CUTLASS asks for.

        The driver wants the map at a multiple of 64 bytes, which cuda-python's own wrapper does not
        see to, so the function is called at the address that cuda-python finds for it.
        """
        api = self._api

        def chosen(kind: str, name: str) -> int:
            return int(getattr(getattr(api, f"CUtensorMap{kind}"), f"CU_TENSOR_MAP_{name}"))

        found = self._call("cuGetProcAddress", b"cuTensorMapEncodeTiled", 12000, 0)
        if not int(found):
            raise LaunchError("this driver has no cuTensorMapEncodeTiled; it came with CUDA 12")
        rank = len(tiles.dims)
        room = ctypes.create_string_buffer(BYTES + ALIGNMENT)
        place = ctypes.addressof(room) + -ctypes.addressof(room) % ALIGNMENT
        status = _ENCODE(int(found))(
            place,
            chosen("DataType", f"DATA_TYPE_{ELEMENTS[tiles.element].driver}"),
            rank,
            address,
            (ctypes.c_uint64 * rank)(*tiles.dims),
            (ctypes.c_uint64 * rank)(*tiles.strides),
            (ctypes.c_uint32 * rank)(*tiles.box),
            (ctypes.c_uint32 * rank)(*tiles.element_strides),
            chosen("Interleave", "INTERLEAVE_NONE"),
            chosen("Swizzle", f"SWIZZLE_{tiles.swizzle}B" if tiles.swizzle else "SWIZZLE_NONE"),
            chosen("L2promotion", "L2_PROMOTION_L2_128B"),
            chosen("FloatOOBfill", f"FLOAT_OOB_FILL_{_FILLS[tiles.fill]}"),
        )
        if status:
            raise LaunchError(f"cuTensorMapEncodeTiled failed: {_name(api.CUresult(status))}")
        return ctypes.string_at(place, BYTES)

    def configure(self, config: LaunchConfig) -> Any:
        """Fill in the driver's structure, but for the stream."""
        made = self._api.CUlaunchConfig()
        made.gridDimX, made.gridDimY, made.gridDimZ = config.grid
        made.blockDimX, made.blockDimY, made.blockDimZ = config.block
        made.sharedMemBytes = config.dynamic_smem
        attributes = self._attributes(config)
        made.attrs = attributes
        made.numAttrs = len(attributes)
        return _Prepared(made)

    def launch(self, config: Any, function: Any, stream: int, parameters: int) -> None:
        """`cuLaunchKernelEx`; raises LaunchError with the driver's name of the error."""
        if stream != config.stream:  # a new stream object costs as much as the launch
            config.structure.hStream = self._api.CUstream(stream)
            config.stream = stream
        (status,) = self._api.cuLaunchKernelEx(config.structure, function, parameters, 0)
        if status:
            raise LaunchError(f"cuLaunchKernelEx failed: {_name(status)}")

    def _attributes(self, config: LaunchConfig) -> list[Any]:
        ids, found = self._api.CUlaunchAttributeID, []

        def attribute(name: str) -> Any:
            made = self._api.CUlaunchAttribute()
            made.id = getattr(ids, f"CU_LAUNCH_ATTRIBUTE_{name}")
            found.append(made)
            return made.value

        if config.cluster != (1, 1, 1):
            dims = attribute("CLUSTER_DIMENSION").clusterDim
            dims.x, dims.y, dims.z = config.cluster
        if config.pdl:
            value = attribute("PROGRAMMATIC_STREAM_SERIALIZATION")
            value.programmaticStreamSerializationAllowed = 1
        if config.priority is not None:
            attribute("PRIORITY").priority = config.priority
        if config.carveout is not None:
            attribute("PREFERRED_SHARED_MEMORY_CARVEOUT").sharedMemCarveout = config.carveout
        return found

    def _use_primary_context(self) -> None:
        """Make the device's primary context current where the thread has none; torch's is it."""
        if not int(self._call("cuCtxGetCurrent")):
            context = self._call("cuDevicePrimaryCtxRetain", self._device)
            self._call("cuCtxSetCurrent", context)

    def _call(self, function: str, *arguments: Any) -> Any:
        status, *results = getattr(self._api, function)(*arguments)
        if int(status) != 0:
            raise LaunchError(f"{function} failed: {_name(status)}")
        return results[0] if results else None


def _bindings() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        raise LaunchError(
            "launching a kernel needs cuda-python, which is not installed; "
            "pip install 'k3fuse[kernels]'"
        ) from None


def _current_device() -> int:
    import torch

    started = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return torch.cuda.current_device() if started else 0


def _name(status: Any) -> str:
    return str(getattr(status, "name", status))
