"""The process in which a kernel's host code runs: `capture` starts it with CUTE_DSL_LIBS set.

Arguments: the stand-in runtime, the file to write. Standard input: a list of variants as JSON.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from k3fuse.kernels.build.variant import Plan, Variant, builder
from k3fuse.kernels.check.capture import CLUSTER, COOPERATIVE, PDL, CaptureError

# Values of which nothing else has the same; nothing is read from them.
STREAM = 0x5EED0000
POINTER, STEP = 0x7E5700000000, 0x10000000
INTEGER = 0x2BAD0000
_ATTRIBUTE_BYTES = 72  # 4 of id, 4 of padding, 64 of value
_INTEGERS = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_smem", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint32),
    )


_OnLaunch = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_Launch), ctypes.POINTER(ctypes.c_void_p)
)
_OnSetting = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int, ctypes.c_int)


class Recorder:
    """Hears of launches and settings from the stand-in runtime."""

    def __init__(self, library: str) -> None:
        self.launches: list[dict[str, Any]] = []
        self.settings: list[tuple[int, int]] = []
        self.sizes: tuple[int, ...] = ()
        # Kept alive here: C holds only their addresses.
        self._callbacks = _OnLaunch(self._launch), _OnSetting(self._setting)
        runtime = ctypes.CDLL(library)
        runtime.k3fuse_on_launch(self._callbacks[0])
        runtime.k3fuse_on_setting(self._callbacks[1])

    def start(self, plan: Plan) -> None:
        """Forget what was heard; parameters are read with the sizes of `plan`."""
        self.launches, self.settings = [], []
        self.sizes = tuple(p.size for p in plan.parameters)

    def _launch(self, kernel: bytes, launch: Any, parameters: Any) -> int:
        asked = launch.contents
        attributes: dict[int, bytes] = {}
        for place in range(asked.attribute_count):
            raw = ctypes.string_at(asked.attributes + _ATTRIBUTE_BYTES * place, _ATTRIBUTE_BYTES)
            attributes[struct.unpack_from("<i", raw)[0]] = raw[8:]

        def flag(attribute: int) -> bool:
            return bool(struct.unpack_from("<i", attributes.get(attribute, bytes(4)))[0])

        cluster = struct.unpack_from("<3I", attributes[CLUSTER]) if CLUSTER in attributes else ()
        self.launches.append(
            {
                "kernel": kernel.decode(),
                "grid": list(asked.grid),
                "block": list(asked.block),
                "cluster": list(cluster) or [1, 1, 1],
                "dynamic_smem": asked.dynamic_smem,
                "pdl": flag(PDL),
                "cooperative": flag(COOPERATIVE),
                "attributes": sorted(attributes),
                "parameters": [
                    ctypes.string_at(parameters[i], n).hex() for i, n in enumerate(self.sizes)
                ],
                "on_stream": asked.stream == STREAM,
            }
        )
        return 0

    def _setting(self, kernel: bytes, attribute: int, value: int) -> None:
        self.settings.append((attribute, value))


def launch_of(variant: Variant, recorder: Recorder) -> dict[str, Any]:
    """Compile a variant and run its host code; the one launch that it does."""
    import cutlass.cute as cute

    source = builder(variant.op)
    function, stand_ins = source.trace(variant)
    compiled: Any = cute.compile(function, *stand_ins, options=f"--gpu-arch {variant.arch}")
    made = [_real(value, place) for place, value in enumerate(stand_ins)]
    recorder.start(source.plan(variant))
    compiled(*(value for value, _ in made))
    if len(recorder.launches) != 1:
        raise CaptureError(f"{variant.label}: {len(recorder.launches)} launches; one is expected")
    found = recorder.launches[0]
    names = _names(function, len(stand_ins))
    known = {content.hex(): name for name, (_, content) in zip(names, made, strict=True) if content}
    found["parameters"] = [(known.get(text, ""), text) for text in found["parameters"]]
    found["settings"] = recorder.settings
    return found


def _real(value: Any, place: int) -> tuple[Any, bytes]:
    """A real argument for a stand-in, and the bytes by which a kernel parameter shows it."""
    from cuda.bindings.driver import CUstream
    from cutlass.cute.runtime import from_dlpack, make_ptr

    kind = type(value).__name__
    address = POINTER + STEP * place
    if kind == "_FakeStream":
        return CUstream(STREAM), b""
    if kind == "_Pointer":
        pointer = make_ptr(value.dtype, address, value.memspace, assumed_align=16)
        return pointer, address.to_bytes(8, "little")
    if kind in ("Int32", "Int64", "Uint32", "Uint64"):
        number = INTEGER + place
        return type(value)(number), number.to_bytes(8 if "64" in kind else 4, "little")
    if kind != "_FakeTensor" or value.element_type.width not in _INTEGERS:
        raise CaptureError(f"argument {place} of the traced function is a {kind}: not captured")
    # Its memory is reserved and never touched.
    memory = torch.empty_strided(
        tuple(value.shape), tuple(value.stride), dtype=_INTEGERS[value.element_type.width]
    )
    tensor = from_dlpack(memory, assumed_align=16)
    tensor.element_type = value.element_type
    return tensor, memory.data_ptr().to_bytes(8, "little")


def _names(function: Callable[..., Any], count: int) -> list[str]:
    """Names of the traced function's parameters."""
    called = function if inspect.isfunction(function) else type(function).__call__
    names = [n for n in inspect.signature(inspect.unwrap(called)).parameters if n != "self"]
    return [*names, *(f"argument {i}" for i in range(len(names), count))][:count]


def main(library: str, result: str) -> None:
    """Run the host code of every variant on standard input."""
    import cutlass  # noqa: F401  (loads the runtime that CUTE_DSL_LIBS names)
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

    # The DSL counts devices through the real runtime, which is not there.
    CudaDialectJitCompiledFunction.num_devices = property(lambda self: 1)
    recorder = Recorder(library)
    variants = [Variant.from_json(x) for x in json.load(sys.stdin)]
    Path(result).write_text(json.dumps([launch_of(v, recorder) for v in variants]))


if __name__ == "__main__":
    main(*sys.argv[1:])
