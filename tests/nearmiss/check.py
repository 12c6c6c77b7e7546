"""The property: a rewritten graph computes the same values, one that is left has a reason."""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, fx

from build import run
from edits import EDITS
from families import PROJECTIONS
from families_layer import LAYER
from families_moe import MOE
from families_router import ROUTER
from graphs import LEVELS, Unbuildable, build, copied, symbols
from k3fuse.kernels.common.policy import Table
from k3fuse.kernels.experts import reference as experts_reference
from k3fuse.kernels.output_projection import reference as projection_reference
from k3fuse.kernels.tail import reference as tail_reference
from k3fuse.rewriter.canonical import bound_args, op_of, target_name
from k3fuse.rewriter.pattern import Pattern, load_patterns
from parts import FP32, Family, Inputs, Knobs
from tolerances import tolerance

# Reference forms that do not trace at a site's shapes are one of several; torch logs each.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)

FAMILIES: dict[str, Family] = {f.name: f for f in (*PROJECTIONS, ROUTER, *MOE, *LAYER)}
# A site passes at most this many roundings to its dtype on the way to one output.
ROUNDINGS = 4
# Stands for the sum over the ranks: a factor that depends on the group and the kind of reduction.
_KINDS = {"sum": 1.75, "avg": 0.875, "max": 1.25, "min": 0.75, "product": 1.125}


def reduced(value: Tensor, how: str, group: str) -> Tensor:
    """What the simulated ranks of a group make of a value: contiguous, as collectives do."""
    return (value * (_KINDS[how] + (0.5 if group.endswith("1") else 0.0))).contiguous()


def _run(
    graph: fx.Graph, given: Sequence[Tensor], rounded: Collection[str] = ()
) -> Sequence[Tensor]:
    """Run a graph of inputs and calls with collectives simulated; fx.Interpreter takes double.

    rounded: names of nodes whose values get another rounding.
    """
    values: dict[fx.Node, Any] = {}
    inputs = iter(given)
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(inputs)
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return args[0]  # type: ignore[no-any-return]
        if node.op != "call_function":
            raise Unbuildable(f"{node.format_node()} is no call")
        name = target_name(node.target)
        if name == "_c10d_functional.all_reduce":
            values[node] = reduced(*args)
        elif name == "_c10d_functional.wait_tensor":
            values[node] = args[0]
        else:
            values[node] = node.target(*args, **kwargs)
        if node.name in rounded:
            values[node] = _rounded(values[node])
    raise Unbuildable("the graph has no output")


