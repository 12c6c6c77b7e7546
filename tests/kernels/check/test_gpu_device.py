"""The CUDA device of `k3fuse kernels gpu`, over a torch.cuda that only writes down its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from k3fuse.kernels.build.variant import Variant, builder
from k3fuse.kernels.check import gpu_device


class Hopper:
    name, major, minor = "H200", 9, 0
    multi_processor_count, L2_cache_size = 132, 50 << 20


class Cuda:
    """What happened, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.here = "main"
        self.streams = 0
        self.clock = 0.0

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        before, self.here = self.here, name
        yield
        self.here = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    state = Cuda()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")

    class Stream:
        def __init__(self, name: str = "") -> None:
            state.streams += not name
            self.name = name or f"side{state.streams}"

        def wait_stream(self, other: Stream) -> None:
            state.log.append(f"{self.name} waits for {other.name}")

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = state.clock

        def synchronize(self) -> None:
            state.log.append("synchronize event")

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    class Graph:
        def replay(self) -> None:
            state.log.append("replay")

    class Launcher:
        def __init__(self, built: Any, *, pdl: bool | None = None) -> None:
            self.name, self.pdl = built, pdl

        def __call__(self, *values: int) -> None:
            apart = "" if self.pdl is None else " without PDL"
            state.log.append(f"{state.here}: {self.name}{values}{apart}")

    class Runtime:
        def __init__(self, cache: Any) -> None:
            pass

        def built(self, variant: Variant) -> str:
            return variant.op

        def kernel(self, variant: Variant) -> Callable[..., None]:
            return Launcher(variant.op)

    for name, value in {
        "is_available": lambda: True, "current_device": lambda: 0, "Stream": Stream,
        "get_device_properties": lambda _: Hopper, "Event": Event, "CUDAGraph": Graph,
        "current_stream": lambda: Stream(state.here), "graph": lambda _: state.within("capture"),
        "stream": lambda stream: state.within(stream.name),
        "synchronize": lambda: state.log.append("synchronize"),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(gpu_device, "Launcher", Launcher)
    monkeypatch.setattr(gpu_device, "Runtime", Runtime)
    return state


def test_what_the_device_is(cuda: Cuda) -> None:
    device = gpu_device.CudaDevice()
    assert (device.name, device.arch, device.sms) == ("H200", "sm_90a", 132)
    assert device.l2_bytes == 50 << 20


def test_a_graph_is_run_once_before_it_is_captured(cuda: Cuda) -> None:
    device = gpu_device.CudaDevice()
    gemv = builder("workbench_gemv").variant("sm_90a", {}, {})
    replay = device.graph(lambda: device.launch(gemv, (1, 2)))
    replay()
    assert cuda.log == [
        "main: workbench_gemv(1, 2)", "synchronize", "capture: workbench_gemv(1, 2)", "replay",
    ]  # fmt: skip


def test_kernels_that_wait_for_each_other_get_a_stream_each(cuda: Cuda) -> None:
    device = gpu_device.CudaDevice()
    gemv = builder("workbench_gemv").variant("sm_90a", {}, {})
    device.together([(gemv, (1,)), (gemv, (2,))])
    device.together([(gemv, (3,))])
    assert cuda.log == [
        "side1 waits for main", "side1: workbench_gemv(1,) without PDL",
        "side2 waits for main", "side2: workbench_gemv(2,) without PDL",
        "main waits for side1", "main waits for side2",
        "side1 waits for main", "side1: workbench_gemv(3,) without PDL", "main waits for side1",
    ]  # fmt: skip


def test_seconds_are_between_two_events(cuda: Cuda) -> None:
    def work() -> None:
        cuda.clock += 3.0  # milliseconds, as events count

    assert gpu_device.CudaDevice().seconds(work) == pytest.approx(3e-3)
    assert cuda.log == ["synchronize event"]
