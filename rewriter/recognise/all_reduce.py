"""AllReduce: the sum over a process group, whoever spells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from k3fuse.rewriter.reasons import Code, Reason, Refusal
from k3fuse.rewriter.recognise.functionalized import FunctionalizedCall
from k3fuse.rewriter.view import GraphView, bound_args, op_of


@dataclass(frozen=True)
class AllReduce:
    """input: rank partial; out: the reduced value; group: name; size: ranks, None if unknown."""

    anchors: ClassVar[tuple[str, ...]] = (
        "vllm.all_reduce",
        "_c10d_functional.wait_tensor",
        "getitem",
    )

    input: fx.Node
    out: fx.Node
    group: str
    size: int | None
    nodes: tuple[fx.Node, ...]

    @classmethod
    def at(cls, view: GraphView, node: fx.Node) -> AllReduce | None:
        """Read an all-reduce off its result node. Another reduction than the sum is refused."""
        kind = op_of(node)
        if kind == "vllm.all_reduce":
            args = list(bound_args(node).values())
            return _made(view, args[0], node, str(args[1]), (node,))
        if kind == "_c10d_functional.wait_tensor":
            inner = node.args[0]
            if not isinstance(inner, fx.Node) or op_of(inner) not in (
                "_c10d_functional.all_reduce",
                "_c10d_functional.all_reduce_",
            ):
                return None
            source, how, group = inner.args
            if str(how).lower() != "sum":
                raise Refusal(
                    Reason(
                        Code.ATTR_MISMATCH,
                        f"{inner.name} reduces with '{how}', the fused exchange adds",
                        (inner.name,),
                        expected="sum",
                        actual=str(how),
                    )
                )
            return _made(view, source, node, str(group), (inner, node))
        if kind == "getitem" and isinstance(node.args[0], fx.Node):
            call = view.find(FunctionalizedCall, node.args[0])
            if (
                call is not None
                and call.name == "_C.shm_allreduce"
                and call.results["data"] is node
            ):
                # vLLM's CPU communicator reduces in place over its only tensor-parallel group.
                group = next((g for g in view.groups if g.startswith("tp")), "tp:0")
                return _made(view, call.args["data"], node, group, call.nodes)
        return None


def _made(
    view: GraphView, source: object, out: fx.Node, group: str, nodes: tuple[fx.Node, ...]
) -> AllReduce | None:
    if not isinstance(source, fx.Node):
        return None
    return AllReduce(source, out, group, group_size(group, view.groups), nodes)


def group_size(group: str, known: dict[str, int]) -> int | None:
    """Ranks of a group: from the graph's own record, else from torch.distributed, else None."""
    if group in known:
        return known[group]
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    try:
        return int(dist.distributed_c10d._resolve_process_group(group).size())  # type: ignore[attr-defined,arg-type]
    except (RuntimeError, ValueError, KeyError):
        return None
