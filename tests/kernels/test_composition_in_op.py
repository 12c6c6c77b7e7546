"""Compositions inside an op: when they run, and what an op returns of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from k3fuse.kernels.common.composition import Composition, CompositionError
from op_cases import LOCAL
from stock_spellings import arguments, bit_equal, linears, traced
from traced import calls_of, compose, inputs_of, outputs_of, trace

F = torch.nn.functional


def test_op_runs_its_composition_outside_the_policy() -> None:
    def stock(x: Tensor, w: Tensor) -> Any:
        return (F.linear(x, w) * 2,)  # not what the op's reference computes: told apart below

    text = compose(traced(stock, dynamic=None)).text
    kwargs = {**LOCAL, "composition": text}
    for m in (1, 64, 65, 200):
        x, w = arguments(m, seed=m)
        (out,) = torch.ops.k3fuse.attention_projection(x, [w], **kwargs)
        assert torch.equal(out, stock(x, w)[0]) == (m > 64)
    planned = {**kwargs, "target": "gb300:tp8"}  # no GPU: stock, at every count
    x, w = arguments(8)
    (out,) = torch.ops.k3fuse.attention_projection(x, [w], **planned)
    assert torch.equal(out, stock(x, w)[0])


def test_outputs_of_a_composition_are_dense_and_own_their_memory() -> None:
    """Splits of one GEMM, and a view of the input: both are what the fake op promises."""
    graph = traced(linears, dynamic=None)
    text = compose(graph).text
    x, w = arguments(70)
    kwargs = {**LOCAL, "composition": text}
    with pytest.raises(CompositionError, match="the op promises"):
        torch.ops.k3fuse.attention_projection(x, [w], **kwargs)

    def halves(x: Tensor, a: Tensor, b: Tensor) -> Any:
        y = F.linear(x, torch.cat([a, b]))
        return torch.split(y, [a.shape[0], b.shape[0]], dim=-1)

    a, b = w.clone(), torch.cat([w, w[:3]])
    torch._dynamo.maybe_mark_dynamic(x, 0)
    graph = trace(halves, (x, a, b), dynamic=None)
    ins = sorted(inputs_of(graph), key=lambda n: str(n.meta["val"].shape[0]), reverse=True)
    text = Composition.from_nodes(calls_of(graph), ins, outputs_of(graph)).text
    out = torch.ops.k3fuse.attention_projection(x, [a, b], **{**LOCAL, "composition": text})
    assert [t.stride() for t in out] == [(8, 1), (11, 1)]
    assert out[0].untyped_storage().data_ptr() != out[1].untyped_storage().data_ptr()
    bit_equal(out, halves(x, a, b))


def test_op_never_returns_its_input() -> None:
    def passes_through(x: Tensor, w: Tensor) -> Any:
        return (x.view(x.shape),)

    graph = traced(passes_through, dynamic=None)
    x_node = inputs_of(graph)[0]
    (x, _), w = arguments(70), torch.zeros(16, 16).bfloat16()
    text = Composition.from_nodes([], [x_node, x_node], [x_node]).text
    (out,) = torch.ops.k3fuse.attention_projection(
        x[:16], [w], **{**LOCAL, "composition": text, "target": "gb300:tp8"}
    )
    assert torch.equal(out, x[:16])
    out.zero_()
    assert x[:16].any()
