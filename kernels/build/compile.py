"""Compile a variant ahead of time, without a GPU, and check the result against its plan."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import StringIO
from typing import Any

from k3fuse.kernels.build.elf import KernelFacts, read_cubin
from k3fuse.kernels.build.errors import BuildError, MissingDslError
from k3fuse.kernels.build.host_code import launch_of, tensor_maps_of
from k3fuse.kernels.build.resources import CTA_SMEM, RESERVED_SMEM, Resources, sass_histogram
from k3fuse.kernels.build.variant import Plan, Variant, builder, offsets

# Passed to every compilation and part of the cache key. `remarks{ptx}` makes the assembler report
# registers and spills, which it prints on standard error.
COMPILER_OPTIONS = ("--keep-ptx", "--keep-cubin", "remarks{ptx}")

# What the DSL prints and the host code it makes are read; other versions may differ.
NOT_UNDERSTOOD = "this version of the DSL is not understood; pip install nvidia-cutlass-dsl==4.8.1"

_capturing = threading.Lock()


@dataclass(frozen=True)
class Built:
    """A compiled variant. ptx: "" where it was not kept. entry: the kernel's symbol in the cubin.

    factors: what went into its cache key (see `cache.key_factors`).
    """

    variant: Variant
    plan: Plan
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    entry: str
    resources: Resources
    factors: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA that the kernel asks for: static and dynamic, in bytes."""
        return self.resources.static_smem + self.plan.dynamic_smem


def dsl_installed() -> bool:
    """Whether the CuTe DSL can be imported; does not import it."""
    return find_spec("cutlass") is not None


def compile_variant(variant: Variant, *, histogram: bool = True) -> Built:
    """Compile one variant to PTX and cubin and measure it.

    histogram: count the machine instructions, which takes a run of the disassembler.

    Raises MissingDslError without the DSL, VariantError for a variant its builder does not cover,
    BuildError where the compiler refuses the kernel or the kernel differs from its plan.
    """
    source = builder(variant.op)
    plan = source.plan(variant)
    if not dsl_installed():
        raise MissingDslError(variant.label)
    ptx, cubin, host, remarks = _compile(variant)
    kernel = _only_kernel(variant, cubin)
    _check(variant, plan, kernel, host)
    registers, spills = read_remarks(remarks, kernel.name)
    if registers != kernel.registers:
        raise BuildError(
            f"{variant.label}: the assembler reports {registers} registers, the cubin "
            f"{kernel.registers}; {NOT_UNDERSTOOD}"
        )
    # From sm_90 on the system's part is counted in the static section.
    static = max(0, kernel.static_smem - RESERVED_SMEM)
    if static + plan.dynamic_smem > CTA_SMEM:
        raise BuildError(
            f"{variant.label}: a CTA needs {static + plan.dynamic_smem} bytes of shared memory; "
            f"at most {CTA_SMEM} exist"
        )
    sass = sass_histogram(cubin, kernel.name) if histogram else None
    resources = Resources(kernel.registers, spills, kernel.stack, static, sass)
    return Built(variant, plan, ptx, cubin, kernel.name, resources)


def _compile(variant: Variant) -> tuple[str, bytes, str, str]:
    """PTX, cubin, the host code as text, what the compiler wrote to standard error."""
    import cutlass.cute as cute

    function, arguments = builder(variant.op).trace(variant)
    captured: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {variant.arch} --dump-dir {folder} " + " ".join(COMPILER_OPTIONS)
        try:
            with _standard_error(captured):
                compiled: Any = cute.compile(function, *arguments, options=options)
        except Exception as error:  # the DSL raises many types
            line = next((s for s in str(error).splitlines() if s.strip()), type(error).__name__)
            raise BuildError(f"{variant.label} does not compile: {line.strip()}") from error
        ptx, cubin, host = compiled.__ptx__, compiled.__cubin__, str(compiled.ir_module)
    if not isinstance(ptx, str) or not isinstance(cubin, bytes):
        raise BuildError(f"{variant.label}: the DSL returned no PTX or no cubin")
    return ptx.rstrip("\0"), cubin, host, captured[0]


@contextmanager
def _standard_error(into: list[str]) -> Iterator[None]:
    """Collect standard error, Python's and that of native code; one at a time in a process."""
    with _capturing, tempfile.TemporaryFile() as native, redirect_stderr(StringIO()) as python:
        kept = os.dup(2)
        os.dup2(native.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            native.seek(0)
            into.append(python.getvalue() + native.read().decode(errors="replace"))


def read_remarks(text: str, entry: str) -> tuple[int, int]:
    """Return (registers a thread, bytes of spill stores and loads) of one kernel from ptxas' text.

    Raises BuildError where the text does not report on the kernel.
    """
    # The DSL wraps the lines where there are spills.
    for part in " ".join(text.split()).split("Compiling entry function ")[1:]:
        used = re.search(r"Used (\d+) registers", part)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        if part.startswith(f"'{entry}'") and used and spills:
            return int(used[1]), int(spills[1]) + int(spills[2])
    raise BuildError(
        f"the compiler reported no registers and spills for {entry!r}; {NOT_UNDERSTOOD}"
    )


def _only_kernel(variant: Variant, cubin: bytes) -> KernelFacts:
    content = read_cubin(cubin)
    if content.arch != variant.arch:
        raise BuildError(f"{variant.label}: the compiler made a cubin for {content.arch}")
    if len(content.kernels) != 1:
        names = ", ".join(k.name for k in content.kernels) or "none"
        raise BuildError(f"{variant.label}: one kernel a variant is expected, found {names}")
    return content.kernels[0]


def _check(variant: Variant, plan: Plan, kernel: KernelFacts, host: str) -> None:
    """Compare the stated plan with the cubin and with the launch in the DSL's own host code."""
    places = offsets(plan.parameters, variant.arch)
    stated = tuple((at, p.size) for at, p in zip(places, plan.parameters, strict=True))
    compared: list[tuple[str, object, object]] = [
        ("parameters (offset, bytes)", stated, kernel.parameters),
    ]
    if kernel.block is not None:
        compared.append(("block", plan.block, kernel.block))
    launch = launch_of(host)
    if launch is None:
        raise BuildError(f"{variant.label}: no launch in the DSL's host code; {NOT_UNDERSTOOD}")
    compared += [
        ("grid", plan.grid, launch.grid),
        ("block", plan.block, launch.block),
        ("cluster", plan.cluster, launch.cluster),
        ("dynamic shared memory", plan.dynamic_smem, launch.dynamic_smem),
        ("pdl", plan.pdl, launch.pdl),
        *_compared_maps(plan, host),
    ]
    for what, said, found in compared:
        if said != found:
            raise BuildError(
                f"{variant.label}: the plan states {what} {said}, the compiled kernel has {found}; "
                "correct the builder's plan"
            )


def _compared_maps(plan: Plan, host: str) -> list[tuple[str, object, object]]:
    """What the plan says of its tensor maps beside what the DSL's host code encodes.

    A map that the host code makes of sizes known at the launch alone is compared no further.
    """
    stated = [p for p in plan.parameters if p.tiles is not None]
    found = tensor_maps_of(host)
    compared: list[tuple[str, object, object]] = [("tensor maps", len(stated), len(found))]
    for parameter, tiles in zip(stated, found, strict=False):
        if tiles is not None:
            compared.append((f"tensor map {parameter.name}", parameter.tiles, tiles))
    return compared
