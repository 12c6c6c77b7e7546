"""What a compiled kernel takes of a chip, exactly, without a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from k3fuse.kernels.build.errors import BuildError
from k3fuse.kernels.build.variant import Plan

# SMs of the chips the kernels run on: GB300, B200/GB200 as commonly enabled, H200.
SM_COUNTS = (152, 148, 132)

# Per SM, compute capability 9.0, 10.0 and 10.3 alike. Source: CUDA C++ Programming Guide, table
# "Technical Specifications per Compute Capability".
SM_WARPS = 64
SM_CTAS = 32
SM_REGISTERS = 65536
SM_SMEM = 228 * 1024
CTA_SMEM = 227 * 1024
RESERVED_SMEM = 1024  # by the system, in each CTA
WARP_REGISTER_UNIT = 256
SM_PARTS = 4
SMEM_UNIT = 128


@dataclass(frozen=True)
class Resources:
    """What one kernel takes.

    registers: per thread. spill_bytes: bytes of spill stores plus spill loads in the code, as ptxas
    counts them. stack_bytes: frame of a thread. static_smem: bytes a CTA, without the system's.
    sass: instructions by opcode without modifiers, None where they were not counted, or no
    disassembler was installed.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    static_smem: int
    sass: Mapping[str, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data, read back by `from_json`."""
        return {**asdict(self), "sass": dict(self.sass) if self.sass is not None else None}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Resources:
        """Read `to_json`. Raises BuildError where the data is of another form."""
        try:
            sass = data["sass"]
            return cls(
                registers=int(data["registers"]),
                spill_bytes=int(data["spill_bytes"]),
                stack_bytes=int(data["stack_bytes"]),
                static_smem=int(data["static_smem"]),
                sass=None if sass is None else {str(k): int(v) for k, v in sass.items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BuildError(f"no resources: {error!r} in {dict(data)!r}") from None


@dataclass(frozen=True)
class Occupancy:
    """How many CTAs of a kernel a chip holds at once.

    limit: what runs out first ("registers", "shared memory", "warps", "CTAs"). resident: CTAs the
    chip holds, whole clusters. It is an upper bound for clusters, which must fit one GPC each.
    waves: grid CTAs / resident. co_resident: the whole grid runs at once, so its CTAs may wait for
    each other.
    """

    sms: int
    ctas_per_sm: int
    warps_per_sm: int
    limit: str
    resident: int
    waves: float
    co_resident: bool


def cta_registers(registers: int, warps: int) -> int:
    """Registers of an SM that a CTA holds; more than there are where it can never fit.

    Registers are dealt out in units to a warp, from a quarter of them in each part of an SM, so
    that the remainder of each part is lost; a CTA of an uneven number of warps must fit as if it
    had whole fours (source: cuda_occupancy.h of the CUDA toolkit). 0 where `registers` is 0.
    """
    per_warp = -(-registers * 32 // WARP_REGISTER_UNIT) * WARP_REGISTER_UNIT
    if not per_warp:
        return 0
    fitting = SM_REGISTERS // per_warp // SM_PARTS * SM_PARTS
    if fitting < -(-warps // SM_PARTS) * SM_PARTS:
        return SM_REGISTERS + 1
    return SM_REGISTERS * warps // fitting


def cta_smem(requested: int) -> int:
    """Bytes of shared memory that a CTA holds: what it asks for, the system's, in whole units."""
    return -(-(requested + RESERVED_SMEM) // SMEM_UNIT) * SMEM_UNIT


def occupancy(plan: Plan, resources: Resources, sms: int) -> Occupancy:
    """Occupancy of one kernel on a chip of `sms` SMs from registers, shared memory and threads."""
    warps = -(-plan.threads // 32)
    smem = cta_smem(plan.dynamic_smem + resources.static_smem)
    fits = {
        "registers": SM_REGISTERS // max(cta_registers(resources.registers, warps), 1),
        "shared memory": SM_SMEM // smem,
        "warps": SM_WARPS // warps,
        "CTAs": SM_CTAS,
    }
    limit = min(fits, key=lambda name: fits[name])
    per_sm = fits[limit]
    x, y, z = plan.cluster
    cluster = x * y * z
    resident = per_sm * sms // cluster * cluster
    waves = plan.ctas / resident if resident else float("inf")
    return Occupancy(sms, per_sm, per_sm * warps, limit, resident, waves, plan.ctas <= resident)


def sass_histogram(cubin: bytes, entry: str) -> dict[str, int] | None:
    """Instructions of one kernel by opcode, most frequent first; None without nvdisasm.

    Raises BuildError where nvdisasm fails or does not show the kernel.
    """
    tool = find_tool("nvdisasm")
    if tool is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([str(tool), "-c", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{tool.name} failed: {' '.join(done.stderr.split())[:200]}")
    return count_sass(done.stdout, entry)


_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.M)


def count_sass(text: str, entry: str) -> dict[str, int]:
    """Count opcodes in nvdisasm's text for the section `.text.ENTRY`; raises BuildError without."""
    found = re.search(rf"^\.text\.{re.escape(entry)}:\n(.*?)(?=^//-----|\Z)", text, re.M | re.S)
    if found is None:
        raise BuildError(f"nvdisasm shows no kernel {entry!r}")
    counts = Counter(_INSTRUCTION.findall(found[1]))
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def find_tool(name: str) -> Path | None:
    """Path of one of NVIDIA's binary utilities: from its wheel (nvidia-cuda-NAME), or on PATH."""
    spec = find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(root).glob(f"*/bin/{name}"), reverse=True):
            return path
    found = shutil.which(name)
    return Path(found) if found else None
