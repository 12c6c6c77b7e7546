"""AllReduce: vLLM's op, functional collectives (also DTensor's), in place, and other reductions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2

from build import Hand, aten, compiled_graphs, found, refused, rows, stock_ops, trace
from k3fuse.rewriter.recognise.all_reduce import AllReduce
from k3fuse.rewriter.sources import fake_group
from k3fuse.rewriter.view import GraphView

M, H = 4, 16
c10d = torch.ops._c10d_functional


def _vllm(h: Hand, x: fx.Node, group: str) -> fx.Node:
    return h.call(torch.ops.vllm.all_reduce.default, x, group)


def _vllm_by_name(h: Hand, x: fx.Node, group: str) -> fx.Node:
    return h.call(torch.ops.vllm.all_reduce, x, group_name=group)


def _functional(h: Hand, x: fx.Node, group: str) -> fx.Node:
    return h.call(c10d.wait_tensor.default, h.call(c10d.all_reduce.default, x, "sum", group))


def _in_place(h: Hand, x: fx.Node, group: str) -> fx.Node:
    return h.call(
        c10d.wait_tensor.default,
        h.call(c10d.all_reduce_.default, h.call(aten.clone.default, x), "sum", group),
    )


def _upper_case(h: Hand, x: fx.Node, group: str) -> fx.Node:
    return h.call(c10d.wait_tensor.default, h.call(c10d.all_reduce.default, x, "SUM", group))


@pytest.mark.parametrize("spelling", [_vllm, _vllm_by_name, _functional, _in_place, _upper_case])
@pytest.mark.parametrize(("known", "size"), [({"tp:0": 8}, 8), ({"other": 8}, None)])
def test_a_spelling_is_read(
    spelling: Callable[..., fx.Node], known: dict[str, int], size: int | None
) -> None:
    stock_ops()
    h = Hand()
    x = h.input("x", M, H)
    out = spelling(h, x, "tp:0")
    view = h.view(out, **known)
    (reduce,) = found(view, AllReduce)
    assert view.strip(reduce.input) is x
    assert (reduce.out, reduce.group, reduce.size) == (out, "tp:0", size)
    assert out in reduce.nodes


@pytest.mark.parametrize("how", ["avg", "max", "product", "sum"])
def test_another_reduction_is_refused(how: str) -> None:
    h = Hand()
    x = h.input("x", M, H)
    out = h.call(c10d.wait_tensor.default, h.call(c10d.all_reduce.default, x, how, "0"))
    view = h.view(out)
    assert refused(view, AllReduce) == ([] if how == "sum" else ["ATTR_MISMATCH"])
    assert len(found(view, AllReduce)) == (1 if how == "sum" else 0)


def test_other_collectives_are_none() -> None:
    h = Hand()
    x = h.input("x", M, H)
    gathered = h.call(
        c10d.wait_tensor.default, h.call(c10d.all_gather_into_tensor.default, x, 8, "0")
    )
    scattered = h.call(
        c10d.wait_tensor.default,
        h.call(c10d.reduce_scatter_tensor.default, gathered, "sum", 8, "0"),
    )
    view = h.view(scattered)
    assert found(view, AllReduce) == []
    assert refused(view, AllReduce) == []


def test_a_collective_of_this_process_knows_its_size() -> None:
    with fake_group(8) as group:
        module = trace(lambda x: funcol.all_reduce(x, "sum", group) * 2, rows(M, H))
        (reduce,) = found(module, AllReduce)
        assert (reduce.group, reduce.size) == (group, 8)
    # Without the group nothing is known, and nothing is assumed.
    (reduce,) = found(module, AllReduce)
    assert reduce.size is None
    (reduce,) = list(GraphView(module.graph, {group: 4}).each(AllReduce))
    assert reduce.size == 4


def test_dtensors_partial_is_an_all_reduce() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    with fake_group(8):
        mesh = init_device_mesh("cpu", (8,))

        def f(x: Tensor) -> Tensor:
            partial = DTensor.from_local(x, mesh, [Partial()], run_check=False)
            return partial.redistribute(mesh, [Replicate()]).to_local() + 1

        (module,) = compiled_graphs(f, rows(M, H))
        (reduce,) = found(module, AllReduce)
        assert reduce.size == 8
        assert GraphView(module.graph).strip(reduce.input).op == "placeholder"


@pytest.mark.parametrize("wrapper", [auto_functionalized, auto_functionalized_v2])
def test_vllms_cpu_communicator(wrapper: object) -> None:
    stock_ops()
    h = Hand()
    x = h.input("x", M, H)
    op = torch.ops._C.shm_allreduce.default
    if wrapper is auto_functionalized:
        call = h.graph.call_function(wrapper, (op,), {"data": x, "handle": 0})  # type: ignore[arg-type]
    else:
        given = {"handle": 0, "_data_base_index": 0, "_all_bases": [x]}
        call = h.graph.call_function(wrapper, (op,), given)  # type: ignore[arg-type]
    call.meta["val"] = (None, x.meta["val"])
    out = h.item(call, 1)
    (reduce,) = found(h.view(out, **{"tp:0": 2}), AllReduce)
    assert (reduce.input, reduce.out, reduce.size) == (x, out, 2)
