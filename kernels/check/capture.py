"""What the DSL's own compiled host code would launch, captured without a GPU.

k3fuse launches kernels from the plan that a builder states. The DSL has a launcher of its own: host
code, compiled beside the kernel. Here that code runs against a stand-in for the CUDA runtime (see
fake_runtime.c), in a process of its own, because the DSL chooses its runtime when it is imported.
What it asks for is a second, independent source for the plan, and can be run in the simulator.

Needs the DSL and a C compiler. It relies on what DSL 4.8.1 does inside; another version may refuse.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3fuse.kernels.build.compile import Built, dsl_installed
from k3fuse.kernels.build.errors import MissingDslError
from k3fuse.kernels.build.variant import Dim3, Plan, Variant
from k3fuse.kernels.simulator import SimReport, simulate

SOURCE = Path(__file__).with_name("fake_runtime.c")
# The DSL takes the library of its runtime by the name of the file.
LIBRARY = "libcute_dsl_runtime.so"
COMPILERS = ("cc", "gcc", "clang")
# cudaLaunchAttributeID: cooperative, cluster dimension, programmatic stream serialization.
COOPERATIVE, CLUSTER, PDL = 2, 4, 6
TIMEOUT_SECONDS = 300


class CaptureError(RuntimeError):
    """The host code cannot be run here, or did something else than one launch; one line."""


@dataclass(frozen=True)
class Captured:
    """One launch as the host code asked for it.

    kernel: the symbol. grid, cluster in CTAs, block in threads, dynamic_smem in bytes a CTA.
    attributes: ids of all launch attributes. parameters: bytes of each, with the argument of the
    builder's traced function that they came from ("" where they are no argument's value).
    settings: (attribute, value) of the kernel, set before. on_stream: whether the launch went to
    the stream that was given.
    """

    kernel: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    dynamic_smem: int
    pdl: bool
    cooperative: bool
    attributes: tuple[int, ...]
    parameters: tuple[tuple[str, bytes], ...]
    settings: tuple[tuple[int, int], ...]
    on_stream: bool

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Captured:
        """Read what the child process wrote."""

        def three(values: Sequence[int]) -> Dim3:
            x, y, z = values
            return int(x), int(y), int(z)

        return cls(
            data["kernel"], three(data["grid"]), three(data["block"]), three(data["cluster"]),
            data["dynamic_smem"], data["pdl"], data["cooperative"], tuple(data["attributes"]),
            tuple((name, bytes.fromhex(text)) for name, text in data["parameters"]),
            tuple((a, v) for a, v in data["settings"]), data["on_stream"],
        )  # fmt: skip

    def differences(self, plan: Plan) -> list[str]:
        """What a plan states otherwise, one line each; empty where both launch the same."""
        compared: tuple[tuple[str, object, object], ...] = (
            ("grid", plan.grid, self.grid),
            ("block", plan.block, self.block),
            ("cluster", plan.cluster, self.cluster),
            ("dynamic shared memory", plan.dynamic_smem, self.dynamic_smem),
            ("pdl", plan.pdl, self.pdl),
            ("cooperative", False, self.cooperative),
            ("stream is the caller's", True, self.on_stream),
            ("parameters", tuple(p.name for p in plan.parameters), self.arguments),
        )
        return [
            f"{what}: plan {said}, host code {got}" for what, said, got in compared if said != got
        ]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments that the parameters came from, in kernel order."""
        return tuple(name for name, _ in self.parameters)

    def simulate(self, built: Built, values: Mapping[str, Any]) -> SimReport:
        """Run this launch, not the plan's, in the simulator, with one rank's values by argument.

        Parameters that are no argument's value keep their bytes. Raises KeyError for an argument
        without a value, and the simulator's errors.
        """
        params = [values[name] if name else content for name, content in self.parameters]
        return simulate(
            built.ptx, self.kernel, grid=self.grid, block=self.block, cluster=self.cluster,
            dynamic_smem=self.dynamic_smem, params=[params], names=self.arguments,
        )  # fmt: skip


def missing() -> str:
    """Why nothing can be captured here; "" where it can."""
    if not dsl_installed():
        return str(MissingDslError("a kernel's host code"))
    if _compiler() is None:
        return f"capturing a launch needs a C compiler; install one of {', '.join(COMPILERS)}"
    return ""


def capture(variants: Sequence[Variant]) -> list[Captured]:
    """Compile each variant, run its host code, and return the launches, in order.

    Raises CaptureError where that is not possible here (see `missing`), where a builder's stand-in
    arguments cannot be made real, or where the host code does not launch exactly one kernel.
    """
    if why := missing():
        raise CaptureError(why)
    found: dict[Variant, Captured] = {}
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / LIBRARY
        _compile(library)
        # The DSL runs host code only for the architecture that it takes the machine to have.
        for arch in dict.fromkeys(v.arch for v in variants):
            mine = [v for v in variants if v.arch == arch]
            found.update(zip(mine, _run(library, mine, arch), strict=True))
    return [found[v] for v in variants]


def _run(library: Path, variants: Sequence[Variant], arch: str) -> list[Captured]:
    result = library.with_name(f"{arch}.json")
    done = subprocess.run(
        [sys.executable, "-m", "k3fuse.kernels.check.capture_child", str(library), str(result)],
        input=json.dumps([v.to_json() for v in variants]),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env={**os.environ, "CUTE_DSL_LIBS": str(library), "CUTE_DSL_ARCH": arch},
    )
    if done.returncode or not result.exists():
        lines = [x.strip() for x in done.stderr.splitlines() if x.strip()]
        raise CaptureError(f"the host code did not run: {lines[-1] if lines else 'no message'}")
    return [Captured.from_json(x) for x in json.loads(result.read_text())]


def _compiler() -> str | None:
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def _compile(library: Path) -> None:
    command = [str(_compiler()), "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CaptureError(f"the stand-in runtime does not compile: {done.stderr.strip()[:300]}")
