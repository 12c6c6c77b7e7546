"""One decode step of vLLM's Kimi K3 modules through Dynamo and AOTAutograd into graph files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx

from k3fuse.kernels.common.encoding import Json
from k3fuse.patterns.sources.vllm_k3 import layers as vllm_layers
from k3fuse.patterns.sources.vllm_k3.environment import CaptureError
from k3fuse.rewriter.graph_file import module_path, save_graph

# Traced size of a symbolic M: no other size of the graph, since equal sizes become one symbol.
_SYMBOLIC_SIZE = 5


@dataclass(frozen=True)
class Job:
    """One graph: `layers` of the model at `m` tokens (None = symbolic), with one kind of core."""

    name: str
    layers: tuple[int, ...]
    m: int | None
    core: str
    tp: int

    @property
    def size(self) -> int:
        """The number of tokens traced with."""
        return _SYMBOLIC_SIZE if self.m is None else self.m

    @property
    def file(self) -> str:
        """File name, such as layer1_tp8_mdyn_opaque.json."""
        m = "dyn" if self.m is None else str(self.m)
        return f"{self.name}_tp{self.tp}_m{m}_{self.core}.json"


@dataclass
class Captured:
    """The one graph of a step, and the names of its inputs in order."""

    graph: fx.GraphModule
    origins: list[str]


Step = Callable[[Job], Captured]


def capture_layer(modules: vllm_layers.Modules, job: Job) -> Captured:
    """One KimiDecoderLayer.forward: positions [M], delta and prefix [M, 7168], bank [M, 8, .]."""
    (index,) = job.layers
    layer = modules.layers[index]
    inputs = {
        "positions": _empty(job, dtype=torch.int64),
        "hidden_states": _empty(job, vllm_layers.HIDDEN),
        "residual": _empty(job, vllm_layers.BLOCK_SLOTS, vllm_layers.HIDDEN),
        "prefix_sum": _empty(job, vllm_layers.HIDDEN),
    }
    if index == 0:
        inputs["hidden_states"] = None  # the first layer has no delta before it
    with modules.decode_context([index], job.size):
        captured = _trace(layer.forward, job, **inputs)
    _place(captured, f"model.layers.{index}")
    return captured


def capture_stack(modules: vllm_layers.Modules, job: Job) -> Captured:
    """KimiLinearForCausalLM.forward from token ids [M] to the row before the final norm."""
    inputs = (_empty(job, dtype=torch.int32), _empty(job, dtype=torch.int64))
    with modules.decode_context(list(modules.layers), job.size):
        captured = _trace(modules.model.forward, job, *inputs, None, None)
    _place(captured, "")
    return captured


def capture_tail(tail: Any, job: Job) -> Captured:
    """KimiLinearModel.forward after the last layer: the AttnRes over all eight blocks."""

    def step(delta: Any, prefix: Any, blocks: Any, positions: Any) -> Any:
        tail.state = (delta, prefix, blocks)
        return type(tail).forward(tail, None, positions, None, inputs_embeds=prefix)

    row = vllm_layers.HIDDEN
    blocks = _empty(job, vllm_layers.BLOCK_SLOTS, row)
    captured = _trace(
        step, job, _empty(job, row), _empty(job, row), blocks, _empty(job, dtype=torch.int64)
    )
    _place(captured, "model")
    return captured


def _empty(job: Job, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    tensor = torch.empty(job.size, *shape, dtype=dtype, device="meta")
    if job.m is None:
        torch._dynamo.mark_static(tensor, list(range(1, tensor.dim())))
    return tensor


def _trace(step: Callable[..., Any], job: Job, *args: Any, **kwargs: Any) -> Captured:
    from torch._dynamo.backends.common import aot_autograd
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    found: list[Captured] = []

    def backend(gm: fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        def compiler(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            found.append(Captured(graph, _origins(gm)))
            _name_kernels(graph)
            _drop_own_frames(graph)
            return _boxed(graph)

        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=compiler, inference_compiler=compiler
        )(gm, example)
        return compiled

    torch._dynamo.reset()
    kernel_side_table.reset_table()
    # dynamic=True gives equal sizes one symbol ("duck shaping"): the M of all inputs is one M.
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=job.m is None)
    with torch.no_grad(), _one_line_errors(job):
        compiled(*args, **kwargs)
    if len(found) != 1:
        raise CaptureError(f"{job.file}: {len(found)} graphs instead of one")
    if job.m is None:
        _check_symbolic(found[0].graph, job)
    return found[0]


def _check_symbolic(graph: fx.GraphModule, job: Job) -> None:
    """The token count must have stayed one symbol, not been fixed to the traced size."""
    inputs = [n.meta.get("val") for n in graph.graph.find_nodes(op="placeholder")]
    sizes = [s for t in inputs if isinstance(t, torch.Tensor) for s in t.shape]
    symbols = {str(s) for s in sizes if isinstance(s, torch.SymInt)}
    fixed = sum(s == job.size for s in sizes if isinstance(s, int))
    if len(symbols) != 1 or fixed:
        raise CaptureError(
            f"{job.file}: M does not stay symbolic ({len(symbols)} symbols, {fixed} input sizes "
            "fixed to the traced one); use --core opaque"
        )


def _boxed(graph: fx.GraphModule) -> Callable[..., Any]:
    def call(args: list[Any]) -> Any:
        return graph(*args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


@contextlib.contextmanager
def _one_line_errors(job: Job) -> Iterator[None]:
    try:
        yield
    except (torch._dynamo.exc.TorchDynamoException, RuntimeError, TypeError) as err:
        if isinstance(err, CaptureError):
            raise
        reason = " ".join(str(err).split())[:400]
        raise CaptureError(f"{job.file}: does not trace: {type(err).__name__}: {reason}") from err


def _origins(gm: fx.GraphModule) -> list[str]:
    origins = []
    for node in gm.graph.find_nodes(op="placeholder"):
        source = getattr(node.meta.get("grapharg"), "source", None)
        name = getattr(source, "name", "") or node.name
        origins.append(_readable(str(name() if callable(name) else name)))
    return origins


def _name_kernels(graph: fx.GraphModule) -> None:
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    for node in graph.graph.nodes:
        if "triton_kernel_wrapper" in str(node.target):
            kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
            while hasattr(kernel, "fn"):  # JIT function, and an autotuner around it
                kernel = kernel.fn
            node.meta["triton_kernel"] = f"{kernel.__module__}.{kernel.__qualname__}"


def _drop_own_frames(graph: fx.GraphModule) -> None:
    """Let an attention core's source be vLLM's call, not a line of this package."""
    own = re.compile(rf'  File "{re.escape(str(Path(__file__).parent))}[^\n]*\n(    [^\n]*\n?)?')
    for node in graph.graph.nodes:
        if node.meta.get("stack_trace"):
            node.meta["stack_trace"] = own.sub("", node.meta["stack_trace"])


def _place(captured: Captured, prefix: str) -> None:
    """Put the traced module's place in the model before module paths and parameter names."""
    for node in captured.graph.graph.nodes:
        path = ".".join(p for p in (prefix, module_path(node)) if p)
        if node.op == "call_function":
            node.meta["nn_module_stack"] = {path: (path, "")}
    start = f"{prefix}." if prefix else ""
    captured.origins = [re.sub(r"^(self|tail)\.", start, o) for o in captured.origins]


