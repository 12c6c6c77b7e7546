"""The only writer of graphs. Every change is an event; tests count them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from k3fuse.rewriter.canonical import shape_of
from k3fuse.rewriter.fakes import FakeResults, fake_value
from k3fuse.rewriter.reasons import Code, Reason
from k3fuse.rewriter.site import Made, Output, Replacement, Reshaped, Site, flatten_nodes
from k3fuse.rewriter.subgraph import ExtractError, view_sizes

aten = torch.ops.aten


@dataclass(frozen=True)
class Event:
    """One change: a node inserted, erased, or its uses replaced by another node."""

    kind: Literal["inserted", "erased", "replaced"]
    node: str
    by: str = ""


class EditError(RuntimeError):
    """The editor refused before touching the graph; carries the reason."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass
class Editor:
    """Replaces sites in one graph module, one op call a site."""

    module: fx.GraphModule
    events: list[Event] = field(default_factory=list)
    listeners: list[Callable[[Event], None]] = field(default_factory=list)
    replaced: dict[fx.Node, fx.Node] = field(default_factory=dict)
    # Value a node had -> the value of the node that its readers read now.
    exchanged: list[tuple[str, Any, fx.Node]] = field(default_factory=list)
    _unordered: bool = False
    _inputs_end: list[fx.Node] | None = None
    _fakes: FakeResults = field(default_factory=FakeResults)
    # By the site's id: its op's call; what was checked last, with the results that it will have.
    _calls: dict[int, fx.Node] = field(default_factory=dict)
    _promised: dict[int, tuple[Replacement, tuple[Any, ...]]] = field(default_factory=dict)

    def _tell(
        self, kind: Literal["inserted", "erased", "replaced"], node: str, by: str = ""
    ) -> None:
        event = Event(kind, node, by)
        self.events.append(event)
        for listener in self.listeners:
            listener(event)

    def current(self, node: fx.Node) -> fx.Node:
        """Return the node that stands for `node` now, after earlier replacements."""
        while node in self.replaced:
            node = self.replaced[node]
        return node

    def check(self, site: Site, planned: Replacement) -> None:
        """Raise EditError where the op's results cannot stand for the site's values. No edit.

        A result of another site's op (`Made`) is that of the last check of that site.
        """
        args = tuple(
            self._promised[id(a.site)][1][a.index] if isinstance(a, Made) else a
            for a in planned.args
        )
        try:
            values = self._fakes.of(planned.op, args, planned.kwargs)
        except (ValueError, TypeError, RuntimeError) as error:
            raise EditError(_unfit(site, error)) from error
        self._check_results(planned, values)
        self._promised[id(site)] = planned, values

    def replace(self, site: Site, planned: Replacement) -> fx.Node:
        """Put the op in the site's place. Raises EditError with the graph untouched.

        `planned` may name nodes that an earlier call replaced, and results of an earlier call that
        the graph did not have. The op's fake results must have the dtype of the values they stand
        for and the same number of elements; a view restores the shape where only that differs.
        """
        made = [self._result(a, site) for a in planned.args if isinstance(a, Made)]
        try:
            call = self._calls[id(site)] = self._replace(site, planned, made)
        except EditError:
            for node in made:
                self.module.graph.erase_node(node)
            raise
        for node in made:
            self._tell("inserted", node.name)
        return call

    def _result(self, made: Made, site: Site) -> fx.Node:
        """A result of an earlier site's op, which nothing has read yet."""
        call = self._calls.get(id(made.site))
        if call is None:
            names = (site.anchor.name,)
            raise EditError(Reason(Code.OP_MISMATCH, f"{made} is not in the graph", names))
        with self.module.graph.inserting_after(call):
            part = self.module.graph.call_function(operator.getitem, (call, made.index))
        self._describe(part, made.site, call.meta["val"][made.index])
        return part

    def reduce(self, site: Site, kwargs: Mapping[str, Any]) -> None:
        """Change keyword arguments of a site's op so that it makes fewer results."""
        call = self._calls[id(site)]
        call.kwargs = {**call.kwargs, **kwargs}
        call.meta["val"] = list(self._fakes.of(call.target, call.args, dict(call.kwargs)))

    def _replace(self, site: Site, planned: Replacement, made: list[fx.Node]) -> fx.Node:
        news = iter(made)
        args = tuple(next(news) if isinstance(a, Made) else a for a in planned.args)
        args, kwargs = self._mapped(args), planned.kwargs
        reshaped = [a for a in args if isinstance(a, Reshaped)]
        outputs = tuple(
            Output(o.node, self.current(o.source) if isinstance(o.source, fx.Node) else o.source)
            for o in planned.outputs
        )
        replacement = Replacement(planned.op, args, kwargs, outputs)
        checked, values = self._promised.get(id(site), (None, ()))
        if checked is not planned:
            try:
                values = self._fakes.of(planned.op, args, kwargs)
            except (ValueError, TypeError, RuntimeError) as error:
                raise EditError(_unfit(site, error)) from error
        self._check_results(replacement, values)
        graph = self.module.graph
        inner = set(site.nodes)
        operands = self._operands(args)
        if (crossed := self._crossed(site, outputs, operands)) is not None:
            raise EditError(crossed)
        anchor = max([*operands, *self._last_placeholder()])
        first = next((n for n in site.nodes if not n._erased), None)
        if first is not None and anchor < first:
            anchor = first.prev  # a write before the whole site stays before the op
        self._unordered |= any(u < anchor for o in outputs for u in o.node.users if u not in inner)
        for item in reshaped:
            with graph.inserting_after(anchor):
                source = self.current(item.node)
                anchor = graph.call_function(aten.reshape.default, (source, list(item.sizes)))
            self._describe(anchor, site, fake_value(item))
            self._tell("inserted", anchor.name)
            args = tuple(anchor if a is item else a for a in args)
        with graph.inserting_after(anchor):
            call = graph.call_function(replacement.op, args, replacement.kwargs)
        self._describe(call, site, values)
        self._tell("inserted", call.name)
        previous, results = call, []
        if _returns_tensor(replacement.op):
            call.meta["val"] = values[0]
            results, values = [call], ()
        for i, value in enumerate(values):
            with graph.inserting_after(previous):
                part = graph.call_function(operator.getitem, (call, i))
            self._describe(part, site, value)
            self._tell("inserted", part.name)
            results.append(part)
            previous = part
        self._rewire(replacement, results, previous, site)
        self._erase(site)
        for part in results:
            if not part.users and part is not call:
                self._tell("erased", part.name)
                graph.erase_node(part)
        return call

    def _crossed(
        self, site: Site, outputs: tuple[Output, ...], operands: list[fx.Node]
    ) -> Reason | None:
        """Why the site cannot be one node any more: an operand now depends on its outputs.

        Two sites can each be one node and not both, where each reads an early output of the other.
        """
        inner, wanted = set(site.nodes), set(operands)
        last = max(operands)
        stack = [u for o in outputs for u in o.node.users if u not in inner]
        seen: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            # In an ordered graph nothing behind the last operand leads to one.
            if node in seen or (not self._unordered and last < node):
                continue
            seen.add(node)
            if node in wanted:
                return Reason(
                    Code.INTERPOSED_OP,
                    f"{node.name} is read by the site and, with another site fused, computed from "
                    "its output",
                    (site.anchor.name, node.name),
                    expected="operands that do not depend on the site",
                    actual=node.name,
                )
            stack.extend(node.users)
        return None

    def _operands(self, args: tuple[Any, ...]) -> list[fx.Node]:
        flat = [a.node if isinstance(a, Reshaped) else a for a in args]
        return [self.current(n) for n in flatten_nodes(flat)]

    def _mapped(self, args: Any) -> Any:
        """Arguments with every node replaced by the one that stands for it now."""
        if isinstance(args, fx.Node):
            return self.current(args)
        if isinstance(args, (list, tuple)):
            return type(args)(self._mapped(a) for a in args)
        return args

    def _last_placeholder(self) -> list[fx.Node]:
        """The last input of the graph, behind which every op must stand."""
        if self._inputs_end is None:
            self._inputs_end = []
            for node in self.module.graph.nodes:
                if node.op not in ("placeholder", "get_attr"):
                    break
                self._inputs_end = [node]
        return self._inputs_end

    def _check_results(self, replacement: Replacement, values: tuple[Any, ...]) -> None:
        for output in replacement.outputs:
            if not isinstance(output.source, int):
                continue
            if output.source >= len(values):
                raise EditError(
                    Reason(
                        Code.OP_MISMATCH,
                        f"{replacement.op} gives {len(values)} results, the site needs one more",
                        (output.node.name,),
                    )
                )
            have, want = values[output.source], output.node.meta["val"]
            if have.dtype != want.dtype or have.device != want.device:
                raise EditError(
                    Reason(
                        Code.DTYPE_MISMATCH,
                        f"{output.node.name} is {want.dtype} on {want.device}, the fused op gives "
                        f"{have.dtype} on {have.device}",
                        (output.node.name,),
                        expected=str(want.dtype),
                        actual=str(have.dtype),
                    )
                )
            if not want.is_contiguous() or (have.numel() != want.numel()) is True:
                raise EditError(
                    Reason(
                        Code.STRIDE_OR_ALIGN,
                        f"{output.node.name} has shape {tuple(want.shape)} and stride "
                        f"{want.stride()}, the fused op gives contiguous {tuple(have.shape)}",
                        (output.node.name,),
                        expected=str(tuple(want.shape)),
                        actual=str(tuple(have.shape)),
                    )
                )
            try:
                view_sizes(shape_of(output.node))
            except ExtractError as error:
                raise EditError(
                    Reason(Code.SHAPE_MISMATCH, str(error), (output.node.name,))
                ) from error

    def _rewire(
        self, replacement: Replacement, results: list[fx.Node], previous: fx.Node, site: Site
    ) -> None:
        graph = self.module.graph
        inner = set(site.nodes)
        for output in replacement.outputs:
            if isinstance(output.source, int):
                new = results[output.source]
                if shape_of(new) != shape_of(output.node):
                    with graph.inserting_after(previous):
                        new = graph.call_function(
                            aten.view.default, (new, view_sizes(shape_of(output.node)))
                        )
                    self._describe(new, site, output.node.meta["val"])
                    self._tell("inserted", new.name)
                    previous = new
            elif isinstance(output.source, fx.Node):
                new = output.source
            else:
                before = set(graph.nodes)
                with graph.inserting_after(previous):
                    new = output.source(graph, results, self.current)
                for node in graph.nodes:
                    if node not in before:
                        self._describe(node, site, output.node.meta["val"])
                        self._tell("inserted", node.name)
                previous = new
            output.node.replace_all_uses_with(new, delete_user_cb=lambda u: u not in inner)
            self.replaced[output.node] = new
            self.exchanged.append((output.node.name, output.node.meta["val"], new))
            self._tell("replaced", output.node.name, new.name)

    def _erase(self, site: Site) -> None:
        """Erase what nothing reads any more; a shared view of an operand or weight may stay."""
        for node in reversed(site.nodes):
            if not node.users:
                self._tell("erased", node.name)
                self.module.graph.erase_node(node)

    def _describe(self, node: fx.Node, site: Site, value: Any) -> None:
        # Only the fake value and the stack trace carry over. An old node's `eager_input_vals`
        # describes other arguments and breaks Inductor's layout constraints.
        node.meta["val"] = list(value) if isinstance(value, tuple) else value
        trace = site.anchor.meta.get("stack_trace")
        if trace:
            node.meta["stack_trace"] = trace
        node.meta["k3fuse"] = {
            "pattern": site.pattern,
            "form": site.form,
            "layer": site.layer,
            "replaced": [n.name for n in site.nodes],
        }

    def finish(self, *, recompile: bool = True) -> None:
        """Restore topological order where an output was read above its new place.

        recompile: generate the module's Python code anew; a compiler that reads the graph needs
        none.
        """
        if self._unordered:
            from torch._inductor.pattern_matcher import stable_topological_sort

            stable_topological_sort(self.module.graph)
            self._unordered = False
        if recompile:
            self.module.recompile()


def _unfit(site: Site, error: Exception) -> Reason:
    """The reason of a site whose operands the fused op refuses."""
    text = " ".join(str(error).split())
    code = Code.DTYPE_MISMATCH if isinstance(error, TypeError) else Code.SHAPE_MISMATCH
    if "stride" in text:
        code = Code.STRIDE_OR_ALIGN
    return Reason(code, f"{site.anchor.name}: the fused op refuses: {text}", (site.anchor.name,))


def _returns_tensor(op: Any) -> bool:
    """Whether an op gives one bare tensor, which must not be indexed, rather than a list."""
    returns = op._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"
