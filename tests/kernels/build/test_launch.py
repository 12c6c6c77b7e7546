"""Launching: what the driver is told, the parameters' bytes, one call a launch, and refusals."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from k3fuse.kernels.build import packed
from k3fuse.kernels.build.errors import LaunchError
from k3fuse.kernels.build.launch import LaunchConfig, Launcher, current_stream
from workbench_cases import STORED, FakeDriver, gemv, made, mixed_plan

POINTERS = (0x7F00_0000_1000, 0x7F00_0000_2000, 2**64 - 16)


def test_a_launch_from_a_packed_file() -> None:
    driver = FakeDriver("sm_90")
    kernel = packed.select(packed.load(STORED), "sm_90a", "workbench_gemv")
    launch = Launcher(kernel, driver, stream=lambda: 77)
    config = LaunchConfig((2, 1, 1), (128, 1, 1), (1, 1, 1), 128)
    assert driver.calls == [("load", kernel.cubin, kernel.entry), ("configure", config)]
    del driver.calls[:]
    launch(*POINTERS)
    parameters = tuple(struct.pack("<Q", p) for p in POINTERS)
    assert driver.calls == [("launch", "prepared", "function", 77, parameters)]


def test_every_call_is_one_launch_with_its_own_parameters() -> None:
    driver = FakeDriver()
    launch = Launcher(made(), driver, stream=lambda: 1)
    del driver.calls[:]
    for i in range(3):
        launch(i, 2 * i, 3 * i, stream=10 + i)
    read = [tuple(struct.unpack("<Q", b)[0] for b in c[4]) for c in driver.calls]
    assert [c[0] for c in driver.calls] == ["launch"] * 3
    assert [c[3] for c in driver.calls] == [10, 11, 12]
    assert read == [(0, 0, 0), (1, 2, 3), (2, 4, 6)]


def test_parameters_of_every_kind() -> None:
    driver = FakeDriver(sizes=(8, 4, 8, 4, 8))
    launch = Launcher(made(parameters=mixed_plan().parameters), driver, stream=lambda: 0)
    launch(2**63, -5, 2**64 - 1, 2**32 - 1, -(2**63))
    assert driver.named("launch")[0][4] == (
        b"\x00" * 7 + b"\x80",
        b"\xfb\xff\xff\xff",
        b"\xff" * 8,
        b"\xff" * 4,
        b"\x00" * 7 + b"\x80",
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((1, 2), r"2 parameters given, the kernel takes x \(pointer\), w \(pointer\), y"),
        ((1, 2, 3, 4), "4 parameters given"),
        ((1, -2, 3), r"parameter w=-2 is no pointer \(tensor.data_ptr\(\)\)"),
        ((1, 2, 2**64), "parameter y=18446744073709551616 is no pointer"),
        ((1.5, 2, 3), "parameter x=1.5 is no pointer"),
        ((None, 2, 3), "parameter x=None is no pointer"),
    ],
)
def test_parameters_that_do_not_fit(values: tuple[Any, ...], message: str) -> None:
    driver = FakeDriver()
    launch = Launcher(made(), driver, stream=lambda: 0)
    with pytest.raises(LaunchError, match=message):
        launch(*values)
    assert driver.named("launch") == []
    launch(1, 2, 3)
    assert len(driver.named("launch")) == 1


def configured(**options: Any) -> LaunchConfig:
    driver, plan = FakeDriver(), options.pop("plan", {})
    Launcher(made(gemv(pdl=options.pop("built_pdl", 0)), **plan), driver, **options)
    (call,) = driver.named("configure")
    found: LaunchConfig = call[1]
    return found


def test_options_reach_the_driver() -> None:
    plain = configured()
    assert (plain.pdl, plain.priority, plain.carveout, plain.cluster) == (
        False,
        None,
        None,
        (1, 1, 1),
    )
    assert configured(built_pdl=1).pdl
    assert not configured(built_pdl=1, pdl=False).pdl
    assert configured(priority=-3).priority == -3
    assert configured(carveout=100).carveout == 100
    shape = configured(plan={"grid": (8, 2, 1), "cluster": (4, 2, 1), "dynamic_smem": 4096})
    assert (shape.grid, shape.cluster, shape.dynamic_smem) == ((8, 2, 1), (4, 2, 1), 4096)


def test_bad_options_are_refused() -> None:
    with pytest.raises(LaunchError, match="does not wait for its predecessor"):
        configured(pdl=True)
    assert configured(built_pdl=1, pdl=True).pdl
    for carveout in (-1, 101):
        with pytest.raises(LaunchError, match="is no percentage"):
            configured(carveout=carveout)


@pytest.mark.parametrize(
    ("smem", "cluster", "calls"),
    [
        (48 * 1024, 8, []),
        (48 * 1024 + 1, 8, [("allow_dynamic_smem", "function", 48 * 1024 + 1)]),
        (0, 16, [("allow_large_cluster", "function")]),
    ],
)
def test_what_needs_an_opt_in_gets_it_once(
    smem: int, cluster: int, calls: list[tuple[Any, ...]]
) -> None:
    driver = FakeDriver()
    kernel = made(grid=(32, 1, 1), cluster=(cluster, 1, 1), dynamic_smem=smem)
    launch = Launcher(kernel, driver, stream=lambda: 0)
    launch(1, 2, 3)
    launch(1, 2, 3)
    assert [c for c in driver.calls if c[0].startswith("allow")] == calls


def test_a_device_of_another_architecture_is_refused_before_loading() -> None:
    driver = FakeDriver("sm_100")
    with pytest.raises(LaunchError) as caught:
        Launcher(made(), driver)
    assert "was built for sm_103a, this device is sm_100; build it with --arch sm_100a" in str(
        caught.value
    )
    assert driver.calls == []
    for arch, device in (("sm_90a", "sm_90"), ("sm_100a", "sm_100")):
        Launcher(made(gemv(arch)), FakeDriver(device))


def test_a_cubin_of_another_arch_than_it_says_is_refused_before_loading() -> None:
    right = packed.select(packed.load(STORED), "sm_103a", "workbench_gemv")
    other = packed.select(packed.load(STORED), "sm_90a", "workbench_gemv")
    driver = FakeDriver()
    with pytest.raises(LaunchError, match="holds a cubin for sm_90a; build it again with --arch"):
        Launcher(replace(right, cubin=other.cubin), driver)
    assert driver.calls == []
    Launcher(right, driver)
    assert len(driver.named("load")) == 1


def test_the_stream_is_torchs_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=4711))
    driver = FakeDriver()
    launch = Launcher(made(), driver)
    launch(1, 2, 3)
    assert driver.named("launch")[0][3] == current_stream() == 4711


# --- cuda-python ------------------------------------------------------------------------------


class FakeApi:
    """cuda.bindings.driver with its real structures and fake functions, which are recorded."""

    def __init__(self, real: Any, context: int = 9, fail: str = "") -> None:
        self.real, self.context, self.fail = real, context, fail
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        if not (name.startswith("cu") and name[2].isupper()):
            return getattr(self.real, name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name == self.fail:
                return (self.real.CUresult.CUDA_ERROR_INVALID_VALUE,)
            results = {
                "cuDeviceGet": [3],
                "cuDeviceGetAttribute": [10 if "MAJOR" in str(arguments) else 3],
                "cuCtxGetCurrent": [self.context],
                "cuDevicePrimaryCtxRetain": [55],
                "cuLibraryLoadData": ["library"],
                "cuLibraryGetKernel": ["kernel"],
                "cuKernelGetFunction": ["function"],
            }
            return (self.real.CUresult.CUDA_SUCCESS, *results.get(name, []))

        return call


@pytest.fixture
def real() -> Iterator[Any]:
    return pytest.importorskip("cuda.bindings.driver")  # type: ignore[no-any-return]


def driver_of(api: FakeApi) -> Any:
    from k3fuse.kernels.build.cuda_driver import CudaPythonDriver

    return CudaPythonDriver(api)


def test_the_attributes_of_a_launch(real: Any) -> None:
    api = FakeApi(real)
    kernel = made(
        gemv(pdl=1), grid=(8, 2, 2), block=(32, 2, 1), cluster=(4, 2, 1), dynamic_smem=64 * 1024
    )
    launch = Launcher(kernel, driver_of(api), priority=-2, carveout=75, stream=lambda: 0xABC0)
    del api.calls[:]
    launch(1, 2, 3)
    ((name, config, function, parameters, extra),) = api.calls
    assert (name, function, extra) == ("cuLaunchKernelEx", "function", 0)
    assert parameters > 0
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (8, 2, 2)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (32, 2, 1)
    assert config.sharedMemBytes == 64 * 1024
    assert int(config.hStream) == 0xABC0
    assert config.numAttrs == len(config.attrs) == 4
    found = {a.id.name.removeprefix("CU_LAUNCH_ATTRIBUTE_"): a.value for a in config.attrs}
    dims = found.pop("CLUSTER_DIMENSION").clusterDim
    assert (dims.x, dims.y, dims.z) == (4, 2, 1)
    pdl = found.pop("PROGRAMMATIC_STREAM_SERIALIZATION")
    assert pdl.programmaticStreamSerializationAllowed == 1
    assert found.pop("PRIORITY").priority == -2
    assert found.pop("PREFERRED_SHARED_MEMORY_CARVEOUT").sharedMemCarveout == 75
    assert found == {}


def test_a_plain_launch_has_no_attributes(real: Any) -> None:
    api = FakeApi(real)
    Launcher(made(), driver_of(api), stream=lambda: 0)(1, 2, 3)
    assert api.calls[-1][1].numAttrs == 0


def test_what_is_done_once(real: Any) -> None:
    api = FakeApi(real)
    kernel = made(grid=(32, 1, 1), cluster=(16, 1, 1), dynamic_smem=50_000)
    Launcher(kernel, driver_of(api))
    attribute = real.CUfunction_attribute
    queries = ("cuInit", "cuDeviceGet", "cuDeviceGetAttribute")
    assert [c for c in api.calls if c[0] not in queries] == [
        ("cuCtxGetCurrent",),
        ("cuLibraryLoadData", b"cubin", None, None, 0, None, None, 0),
        ("cuLibraryGetKernel", "library", b"k"),
        ("cuKernelGetFunction", "kernel"),
        ("cuFuncSetAttribute", "function",
         attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 50_000),
        ("cuFuncSetAttribute", "function",
         attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
    ]  # fmt: skip


def test_a_thread_without_a_context_gets_the_primary_one(real: Any) -> None:
    api = FakeApi(real, context=0)
    assert driver_of(api).arch() == "sm_103"
    assert ("cuCtxSetCurrent", 55) in api.calls
    assert ("cuDevicePrimaryCtxRetain", 3) in api.calls


@pytest.mark.parametrize("function", ["cuLibraryLoadData", "cuLaunchKernelEx", "cuDeviceGet"])
def test_driver_errors_have_their_name(real: Any, function: str) -> None:
    with pytest.raises(LaunchError, match=f"{function} failed: CUDA_ERROR_INVALID_VALUE"):
        Launcher(made(), driver_of(FakeApi(real, fail=function)), stream=lambda: 0)(1, 2, 3)


def test_no_driver_is_one_line(real: Any) -> None:
    with pytest.raises(LaunchError, match="no CUDA driver or device on this machine") as caught:
        driver_of(FakeApi(real, fail="cuInit"))
    assert "\n" not in str(caught.value)
    if not torch.cuda.is_available():
        with pytest.raises(LaunchError, match="no CUDA driver or device on this machine"):
            Launcher(made())


def test_missing_cuda_python_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(LaunchError, match=r"pip install 'k3fuse\[kernels\]'"):
        Launcher(made())
