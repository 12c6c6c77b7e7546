"""Compile decoder layers one by one, whatever vLLM's own compilation mode is.

vLLM compiles no Kimi K3 class and turns its own compilation off for it. So each decoder layer gets
a compiled twin for decode-sized steps; a larger step runs the layer as vLLM wrote it. Layers of one
form (kind of attention, kind of MLP, AttnRes blocks) share one graph with a symbolic token count.

The region "model" compiles the whole text model instead, as one graph: there one layer's experts,
the AttnRes behind them and the next layer's projections stand side by side.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from k3fuse.rewriter import backend
from k3fuse.rewriter.options import Options
from k3fuse.rewriter.reasons import Reason, Refusal
from k3fuse_vllm.facts import Facts
from k3fuse_vllm.routes import MAX_TOKENS
from k3fuse_vllm.settings import Settings

log = logging.getLogger("k3fuse")

K3_LAYER = "KimiDecoderLayer"
K3_MODEL = "KimiLinearModel"
# Graphs of one layer class: Kimi K3's 93 layers have 24 forms. Dynamo's own limit is 8.
GRAPHS = 128
# Tokens of the first step: no size of the model, so that no dimension is taken for the count.
FIRST_TOKENS = 5


class Regions:
    """The compiled layers of one worker."""

    def __init__(self, facts: Facts, settings: Settings) -> None:
        self.facts, self.settings = facts, settings
        self.classes = classes_of(settings.region)
        self.refused: list[Reason] = []
        # Report number -> modules that run its graph.
        self.users: Counter[int] = Counter()
        self.modules = 0
        self.layers = 0
        # Number of the layer that runs; a graph that it traces is named after it.
        self.first_layer = 0
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._last: int | None = None
        self._backend = _Backend(self)

    def prepare(self) -> None:
        """Pass the blockers of Kimi K3's code, before the model is built. A refusal is kept."""
        if not self.facts.is_k3:
            return
        from k3fuse_vllm import blockers

        try:
            blockers.prepare()
        except Refusal as refusal:
            self.refused.append(refusal.reason)

    def compile(self, model: nn.Module) -> int:
        """Put a compiled twin beside every module of the region; return how many there are."""
        if self.refused:
            return 0
        found = {n: m for n, m in model.named_modules() if type(m).__name__ in self.classes}
        layers = [m for m in model.modules() if type(m).__name__ == K3_LAYER]
        self.layers = len(layers)
        try:
            for layer in layers:
                self._prepare_layer(layer)
        except Refusal as refusal:
            self.refused.append(refusal.reason)
            return 0
        dynamo: Any = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, GRAPHS)
        limit = max(dynamo.accumulated_recompile_limit, 8 * GRAPHS)
        dynamo.accumulated_recompile_limit = limit
        only = self.settings.options.only_layers
        for name, module in found.items():
            number = layer_number(name)
            # A layer that the user left out keeps its own forward: no graph of its form reaches it.
            if only is None or number is None or number in only:
                module.forward = _Twin(self, module, number or 0)
                self.modules += 1
        if self.facts.is_k3 and K3_MODEL not in self.classes:
            self._compile_final_mix()
        return self.modules

    def reach(self, runner: Any) -> None:
        """Run small steps, so that every layer compiles before CUDA graphs are captured."""
        if self.modules and not self.refused:
            small_steps(runner)

    def totals(self) -> dict[str, int]:
        """Return accepted sites by pattern over all modules, each graph counted for its users."""
        total: Counter[str] = Counter()
        for number, report in enumerate(backend.reports()):
            for site in report.found:
                total[site.pattern] += self.users[number]
        return dict(total)

    def for_report(self) -> dict[str, Any]:
        """Return modules, accepted and expected sites, and refusals as plain values."""
        return {
            "modules": self.modules,
            "sites": self.totals(),
            "expected": self._expected(),
            "reasons": [reason.to_json() for reason in self.refused],
        }

    def _expected(self) -> dict[str, int]:
        """Return the sites that Kimi K3 has by its published config; other models promise none."""
        k3 = self.facts.architecture == "KimiK3ForConditionalGeneration"
        if not k3 or self.settings.options.only_layers is not None:
            return {}
        from k3fuse.patterns.models.config import KimiK3Config

        return dict(KimiK3Config().expected_sites(self.layers))

    # --- calls --------------------------------------------------------------------------------

    def call(
        self, key: Any, function: Callable[..., Any], cold: bool, args: Any, kwargs: Any
    ) -> Any:
        """Call the compiled form of `function`; a cold call may trace it, with dim 0 symbolic."""
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = torch.compile(
                function, backend=self._backend, fullgraph=True
            )
        if not cold:
            return compiled(*args, **kwargs)
        rows = token_count(args, kwargs)
        for tensor in _tensors(args, kwargs):
            if tensor.dim() and tensor.shape[0] == rows:
                torch._dynamo.mark_dynamic(tensor, 0)
        shapes: Any = torch.fx.experimental._config
        # Without it a count of 1 would be a graph of its own.
        with shapes.patch(backed_size_oblivious=True):
            result = compiled(*args, **kwargs)
        if self._last is not None:
            self.users[self._last] += 1
        return result

    def ran(self, number: int) -> None:
        """Remember which graph ran last."""
        self._last = number

    def _prepare_layer(self, layer: nn.Module) -> None:
        if self.facts.is_k3:
            from k3fuse_vllm import blockers

            blockers.prepare_layer(layer)

    def _compile_final_mix(self) -> None:
        """The AttnRes behind the last layer stands in no layer: a region of its own."""
        import importlib

        owner: Any = importlib.import_module("vllm.models.kimi_k3.nvidia.model")
        stock = owner.attn_res
        cold = [True]

        def attn_res(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not 0 < args[0].shape[0] <= MAX_TOKENS:
                return stock(*args, **kwargs)
            result = self.call("attn_res", stock, cold[0], args, kwargs)
            cold[0] = False
            return result

        owner.attn_res = attn_res


def classes_of(region: tuple[str, ...]) -> tuple[str, ...]:
    """Return the class names of a region: Kimi K3's layers for (), its text model for "model"."""
    return (K3_MODEL,) if region == ("model",) else region or (K3_LAYER,)


def layer_number(name: str) -> int | None:
    """Return the number of a decoder layer in its module's name ("model.layers.5"), or None."""
    last = name.rpartition(".")[2]
    return int(last) if last.isdigit() else None


def small_steps(runner: Any) -> None:
    """Run two decode-sized steps through one of vLLM's model runners.

    A model whose code asks whether there is one token (copying into a slice does) gets graphs of
    its own for one; Kimi K3's layers run the graphs of the first step.
    """
    runner._dummy_run(FIRST_TOKENS)
    runner._dummy_run(1)


class _Twin:
    """The `forward` of one module: compiled for decode-sized steps, its own for the others."""

    def __init__(self, regions: Regions, module: nn.Module, number: int) -> None:
        self.regions, self.module, self.number = regions, module, number
        self.stock = module.forward
        self.cold = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not 0 < token_count(args, kwargs) <= MAX_TOKENS:
            return self.stock(*args, **kwargs)
        kind = type(self.module)
        self.regions.first_layer = self.number
        result = self.regions.call(kind, kind.forward, self.cold, (self.module, *args), kwargs)
        self.cold = False
        return result


class _Backend:
    """One object for all layers: Dynamo shares graphs between calls with the same backend."""

    def __init__(self, regions: Regions) -> None:
        self.regions, self.ran = regions, regions.ran

    def __call__(self, gm: Any, example_inputs: Any) -> Callable[..., Any]:
        options = _as_dict(self.regions.settings.options)
        options["first_layer"] = self.regions.first_layer
        compiled = backend.k3fuse(gm, example_inputs, options=options)
        number = len(backend.reports()) - 1

        def run(*args: Any) -> Any:
            self.ran(number)
            return compiled(*args)

        return run


def _as_dict(options: Options) -> dict[str, Any]:
    import dataclasses

    return {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}


def _tensors(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value


def token_count(args: Any, kwargs: Any) -> int:
    """Tokens of a step: the leading size of the first tensor argument, 0 without one."""
    first = next(_tensors(args, kwargs), None)
    return int(first.shape[0]) if first is not None and first.dim() else 0
