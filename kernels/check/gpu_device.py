"""The CUDA device that `k3fuse kernels gpu` runs on."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.build.cache import Cache
from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.errors import LaunchError
from k3fuse.kernels.build.launch import Launcher
from k3fuse.kernels.build.variant import ARCHITECTURES, Variant
from k3fuse.kernels.common.runtime import Runtime

NO_GPU = "no CUDA device here, so nothing ran and nothing was measured; use a machine with a GPU of"


class CudaDevice:
    """`kernels.check.gpu.Device` for the current CUDA device. Raises LaunchError without one."""

    def __init__(self, cache: Path | None = None) -> None:
        # Kernels that wait for each other must not share one of the queues into the device.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        if not torch.cuda.is_available():
            raise LaunchError(f"{NO_GPU} {', '.join(ARCHITECTURES)}")
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.name, self.sms = found.name, found.multi_processor_count
        self.arch = f"sm_{found.major}{found.minor}a"
        self.l2_bytes = int(found.L2_cache_size)
        if self.arch not in ARCHITECTURES:
            raise LaunchError(
                f"{self.name} is {self.arch}; kernels are built for {', '.join(ARCHITECTURES)}"
            )
        self._runtime = Runtime(cache=Cache(cache))
        self._streams: list[torch.cuda.Stream] = []
        self._apart: dict[Variant, Launcher] = {}

    def put(self, tensor: Tensor) -> Tensor:
        """A copy on the device."""
        return tensor.cuda()

    def built(self, variant: Variant) -> Built:
        """The kernel, compiled."""
        return self._runtime.built(variant)

    def launch(self, variant: Variant, values: Sequence[int]) -> None:
        """Launch on the current stream."""
        self._runtime.kernel(variant)(*values)

    def together(self, calls: Sequence[tuple[Variant, Sequence[int]]]) -> None:
        """One stream a kernel, forked from the current one and joined to it; without PDL, which
        looks at a stream's own predecessor alone."""
        here = torch.cuda.current_stream()
        while len(self._streams) < len(calls):
            self._streams.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        for stream, (variant, values) in zip(self._streams, calls, strict=False):
            stream.wait_stream(here)
            if variant not in self._apart:
                self._apart[variant] = Launcher(self.built(variant), pdl=False)
            with torch.cuda.stream(stream):
                self._apart[variant](*values)
        for stream in self._streams[: len(calls)]:
            here.wait_stream(stream)

    def graph(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run once, which loads kernels and warms allocators up, then capture."""
        work()
        torch.cuda.synchronize()
        made = torch.cuda.CUDAGraph()
        with torch.cuda.graph(made):
            work()
        return made.replay

    def wait(self) -> None:
        """Synchronise."""
        torch.cuda.synchronize()

    def seconds(self, work: Callable[[], None]) -> float:
        """Between two events around it."""
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
