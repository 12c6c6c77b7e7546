"""Test-only vLLM plugin: makes the CPU engine compile what a CUDA engine compiles.

vLLM's CPU platform turns mode 3 into mode 2, hides linears in oneDNN handles, reduces in place and
inlines the experts. Each adaptation is chosen by name in K3FUSE_TEST_VLLM, comma-separated:

mode3      keep compilation mode 3
cuda_ops   F.linear, the functional vllm.all_reduce op and the opaque experts op, as on CUDA
fallback   Inductor calls ATen instead of generating C++ (seconds instead of minutes of compiling)
           and keeps every rounding of the graph
mode1      let the CPU runner compile the model in mode 1, as the GPU runner does
fork       workers are forks of the engine's process, which has imported everything
disagree   rank 1 leaves out one pattern
stale      graphs get the operator for the experts, made for layers that no engine has
unknown    a version of vLLM that nobody knows
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

_DONE: set[str] = set()


def register() -> None:
    """Apply what K3FUSE_TEST_VLLM names, once a process."""
    for name in filter(None, os.environ.get("K3FUSE_TEST_VLLM", "").split(",")):
        if name not in _DONE:
            _DONE.add(name)
            STEPS[name]()


def _mode3() -> None:
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    platform = type(current_platform)
    stock = platform.check_and_update_config.__func__

    def check(cls: Any, config: Any) -> None:
        compilation = config.compilation_config
        wanted, wrap = compilation.mode, compilation.ir_enable_torch_wrap
        stock(cls, config)
        if wanted == CompilationMode.VLLM_COMPILE:
            compilation.mode, compilation.ir_enable_torch_wrap = wanted, wrap

    platform.check_and_update_config = classmethod(check)
    # It names operators that only a CUDA build has.
    FixFunctionalizationPass.__call__ = lambda self, graph: None


def _cuda_ops() -> None:
    import torch
    import vllm.model_executor.layers.linear as linear
    import vllm.model_executor.layers.utils as utils
    import vllm.model_executor.layers.vocab_parallel_embedding as embedding
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.platforms import current_platform

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    for module in (utils, linear, embedding):
        if hasattr(module, "dispatch_cpu_unquantized_gemm"):
            module.dispatch_cpu_unquantized_gemm = plain

    def select(self: Any) -> Any:
        shared = self._shared_experts is not None
        return torch.ops.vllm.moe_forward_shared if shared else torch.ops.vllm.moe_forward

    MoERunner._select_forward = select
    type(current_platform).use_custom_op_collectives = classmethod(lambda cls: True)
    in_place = CpuCommunicator.all_reduce
    # The CPU's reduction works in place; behind a functional op it has to copy first.
    CpuCommunicator.all_reduce = lambda self, rows: in_place(self, rows.clone())


def _fallback() -> None:
    from torch._inductor import config

    config.fallback_by_default = True
    # Inductor else drops the roundings between steps that it fuses, and tokens differ from eager's.
    config.emulate_precision_casts = True


def _mode1() -> None:
    from vllm.config import CompilationMode
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    stock = CPUModelRunner.load_model

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        compilation = self.vllm_config.compilation_config
        if compilation.mode == CompilationMode.STOCK_TORCH_COMPILE:
            self.model.compile(fullgraph=True, backend=compilation.init_backend(self.vllm_config))

    CPUModelRunner.load_model = load_model


def _fork() -> None:
    from vllm.platforms import current_platform

    platform = type(current_platform)
    stock = platform.check_and_update_config.__func__

    def check(cls: Any, config: Any) -> None:
        stock(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = classmethod(check)


def _disagree() -> None:
    import torch

    from k3fuse.rewriter import backend

    stock = backend._ask_ranks

    def ask(report: Any) -> Any:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            report.sites = report.sites[1:]
        return stock(report)

    backend._ask_ranks = ask


def _stale() -> None:
    from itertools import count

    from k3fuse.patterns.experts_partials import ExpertsPartials
    from k3fuse_vllm.experts import ExpertLayer

    numbers = count()
    ExpertsPartials.guards = ()
    ExpertLayer.facts = lambda self: str(next(numbers))


def _unknown() -> None:
    import vllm

    vllm.__version__ = "0.99.0"


STEPS: dict[str, Callable[[], None]] = {
    "mode3": _mode3,
    "cuda_ops": _cuda_ops,
    "fallback": _fallback,
    "mode1": _mode1,
    "fork": _fork,
    "disagree": _disagree,
    "stale": _stale,
    "unknown": _unknown,
}
