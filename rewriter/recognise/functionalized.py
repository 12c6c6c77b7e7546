"""Mutable custom ops behind auto_functionalized, in both of torch's forms."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx
from torch._ops import OpOverload

from k3fuse.rewriter.reasons import Code, Reason, Refusal
from k3fuse.rewriter.view import GraphView, op_of


@dataclass(frozen=True)
class FunctionalizedCall:
    """One functionalised call: `args` by schema name, and where each mutated argument comes out.

    results: schema name of a mutated argument -> getitem node, or None where nobody reads it.
    """

    anchors: ClassVar[tuple[str, ...]] = ("auto_functionalized", "auto_functionalized_v2")

    op: OpOverload
    name: str
    args: dict[str, Any]
    results: dict[str, fx.Node | None]
    node: fx.Node
    nodes: tuple[fx.Node, ...]

    @classmethod
    def at(cls, view: GraphView, node: fx.Node) -> FunctionalizedCall | None:
        """Read either form. Refuses a mutated argument that is a part of its base (ALIAS_RISK)."""
        if op_of(node) not in cls.anchors:
            return None
        op = node.args[0]
        if not isinstance(op, OpOverload):
            return None
        mutated = [
            a.name
            for a in op._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        ]
        getitems = {
            u.args[1]: u
            for u in node.users
            if u.op == "call_function" and u.target is operator.getitem
        }
        args = dict(node.kwargs)
        first = max(len(op._schema.returns), 1)
        results: dict[str, fx.Node | None] = {}
        if "_all_bases" in node.kwargs:
            bases = node.kwargs["_all_bases"]
            for name in mutated:
                index = args.get(f"_{name}_base_index")
                partial = any(f"_{name}_{part}" in args for part in ("size", "stride", "slice_dim"))
                if index is None:
                    args[name], results[name] = None, None
                    continue
                if partial:
                    raise Refusal(
                        Reason(
                            Code.ALIAS_RISK,
                            f"{node.name} writes '{name}' through a partial view of its base",
                            (node.name,),
                            expected="the whole tensor",
                            actual="a view with its own size or stride",
                        )
                    )
                args[name] = bases[index]  # type: ignore[index]
                results[name] = getitems.get(first + index)  # type: ignore[operator]
            args = {k: v for k, v in args.items() if not k.startswith("_")}
        else:
            results = {name: getitems.get(first + i) for i, name in enumerate(mutated)}
        nodes = (node, *(g for g in getitems.values()))
        return cls(op, str(op.overloadpacket).replace("::", "."), args, results, node, nodes)


def result_index(node: fx.Node, argument: str) -> int:
    """Index in the call's result tuple of a mutated argument's new value."""
    op = node.args[0]
    if not isinstance(op, OpOverload):
        raise TypeError(f"{node.name} is no functionalised call of an op")
    first = max(len(op._schema.returns), 1)
    if "_all_bases" in node.kwargs:
        return first + int(node.kwargs[f"_{argument}_base_index"])  # type: ignore[arg-type]
    mutated = [
        a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    return first + mutated.index(argument)