def _readable(source: str) -> str:
    """ "L['self']._modules['mlp']._parameters['weight']" -> "self.mlp.weight"."""
    text = re.sub(r"(\.__dict__)?(\.|\[')_modules('\])?", "", source)
    text = re.sub(r"\._(parameters|buffers)\['(\w+)'\]", r".\2", text)
    text = re.sub(r"^[LG]\['(\w+)'\]", r"\1", text)
    text = re.sub(r"\['(\w+)'\]", r".\1", text)
    text = re.sub(r"\.size\(\)\[(\d+)\]", r".size(\1)", text)
    return text.split("._forward_context.")[-1]


def write(captured: Captured, job: Job, folder: Path, versions: dict[str, str]) -> Path:
    """Save the graph with devices as on the GPU, and return the file's path."""
    inputs = captured.graph.graph.find_nodes(op="placeholder")
    if len(inputs) == len(captured.origins):
        for node, origin in zip(inputs, captured.origins, strict=True):
            node.meta["origin"] = origin
    meta: dict[str, Json] = {
        "name": job.file.removesuffix(".json"),
        "source": "vllm_k3",
        "tp": job.tp,
        "m": job.m,
        "core": job.core,
        "layers": list(job.layers),
        "groups": {"tp:0": job.tp},
        **versions,
    }
    path = folder / job.file
    save_graph(captured.graph, path, meta, devices={"meta": "cuda"})
    return path