def _rounded(value: Any) -> Any:
    """A value as rounding may leave it: every element up or down by one unit of BF16 or so."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    ways = torch.rand(value.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    return (value.float() * torch.where(ways, 1 - 2.0**-8, 1 + 2.0**-8)).to(value.dtype)


@contextmanager
def _simulated() -> Iterator[None]:
    def all_reduce(partial: Tensor, group: str) -> Tensor:
        return reduced(partial, "sum", group) if group else partial

    with (
        mock.patch.object(projection_reference, "all_reduce", all_reduce),
        mock.patch.object(experts_reference, "all_reduce", all_reduce),
        mock.patch.object(tail_reference, "all_reduce", all_reduce),
    ):
        yield


@contextmanager
def _composed(on: bool) -> Iterator[None]:
    """Fused ops run what they replaced, as outside their policy."""
    if on:
        with mock.patch.object(Table, "lookup", return_value=None):
            yield
    else:
        yield


def outputs(
    module: fx.GraphModule,
    inputs: Sequence[Tensor],
    composed: bool = False,
    rounded: Collection[str] = (),
) -> list[Tensor]:
    """Results and the inputs afterwards (written or not)."""
    given = [t.clone() for t in inputs]
    with torch.no_grad(), _simulated(), _composed(composed):
        results = _run(module.graph, given, rounded)
    return [*results, *given]


def differs(got: Sequence[Tensor], wanted: Sequence[Tensor], dtype: torch.dtype) -> str:
    """Text of the first difference; "" where all agree within the table."""
    band = tolerance(dtype, 64, ROUNDINGS)
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {i} is {a.dtype}{list(a.shape)}, was {b.dtype}{list(b.shape)}"
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return f"result {i}: {int((a != b).sum())} of {a.numel()} integers differ"
            continue
        x, y = a.double(), b.double()
        if not torch.equal(x.isnan(), y.isnan()) or not torch.equal(x.isinf(), y.isinf()):
            return f"result {i}: NaN or infinity in other places"
        x, y = (torch.nan_to_num(t, 0.0, 0.0, 0.0) for t in (x, y))
        scale = float(y.abs().max()) if y.numel() else 0.0
        over = (x - y).abs() - band.atol * scale - band.rtol * y.abs()
        if over.numel() and float(over.max()) > 0:
            worst = float((x - y).abs().max())
            return f"result {i}: off by {worst:.3g} at a scale of {scale:.3g}"
    return ""


@dataclass
class Graph:
    """One generated graph with its declared defects."""

    family: str
    knobs: Knobs
    seed: int
    level: str
    defects: tuple[str, ...] = ()
    edits: tuple[str, ...] = ()
    edit_seed: int = 0

    def text(self) -> str:
        """Enough to build it again."""
        head = f"{self.family} seed {self.seed}.{self.edit_seed} {self.level}"
        return f"{head} {self.defects + self.edits} {self.knobs}"


@dataclass
class Verdict:
    """What happened. fault: "" or what is wrong; codes: reasons of the family's pattern.

    absorbed: sites whose work another one's op does.
    """

    outcome: str
    codes: set[str] = field(default_factory=set)
    fault: str = ""
    found: dict[str, int] = field(default_factory=dict)
    absorbed: int = 0


class Base:
    """The module traced last: tracing costs most, so further edits take copies of it."""

    key = ""
    module: fx.GraphModule
    inputs: Inputs
    symbols: tuple[int, ...] = ()

    @classmethod
    def of(cls, graph: Graph) -> tuple[fx.GraphModule, Inputs]:
        """A copy of this graph's module before its edits. Raises Unbuildable."""
        key = f"{graph.family} {graph.seed} {graph.level} {graph.knobs}"
        # An edit that fixed a symbolic size would show in the next copy.
        if key != cls.key or symbols(cls.module) != cls.symbols:
            cls.key = ""
            cls.module, cls.inputs = build(
                FAMILIES[graph.family], graph.knobs, graph.seed, graph.level
            )
            cls.key, cls.symbols = key, symbols(cls.module)
        return copied(cls.module), cls.inputs


def made(graph: Graph) -> tuple[fx.GraphModule, Inputs]:
    """Build the graph and put its edits in. Raises Unbuildable."""
    module, inputs = Base.of(graph)
    rng = random.Random(f"{graph.seed} {graph.edit_seed}")
    for name in graph.edits:
        try:
            fits = EDITS[name](module, rng)
        except Exception as error:
            raise Unbuildable(f"{name}: {error}") from error
        if not fits:
            raise Unbuildable(f"{name} does not fit")
    try:
        module.graph.lint()
    except RuntimeError as error:
        raise Unbuildable(f"{graph.edits}: {error}") from error
    return module, inputs


@cache
def _patterns() -> tuple[Pattern, ...]:
    return load_patterns()


def examine(graph: Graph, *, composed: bool = False) -> Verdict:
    """Rewrite for the reference target and compare. Raises Unbuildable where there is no graph."""
    module, inputs = made(graph)
    tensors = list(inputs.made.values())
    before = [op_of(n) for n in module.graph.nodes]
    try:
        wanted = outputs(module, tensors)
    except Exception as error:
        raise Unbuildable(f"does not run: {error}") from error
    try:
        report = run(module, patterns=_patterns())
    except Exception as error:
        return Verdict("crashed", fault=f"the rewrite raised {type(error).__name__}: {error}")
    pattern = FAMILIES[graph.family].pattern
    mine = [s for s in report.sites if s.pattern == pattern]
    codes = {r.code.value for s in mine for r in s.reasons}
    codes |= {n.reason.code.value for n in report.near if n.pattern == pattern}
    found = {name: count.found for name, count in report.counts().items() if count.found}
    taken = found.get(pattern, 0)
    outcome = "rewritten" if taken else ("refused" if codes else "absent")
    absorbed = sum(s.within is not None for s in report.found)
    verdict = Verdict(outcome, codes, found=found, absorbed=absorbed)
    if not found:
        if [op_of(n) for n in module.graph.nodes] != before:
            verdict.fault = "no site was taken and the graph changed"
        return verdict
    group = graph.knobs.get("group")
    made_by_sites = {node.name for site in report.found for node in site.outputs}
    verdict.fault = _compare(module, tensors, wanted, graph, composed and not group, made_by_sites)
    return verdict


