"""Runs a site and the op that is to replace it on the same random inputs (validate="values").

Nothing of the plan is trusted: the original side runs the graph's own nodes, the other side the
op's reference. Collectives are left out on both sides (a sum over one rank), so that no rank waits
for another; which reduction a site holds is the recogniser's question.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from k3fuse.rewriter.reasons import Code, Reason
from k3fuse.rewriter.recognise.all_reduce import AllReduce
from k3fuse.rewriter.site import Made, Replacement, Reshaped, Site, flatten_nodes
from k3fuse.rewriter.view import GraphView, bound_args, op_of, shape_of

# A check allocates its operands for real; K3's experts of one layer alone would be 2 GB.
MAX_BYTES = 256 * 2**20
# Tokens that stand for a symbolic count.
TOKENS = 4
# A top-k on a near tie may go either way; a wrong replacement differs on every draw.
DRAWS = 3
# Roundings to the result's dtype that a site may do in another order.
ROUNDINGS = 4
_UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11}
_BF16 = 2.0**-8


# The replacements of other sites, by the sites' ids.
Givers = Mapping[int, Replacement]


class _UncheckedError(Exception):
    """The site cannot be run here; the text says why."""


class ValueCheck:
    """Compares sites; equal sites of one graph are run once. `runs` counts the distinct ones."""

    def __init__(self, view: GraphView) -> None:
        self.view = view
        self.runs = 0
        self._seen: dict[Any, Reason | None] = {}

    def reason(
        self, site: Site, planned: Replacement, unit: Sequence[tuple[Site, Replacement]] = ()
    ) -> Reason | None:
        """Why the site must stay: its values differ or cannot be compared; else None.

        unit: sites with their replacements, among which are those whose results the op takes; then
        what they make of random inputs is what the site reads.
        """
        givers = {id(s): r for s, r in unit}
        nodes = flatten_nodes(_plain(planned.args))
        key = (
            planned.op, str(sorted(planned.kwargs.items(), key=lambda i: i[0])),
            tuple(str(a) for a in planned.args if not isinstance(a, (fx.Node, Reshaped, list))),
            tuple(str(n.meta.get("val")) for n in nodes),
        )  # fmt: skip
        if key not in self._seen:
            self._seen[key] = self._check(site, planned, givers)
        found = self._seen[key]
        if found is None:
            return None
        return Reason(found.code, f"{site.anchor.name}: {found.sentence}", (site.anchor.name,))

    def _check(self, site: Site, planned: Replacement, givers: Givers) -> Reason | None:
        self.runs += 1
        text = ""
        try:
            for draw in range(DRAWS):
                text = self._difference(site, planned, draw, givers)
                if not text:
                    return None
        except _UncheckedError as error:
            return Reason(Code.VALUES_UNCHECKED, str(error))
        except Exception as error:
            line = " ".join(str(error).split())[:120]
            return Reason(Code.VALUES_UNCHECKED, f"cannot be run here: {line}")
        return Reason(Code.VALUES_DIFFER, text)

    def _difference(self, site: Site, planned: Replacement, draw: int, givers: Givers) -> str:
        """Text of the first difference between the site's nodes and the op; "" where none."""
        wanted = [o.node for o in planned.outputs if isinstance(o.source, int)]
        sources = [o.source for o in planned.outputs if isinstance(o.source, int)]
        operands = flatten_nodes(_plain(planned.args))
        known: dict[fx.Node, Tensor] = {}
        results: dict[int, list[Tensor]] = {}
        for giver in {id(a.site) for a in planned.args if isinstance(a, Made)}:
            before = givers[giver]
            inputs = self._inputs(flatten_nodes(_plain(before.args)), draw, {})
            results[giver] = _run(before, inputs, {})
            for output in before.outputs:
                if isinstance(output.source, int):
                    size = _sizes(output.node, shape_of(output.node))
                    known[output.node] = results[giver][output.source].reshape(size)
        values = self._inputs(operands, draw, known)
        runner = _Runner(self.view, site, values)
        with torch.no_grad():
            expected = [runner.value(node) for node in wanted]
        made = _run(planned, values, results)
        for node, source, want in zip(wanted, sources, expected, strict=True):
            have = made[source]
            if have.numel() != want.numel() or have.dtype != want.dtype:
                return f"the op gives {have.dtype}{list(have.shape)} for {node.name}"
            worst = _worst(have.reshape(want.shape), want)
            if worst > 1:
                return f"{node.name} of the op differs by {worst:.1f} times what rounding explains"
        return ""

    def _inputs(
        self, operands: Sequence[fx.Node], draw: int, known: dict[fx.Node, Tensor]
    ) -> dict[fx.Node, Tensor]:
        generator = torch.Generator().manual_seed(draw)
        sizes = {n: _sizes(n, shape_of(n)) for n in dict.fromkeys(operands)}
        total = sum(math.prod(s) * n.meta["val"].element_size() for n, s in sizes.items())
        if total > MAX_BYTES:
            raise _UncheckedError(
                f"its operands take {total / 2**20:.0f} MiB, a value run is limited to "
                f"{MAX_BYTES // 2**20} MiB"
            )
        # An index points into the experts, the leading size of the three-dimensional weights.
        below = min([s[0] for s in sizes.values() if len(s) == 3] or [2])
        values: dict[fx.Node, Tensor] = {}
        by_root: dict[Any, Tensor] = {self.view.strip(n): t for n, t in known.items()}
        for node, size in sizes.items():
            root = self.view.strip(node)
            if root in by_root:
                values[node] = by_root[root].reshape(size)
                continue
            values[node] = by_root[root] = _random(
                node.meta["val"].dtype, size, below, generator, weight=self.view.is_weight(node)
            )
        return values


