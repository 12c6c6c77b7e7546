"""The hardware a rewrite is for."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Marketing name -> the SM architecture the kernels are compiled for.
ARCHITECTURES = {"gb300": "sm_103a"}
TP_SIZES = (8, 16)


class TargetError(ValueError):
    """A target that does not exist or does not fit the process."""


@dataclass(frozen=True)
class Target:
    """Architecture and tensor parallelism. `reference` accepts every geometry on any device.

    arch: a key of ARCHITECTURES, "reference", or "" where nothing suitable was detected.
    tp: ranks of the tensor-parallel group; 0 = whatever the graph says (reference only).
    group: process group name where the caller fixes one.
    batch_invariant: ops that have several engines use one of them for all token counts.
    row_sharded: rows of weights that all ranks have alike are split over them where an op can.
    """

    arch: str
    tp: int = 0
    group: str = ""
    batch_invariant: bool = False
    row_sharded: bool = False

    @property
    def is_reference(self) -> bool:
        """Whether sites run reference implementations and kernel guards are not asked."""
        return self.arch == "reference"

    @property
    def name(self) -> str:
        """Spelling used in options, ops and reports: "gb300:tp8", "reference", "none"."""
        if self.is_reference:
            return "reference"
        return f"{self.arch}:tp{self.tp}" if self.arch else "none"

    @property
    def sm(self) -> str:
        """SM architecture, e.g. "sm_103a"; "" for reference and none."""
        return ARCHITECTURES.get(self.arch, "")

    @classmethod
    def reference(cls) -> Target:
        """Accept every geometry and run the reference implementations (small models on a CPU)."""
        return cls("reference")

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read "gb300:tp8", "reference" or "none". Raises TargetError naming what is known."""
        if text in ("reference", "none"):
            return cls("reference" if text == "reference" else "")
        found = re.fullmatch(r"([a-z0-9]+):tp(\d+)", text)
        known = ", ".join(f"{a}:tp{t}" for a in ARCHITECTURES for t in TP_SIZES)
        if found is None:
            raise TargetError(
                f"target {text!r} is not of the form ARCH:tpN; use one of {known}, reference"
            )
        arch, tp = found[1], int(found[2])
        if arch not in ARCHITECTURES:
            raise TargetError(
                f"target {text!r}: architecture {arch!r} is unknown; use one of {known}, reference"
            )
        if tp not in TP_SIZES:
            raise TargetError(
                f"target {text!r}: tp{tp} is not covered; use one of {known}, reference"
            )
        return cls(arch, tp)

    @classmethod
    def detect(cls) -> Target:
        """Return the target of this process: its GPU and default group; arch "" where none fits."""
        import torch

        if not torch.cuda.is_available():
            return cls("")
        capability = torch.cuda.get_device_capability()
        arch = "gb300" if capability == (10, 3) else ""
        tp = world_size()
        return cls(arch, tp) if arch and tp in TP_SIZES else cls("")

    def check_process_group(self) -> None:
        """Raise TargetError where an initialised process group cannot hold this target's ranks."""
        world = world_size()
        if self.tp and world > 1 and world % self.tp:
            raise TargetError(
                f"target {self.name!r} needs groups of {self.tp} ranks, the process group has "
                f"{world}; start a multiple of {self.tp} ranks or name another target"
            )


def world_size() -> int:
    """Ranks of the default process group, 1 where there is none."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