def in_order(module: fx.GraphModule) -> fx.GraphModule | None:
    """The graph with every top-k sorted; None where they are all sorted already.

    torch leaves the order of `topk(sorted=False)` open, and ours is the sorted one: where a result
    depends on it, either is right.
    """
    changed = False
    for node in module.graph.nodes:
        args = bound_args(node) if op_of(node) == "aten.topk" else {}
        if args.get("sorted") is False:
            node.args = (args["self"], args["k"], args["dim"], args["largest"], True)
            node.kwargs = {}
            changed = True
    return module if changed else None


def _compare(
    module: fx.GraphModule,
    tensors: Sequence[Tensor],
    wanted: Sequence[Tensor],
    graph: Graph,
    composed: bool,
    sites: Collection[str],
) -> str:
    """A difference counts where three draws of the inputs show it: near ties of a top-k do not.

    Nor where the graph itself makes as much of another rounding of what its sites make: one over
    a sum behind them, where that is near 0. sites: names of those nodes.
    """
    fault = ""
    for draw in range(3):
        if draw:
            again = Inputs(graph.seed + 7919 * draw, graph.knobs["dtype"])
            with torch.no_grad():
                FAMILIES[graph.family].build(graph.knobs, again)
            tensors = list(again.made.values())
            wanted = outputs(made(graph)[0], tensors)
        try:
            got = outputs(module, tensors, composed)
            fault = differs(got, wanted, graph.knobs["dtype"])
            if fault and (other := in_order(made(graph)[0])) is not None:
                fault = differs(got, outputs(other, tensors), graph.knobs["dtype"])
            if fault and differs(
                outputs(made(graph)[0], tensors, rounded=sites), wanted, graph.knobs["dtype"]
            ):
                fault = ""
        except Exception as error:
            return f"the rewritten graph raised {type(error).__name__}: {error}"
        if not fault:
            return ""
    return fault


# --- process set-up -----------------------------------------------------------------------------


@cache
def groups() -> tuple[str, str]:
    """Two fake process groups of eight ranks, and vLLM's experts op with an implementation."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group(backend="fake", world_size=8, rank=0, store=FakeStore())
    _stock_experts()
    world: Any = dist.group.WORLD
    other: Any = dist.new_group(list(range(8)))
    return world.group_name, other.group_name


_LIBRARIES: list[Any] = []


@cache
def _stock_experts() -> None:
    """moe_forward_shared: deterministic functions of its inputs, rank partials as vLLM's."""
    library: Any = torch.library.Library("vllm", "FRAGMENT")  # type: ignore[no-untyped-call]
    _LIBRARIES.append(library)
    if not hasattr(torch.ops.vllm, "moe_forward_shared"):
        library.define(
            "moe_forward_shared(Tensor hidden_states, Tensor router_logits, Tensor? "
            "shared_experts_input, Tensor? input_ids, str layer_name, SymInt hidden_dim_unpadded)"
            " -> (Tensor, Tensor)"
        )

    def experts(hidden: Tensor, logits: Tensor, shared: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        gain = torch.softmax(logits.to(FP32), -1).amax(-1, keepdim=True)
        return torch.tanh(shared * 2), (torch.sin(hidden.float()) * gain).to(hidden.dtype)

    library.impl("moe_forward_shared", experts, "CompositeExplicitAutograd")


def healthy(family: str, rng: random.Random) -> tuple[Knobs, str]:
    """Healthy knobs and a level."""
    chosen = FAMILIES[family]
    knobs = chosen.draw(rng)
    knobs["dtype"] = torch.bfloat16
    knobs["group"] = rng.choice(["", groups()[0]]) if chosen.ranks else ""
    # make_fx reads a symbolic size off inner slices, which AOTAutograd's graphs do not.
    level = rng.choice([n for n in LEVELS if n != "dynamic" or not family.startswith("experts")])
    if level == "dynamic" and knobs.get("between") == "slice":
        knobs["between"] = "nothing"
    return knobs, level
