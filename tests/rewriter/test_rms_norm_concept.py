"""RMSNorm and add + RMSNorm: every spelling, epsilon, operand order and rounding point."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from build import BF16, LEVELS, Hand, aten, compiled_graphs, found, refused, rows, stock_ops, trace
from k3fuse.rewriter.recognise.rms_norm import AddRmsNorm, RmsNorm
from k3fuse.rewriter.view import GraphView

M, H = 4, 16
EPS = (1e-5, 1e-6, 0.1)


def _scale(wide: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


# name -> (function of the narrow row, the wide row, weight, eps; rounded before the weight?)
Norm = Callable[[Tensor, Tensor, Tensor, float], Tensor]
DECOMPOSED: dict[str, tuple[Norm, bool]] = {
    "weight in FP32": (lambda x, f, w, e: (f * _scale(f, e) * w.float()).to(x.dtype), False),
    "weight first": (lambda x, f, w, e: (w.float() * (_scale(f, e) * f)).to(x.dtype), False),
    "eps first, product by itself": (
        lambda x, f, w, e: (f * torch.rsqrt(e + (f * f).mean(-1, True)) * w.float()).to(x.dtype),
        False,
    ),
    "square": (
        lambda x, f, w, e: (f * torch.rsqrt(torch.square(f).mean(-1, True) + e) * w.float()).to(
            x.dtype
        ),
        False,
    ),
    "mean, then unsqueeze": (
        lambda x, f, w, e: (f * torch.rsqrt(f.pow(2).mean(-1) + e).unsqueeze(-1) * w.float()).to(
            x.dtype
        ),
        False,
    ),
    "mean over a positive axis": (
        lambda x, f, w, e: (f * torch.rsqrt(f.pow(2).mean(1, True) + e) * w.float()).to(x.dtype),
        False,
    ),
    "rounded, then the weight": (lambda x, f, w, e: w * (f * _scale(f, e)).to(x.dtype), True),
    "rounded, then the weight, other order": (
        lambda x, f, w, e: (_scale(f, e) * f).to(x.dtype) * w,
        True,
    ),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("form", DECOMPOSED)
def test_a_decomposed_norm_is_read(form: str, eps: float, level: str) -> None:
    function, before = DECOMPOSED[form]
    module = trace(lambda x, w: function(x, x.float(), w, eps), rows(M, H), rows(H), level=level)
    x, w = [n for n in module.graph.nodes if n.op == "placeholder"]
    (norm,) = found(module, RmsNorm)
    assert norm.eps == eps
    assert (norm.x, norm.weight) == (x, w)
    assert norm.round_before_weight is before
    output = module.graph.output_node().args[0]
    assert norm.out is output
    covered = set(norm.nodes)
    assert covered <= {n for n in module.graph.nodes if n.op == "call_function"}
    assert {output} <= covered
    assert not refused(module, RmsNorm)


@pytest.mark.parametrize("level", LEVELS)
def test_a_norm_without_weight(level: str) -> None:
    def f(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * _scale(wide, 1e-5)).to(BF16)

    module = trace(f, rows(M, H), level=level)
    (norm,) = found(module, RmsNorm)
    assert norm.weight is None
    assert norm.out is module.graph.output_node().args[0]


def test_an_activation_is_no_weight() -> None:
    """A gate of the same width multiplied in is another product."""

    def weights(computed: bool) -> list[bool]:
        def f(x: Tensor, w: Tensor) -> Tensor:
            gate = torch.sigmoid(w) if computed else w
            wide = x.float()
            return (wide * _scale(wide, 1e-5) * gate.float()).to(BF16)

        return [n.weight is not None for n in found(trace(f, rows(M, H), rows(H)), RmsNorm)]

    assert weights(computed=True) == [False]
    assert weights(computed=False) == [True]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("axis", "codes"), [(-1, []), (0, ["ATTR_MISMATCH"])])
def test_a_mean_over_another_axis_is_refused(axis: int, codes: list[str], level: str) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(axis, True) + 1e-5) * w.float()).to(BF16)

    module = trace(f, rows(H, H), rows(H), level=level)
    assert refused(module, RmsNorm) == codes
    assert len(found(module, RmsNorm)) == (0 if codes else 1)


@pytest.mark.parametrize("level", LEVELS)
def test_a_norm_computed_narrow_is_refused(level: str) -> None:
    def f(x: Tensor, w: Tensor, wide: bool) -> Tensor:
        x = x.float() if wide else x
        return (x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-5) * w).to(BF16)

    args = (rows(M, H), rows(H))
    narrow = trace(lambda x, w: f(x, w, wide=False), *args, level="aot")
    assert refused(narrow, RmsNorm) == ["DTYPE_MISMATCH"]
    wide = trace(lambda x, w: f(x, w, wide=True), *args, level=level)
    assert refused(wide, RmsNorm) == []


@pytest.mark.parametrize(("narrow", "expected"), [(True, 0), (False, 1)])
def test_a_square_in_the_narrow_dtype_is_another_norm(narrow: bool, expected: int) -> None:
    """The mean is FP32 and so is all behind it; the squares were rounded before."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        wide = x if narrow else x.float()
        mean = wide.pow(2).mean(-1, True, dtype=torch.float32)
        return (wide * torch.rsqrt(mean + 1e-5) * w.float()).to(BF16)

    assert len(found(trace(f, rows(M, H), rows(H)), RmsNorm)) == expected


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("keep", "expected"), [(False, 0), (True, 1)])
def test_a_scale_that_broadcasts_over_the_other_axis_is_another_norm(
    keep: bool, expected: int, level: str
) -> None:
    """H rows of H: a mean of shape [H] multiplies the columns, not the rows."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keep) + 1e-5) * w.float()).to(BF16)

    assert len(found(trace(f, rows(H, H), rows(H), level=level), RmsNorm)) == expected


@pytest.mark.parametrize("change", ["exponent 3", "sqrt", "subtract eps", "other square", "none"])
def test_another_statistic_is_no_rms_norm(change: str) -> None:
    def f(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        wide = x.float()
        power = wide.pow(3) if change == "exponent 3" else wide.pow(2)
        if change == "other square":
            power = y.float().pow(2)
        mean = power.mean(-1, True)
        shifted = mean - 1e-5 if change == "subtract eps" else mean + 1e-5
        scale = torch.sqrt(shifted) if change == "sqrt" else torch.rsqrt(shifted)
        return (wide * scale * w.float()).to(BF16)

    module = trace(f, rows(M, H), rows(H), rows(M, H, seed=1))
    assert len(found(module, RmsNorm)) == (1 if change == "none" else 0)


# --- one op -------------------------------------------------------------------------------------


def _aten_norm(h: Hand, x: fx.Node, w: fx.Node, eps: float | None) -> fx.Node:
    return h.call(aten.rms_norm.default, x, [H], w, eps)


def _fused_norm(h: Hand, x: fx.Node, w: fx.Node, eps: float | None) -> fx.Node:
    return h.item(h.call(aten._fused_rms_norm.default, x, [H], w, eps), 0)


def _vllm_norm(h: Hand, x: fx.Node, w: fx.Node, eps: float | None) -> fx.Node:
    return h.call(torch.ops.vllm_ir.rms_norm.default, x, w, eps)


def _vllm_norm_spelled_out(h: Hand, x: fx.Node, w: fx.Node, eps: float | None) -> fx.Node:
    return h.call(torch.ops.vllm_ir.rms_norm, x, w, eps, None)


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("spelling", [_aten_norm, _fused_norm, _vllm_norm, _vllm_norm_spelled_out])
def test_a_whole_norm_op_is_read(spelling: Callable[..., fx.Node], eps: float) -> None:
    stock_ops()
    h = Hand()
    x, w = h.input("x", M, H), h.input("w", H)
    out = spelling(h, x, w, eps)
    (norm,) = found(h.view(out), RmsNorm)
    assert (norm.x, norm.weight, norm.eps, norm.out) == (x, w, eps, out)
    # vLLM rounds the row and multiplies in the narrow dtype; aten rounds once.
    assert norm.round_before_weight is spelling.__name__.startswith("_vllm")


def test_an_epsilon_left_out_is_the_dtypes_own() -> None:
    h = Hand()
    x, w = h.input("x", M, H), h.input("w", H)
    (norm,) = found(h.view(_aten_norm(h, x, w, None)), RmsNorm)
    assert norm.eps == torch.finfo(BF16).eps


def test_a_norm_over_two_axes_or_a_part_of_the_row_is_refused() -> None:
    stock_ops()
    h = Hand()
    x, w = h.input("x", M, H), h.input("w", M, H)
    assert refused(h.view(h.call(aten.rms_norm.default, x, [M, H], w, 1e-5)), RmsNorm) == [
        "ATTR_MISMATCH"
    ]
    for size, codes in ((8, ["ATTR_MISMATCH"]), (None, [])):
        h = Hand()
        x, w = h.input("x", M, H), h.input("w", H)
        out = h.call(torch.ops.vllm_ir.rms_norm.default, x, w, 1e-5, size)
        assert refused(h.view(out), RmsNorm) == codes


# --- add + norm ---------------------------------------------------------------------------------


def _add_norm(
    a: Tensor, b: Tensor, w: Tensor, eps: float, round_sum: bool, before: bool
) -> tuple[Tensor, Tensor]:
    if round_sum:
        total = a + b
        wide = total.float()
    else:
        wide = a.float() + b.float()
        total = wide.to(a.dtype)
    scaled = wide * _scale(wide, eps)
    out = scaled.to(a.dtype) * w if before else (scaled * w.float()).to(a.dtype)
    return out, total


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("round_sum", "before", "rounding"),
    [
        (True, False, "round_sum"),
        (True, True, "round_sum+round_before_weight"),
        (False, False, ""),
        (False, True, "round_before_weight"),
    ],
)
@pytest.mark.parametrize("eps", EPS)
def test_add_and_norm(
    eps: float, round_sum: bool, before: bool, rounding: str, swapped: bool, level: str
) -> None:
    def f(a: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (b, a) if swapped else (a, b)
        return _add_norm(first, second, w, eps, round_sum, before)

    module = trace(f, rows(M, H), rows(M, H, seed=1), rows(H), level=level)
    a, b, w = [n for n in module.graph.nodes if n.op == "placeholder"]
    view = GraphView(module.graph)
    (added,) = found(view, AddRmsNorm)
    if level == "inductor" and round_sum:
        # Inductor's own decompositions keep `a + b` narrow; the rounding point is in the graph.
        assert added.sum.meta["val"].dtype == BF16
    assert {added.a, added.b} == {a, b}
    assert (added.weight, added.eps, added.rounding) == (w, eps, rounding)
    out, total = module.graph.output_node().args[0]
    assert (added.out, added.sum) == (out, total)


@pytest.mark.parametrize("level", LEVELS)
def test_torchs_own_norm_through_aot_autograd(level: str) -> None:
    def f(a: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = a + b
        return torch.nn.functional.rms_norm(total, [H], w, 1e-5), total

    (module,) = compiled_graphs(f, rows(M, H), rows(M, H, seed=1), rows(H), level=level)
    (added,) = found(module, AddRmsNorm)
    # torch rounds the epsilon to FP32 where it takes the norm apart.
    assert added.eps == pytest.approx(1e-5, rel=1e-7)
    assert added.rounding == "round_sum"
    assert (added.out, added.sum) == module.graph.output_node().args[0]


def test_a_broadcast_add_is_no_residual() -> None:
    def f(a: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return _add_norm(a, b, w, 1e-5, round_sum=True, before=False)

    assert found(trace(f, rows(M, H), rows(1, H), rows(H)), AddRmsNorm) == []
    assert len(found(trace(f, rows(M, H), rows(M, H, seed=1), rows(H)), AddRmsNorm)) == 1


def test_a_scaled_add_is_no_residual() -> None:
    for alpha, expected in ((2, 0), (1, 1)):
        h = Hand()
        a, b, w = h.input("a", M, H), h.input("b", M, H), h.input("w", H)
        total = h.call(aten.add.Tensor, a, b, alpha=alpha)
        out = h.call(aten.rms_norm.default, total, [H], w, 1e-5)
        assert len(found(h.view(out, total), AddRmsNorm)) == expected


def test_vllms_fused_add() -> None:
    stock_ops()
    h = Hand()
    a, b, w = h.input("a", M, H), h.input("b", M, H), h.input("w", H)
    both = h.call(torch.ops.vllm_ir.fused_add_rms_norm.default, a, b, w, 1e-6)
    out, total = h.item(both, 0), h.item(both, 1)
    (added,) = found(h.view(out, total), AddRmsNorm)
    assert (added.a, added.b, added.weight, added.eps) == (a, b, w, 1e-6)
    assert (added.out, added.sum, added.rounding) == (out, total, "round_before_weight")


def test_a_view_between_sum_and_norm_is_looked_through() -> None:
    h = Hand()
    a, b, w = h.input("a", M, H), h.input("b", M, H), h.input("w", H)
    total = h.call(aten.add.Tensor, a, b)
    seen = h.call(aten.view.default, h.call(aten.alias.default, total), [M, 1, H])
    out = h.call(aten.rms_norm.default, seen, [H], w, 1e-5)
    (added,) = found(h.view(out, total), AddRmsNorm)
    assert (added.a, added.b, added.sum) == (a, b, total)