def _run(
    planned: Replacement, values: dict[fx.Node, Tensor], made: dict[int, list[Tensor]]
) -> list[Tensor]:
    """Results of an op's reference on one rank. made: results of other sites' ops."""

    def given(arg: Any) -> Any:
        if isinstance(arg, Made):
            return made[id(arg.site)][arg.index]
        if isinstance(arg, Reshaped):
            return values[arg.node].reshape(_sizes(arg.node, arg.sizes))
        return values[arg] if isinstance(arg, fx.Node) else arg

    leaves = (fx.Node, Reshaped, Made)
    args = pytree.tree_map(given, planned.args, is_leaf=lambda a: isinstance(a, leaves))
    kwargs = {**planned.kwargs, "target": "reference", "composition": ""}
    if "group" in kwargs:
        kwargs["group"] = ""
    with torch.no_grad():
        results = planned.op(*args, **kwargs)
    return [results] if isinstance(results, Tensor) else list(results)


def _plain(args: Any) -> Any:
    """Arguments with a Reshaped operand as its node."""
    return [a.node if isinstance(a, Reshaped) else a for a in args]


def _sizes(node: fx.Node, shape: Sequence[Any]) -> list[int]:
    """Sizes with every symbol as TOKENS (a -1 stays for reshape)."""
    found = []
    for size in shape:
        if isinstance(size, sympy.Basic):
            size = size.subs(dict.fromkeys(size.free_symbols, TOKENS))
            if not size.is_Integer:
                raise _UncheckedError(f"the sizes of {node.name} depend on several symbols")
        found.append(int(size))
    return found


def _random(
    dtype: torch.dtype, size: Sequence[int], below: int, generator: torch.Generator, *, weight: bool
) -> Tensor:
    if dtype == torch.uint8:
        # As packed codes any byte will do; as an E8M0 scale only a byte near 127 is moderate.
        return torch.randint(118, 131, size, generator=generator).to(dtype)
    if not dtype.is_floating_point:
        return torch.randint(0, max(below, 1), size, generator=generator).to(dtype)
    drawn = torch.randn(size, generator=generator)
    if len(size) >= 2 and weight:
        drawn = drawn * max(size[-1], 1) ** -0.5
    return drawn.to(dtype)


def _worst(have: Tensor, want: Tensor) -> float:
    """Largest difference as a multiple of what ROUNDINGS roundings explain."""
    if not want.is_floating_point():
        return 0.0 if torch.equal(have, want) else math.inf
    a, b = have.double(), want.double()
    if not torch.equal(a.isnan(), b.isnan()):
        return math.inf
    a, b = torch.nan_to_num(a), torch.nan_to_num(b)
    if not b.numel():
        return 0.0
    unit = _UNIT.get(want.dtype, _BF16)
    allowed = 2 * unit * ROUNDINGS * (b.abs() + b.abs().max() / 4) + 1e-6 * b.abs().max() + 1e-30
    return float(((a - b).abs() / allowed).max())


class _Runner:
    """Runs a site's own nodes for real, from given operand values."""

    def __init__(self, view: GraphView, site: Site, values: dict[fx.Node, Tensor]) -> None:
        self.view = view
        self.inner = set(site.nodes)
        self.env: dict[fx.Node, Any] = dict(values)
        self.roots = {view.strip(node): value for node, value in values.items()}

    def value(self, node: fx.Node) -> Any:
        """The node's value, computed from the operands."""
        if node in self.env:
            return self.env[node]
        root = self.view.strip(node)
        if root in self.roots:
            found: Any = self.roots[root].reshape(_sizes(node, shape_of(node)))
        elif isinstance(node.meta.get("val"), torch.SymInt):
            found = _sizes(node, [node.meta["val"].node.expr])[0]
        elif node in self.inner:
            found = self._run(node)
        else:
            raise _UncheckedError(f"{node.name} is read by the site and is no operand")
        self.env[node] = found
        return found

    def _run(self, node: fx.Node) -> Any:
        reduce = self.view.find(AllReduce, node)
        if reduce is not None:
            return self.value(reduce.input)
        if op_of(node).startswith("auto_functionalized"):
            raise _UncheckedError(f"{node.name} calls an op that only its own library can run")
        args, kwargs = pytree.tree_map_only(fx.Node, self.value, (node.args, node.kwargs))
        if "device" in bound_args(node) and bound_args(node)["device"] is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return node.target(*args, **kwargs)  # type: ignore[operator]
