"""AttnRes: the custom op in both functionalised forms, and plain PyTorch over lists and banks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2

from build import BF16, LEVELS, Hand, aten, found, refused, rows, stock_ops, trace
from k3fuse.rewriter.recognise.attn_res import AttnRes
from k3fuse.rewriter.recognise.functionalized import FunctionalizedCall, result_index

M, H, SLOTS = 4, 16, 8
EPS = (1e-5, 1e-6, 0.1)


def _norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, True) + eps) * w.float()).to(BF16)


def score_after(f: Tensor, norm: Tensor, proj: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(f.pow(2).mean(-1) + eps)
    return (f * (norm.float() * proj.float())).sum(-1) * scale


def score_after_swapped(f: Tensor, norm: Tensor, proj: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(eps + (f * f).mean(2))
    return scale * ((proj.float() * norm.float()) * f).sum(2)


def score_of_normalised(f: Tensor, norm: Tensor, proj: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
    return ((f * scale) * (norm.float() * proj.float())).sum(-1)


def score_of_norm(f: Tensor, norm: Tensor, proj: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
    return (f * scale * norm.float() * proj.float()).sum(-1)


SCORES = (score_after, score_after_swapped, score_of_normalised, score_of_norm)


def mix(
    sources: Tensor,
    norm: Tensor,
    proj: Tensor,
    eps: float,
    score: Callable[..., Tensor],
    axis: int = -1,
) -> Tensor:
    f = sources.float()
    weights = torch.softmax(score(f, norm, proj, eps), axis)
    return (weights.unsqueeze(-1) * f).sum(1)


def inputs(blocks: int) -> list[Tensor]:
    made = [rows(M, H, seed=i) for i in range(blocks + 2)]
    return [*made, rows(H, seed=1), rows(H, seed=2), rows(H, seed=3)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("score", SCORES)
def test_a_list_of_blocks(
    score: Callable[..., Tensor], eps: float, blocks: int, level: str
) -> None:
    def f(*t: Tensor) -> tuple[Tensor, Tensor]:
        prefix, delta, *rest = t
        stacked, (norm, proj, out_norm) = rest[:blocks], rest[blocks:]
        total = prefix + delta
        mixed = mix(torch.stack([*stacked, total], 1), norm, proj, eps, score)
        return _norm(mixed, out_norm, eps), total

    module = trace(f, *inputs(blocks), level=level)
    prefix, delta, *rest = [n for n in module.graph.nodes if n.op == "placeholder"]
    (read,) = found(module, AttnRes)
    assert {read.prefix, read.delta} == {prefix, delta}
    assert list(read.blocks) == rest[:blocks]
    assert read.num_blocks == blocks
    assert {read.score_norm_weight, read.score_proj_weight} == set(rest[blocks : blocks + 2])
    assert read.out_norm_weight is rest[-1]
    assert (read.eps, read.out_eps, read.round_mix, read.custom) == (eps, eps, False, False)
    out, total = module.graph.output_node().args[0]
    assert (read.out, read.new_prefix) == (out, total)
    assert not refused(module, AttnRes)
    assert set(read.nodes) <= {n for n in module.graph.nodes if n.op == "call_function"}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("count", [1, 3])
def test_a_bank_of_blocks(count: int, level: str) -> None:
    def f(prefix: Tensor, bank: Tensor, norm: Tensor, proj: Tensor, out_norm: Tensor) -> Tensor:
        sources = torch.cat([bank[:, :count], prefix.unsqueeze(1)], 1)
        return _norm(mix(sources, norm, proj, 1e-5, score_after), out_norm, 1e-6)

    module = trace(
        f, rows(M, H), rows(M, SLOTS, H), rows(H), rows(H, seed=1), rows(H, seed=2), level=level
    )
    prefix, bank, *_ = [n for n in module.graph.nodes if n.op == "placeholder"]
    (read,) = found(module, AttnRes)
    assert (read.prefix, read.delta, read.blocks, read.num_blocks) == (prefix, None, (bank,), count)
    assert (read.eps, read.out_eps) == (1e-5, 1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_the_mix_is_rounded_before_the_final_norm(level: str) -> None:
    def f(rounded: bool, *t: Tensor) -> Tensor:
        a, prefix, norm, proj, out_norm = t
        mixed = mix(torch.stack([a, prefix], 1), norm, proj, 1e-5, score_after)
        return _norm(mixed.to(BF16) if rounded else mixed, out_norm, 1e-5)

    for rounded in (False, True):
        module = trace(lambda *t, r=rounded: f(r, *t), *inputs(0), level=level)
        (read,) = found(module, AttnRes)
        assert read.round_mix is rounded


def test_a_mix_without_a_norm() -> None:
    def f(a: Tensor, prefix: Tensor, norm: Tensor, proj: Tensor) -> Tensor:
        return mix(torch.stack([a, prefix], 1), norm, proj, 1e-5, score_after).to(BF16)

    module = trace(f, *inputs(0)[:4])
    (read,) = found(module, AttnRes)
    assert (read.out_norm_weight, read.out_eps) == (None, 0.0)
    assert read.out is module.graph.output_node().args[0]


# --- near misses --------------------------------------------------------------------------------

Change = Callable[[Tensor, Tensor, Tensor], Tensor]
DEFECTS: dict[str, Change] = {
    "none": lambda f, n, p: (torch.softmax(score_after(f, n, p, 1e-5), -1).unsqueeze(-1) * f).sum(
        1
    ),
    "softmax over the tokens": lambda f, n, p: (
        torch.softmax(score_after(f, n, p, 1e-5), 0).unsqueeze(-1) * f
    ).sum(1),
    "sigmoid": lambda f, n, p: (torch.sigmoid(score_after(f, n, p, 1e-5)).unsqueeze(-1) * f).sum(1),
    "mean over the sources": lambda f, n, p: (
        torch.softmax(
            (f * (n.float() * p.float())).sum(-1)
            * torch.rsqrt(f.pow(2).mean(1).mean(-1, True) + 1e-5),
            -1,
        ).unsqueeze(-1)
        * f
    ).sum(1),
    "scaled scores": lambda f, n, p: (
        torch.softmax(2.0 * score_after(f, n, p, 1e-5), -1).unsqueeze(-1) * f
    ).sum(1),
    "cube": lambda f, n, p: (
        torch.softmax(
            (f * (n.float() * p.float())).sum(-1) * torch.rsqrt(f.pow(3).mean(-1) + 1e-5), -1
        ).unsqueeze(-1)
        * f
    ).sum(1),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("defect", DEFECTS)
def test_another_mix_is_refused(defect: str, level: str) -> None:
    def f(a: Tensor, prefix: Tensor, norm: Tensor, proj: Tensor, out_norm: Tensor) -> Tensor:
        wide = torch.stack([a, prefix], 1).float()
        return _norm(DEFECTS[defect](wide, norm, proj), out_norm, 1e-5)

    module = trace(f, *inputs(0), level=level)
    count = 1 if defect == "none" else 0
    assert len(found(module, AttnRes)) == count
    assert len(refused(module, AttnRes)) in ((0,) if count else (0, 1))
    if defect == "softmax over the tokens":
        # Inductor spells the softmax out: its maximum has another shape then.
        code = "ATTR_MISMATCH" if level == "aot" else "SHAPE_MISMATCH"
        assert refused(module, AttnRes) == [code]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("axis", "expected"), [(-1, 1), (1, 0)])
def test_weights_spread_along_the_wrong_axis(axis: int, expected: int, level: str) -> None:
    """As many sources as columns: [M, S] spread as [M, 1, S] fits the shapes as well."""

    def f(*t: Tensor) -> Tensor:
        *stacked, norm, proj, out_norm = t
        wide = torch.stack(stacked, 1).float()
        weights = torch.softmax(score_after(wide, norm, proj, 1e-5), -1)
        return _norm((weights.unsqueeze(axis) * wide).sum(1), out_norm, 1e-5)

    width = 4
    rest = [rows(width, seed=i) for i in range(3)]
    args = [rows(M, width, seed=i) for i in range(width)]
    assert len(found(trace(f, *args, *rest, level=level), AttnRes)) == expected


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("axis", "expected"), [(1, 1), (0, 0), (2, 0)])
def test_rows_stacked_along_another_axis(axis: int, expected: int, level: str) -> None:
    """Reshaped to [M, S, H], such a stack holds the same numbers in other places."""

    def f(*t: Tensor) -> Tensor:
        a, b, prefix, norm, proj, out_norm = t
        sources = torch.stack([a, b, prefix], axis).reshape(M, 3, H)
        return _norm(mix(sources, norm, proj, 1e-5, score_after), out_norm, 1e-5)

    assert len(found(trace(f, *inputs(1), level=level), AttnRes)) == expected


@pytest.mark.parametrize(("axis", "expected"), [(1, 1), (-2, 1), (0, 0)])
def test_rows_joined_along_another_axis(axis: int, expected: int) -> None:
    def f(*t: Tensor) -> Tensor:
        a, b, prefix, norm, proj, out_norm = t
        sources = torch.cat([r.unsqueeze(1) for r in (a, b, prefix)], axis).reshape(M, 3, H)
        return _norm(mix(sources, norm, proj, 1e-5, score_after), out_norm, 1e-5)

    assert len(found(trace(f, *inputs(1)), AttnRes)) == expected


def test_a_bank_read_from_its_second_slot_is_refused() -> None:
    def f(start: int, prefix: Tensor, bank: Tensor, *w: Tensor) -> Tensor:
        sources = torch.cat([bank[:, start : start + 2], prefix.unsqueeze(1)], 1)
        return _norm(mix(sources, w[0], w[1], 1e-5, score_after), w[2], 1e-5)

    args = [rows(M, H), rows(M, SLOTS, H), *(rows(H, seed=i) for i in range(3))]
    assert refused(trace(lambda *t: f(1, *t), *args), AttnRes) == ["OP_MISMATCH"]
    assert len(found(trace(lambda *t: f(0, *t), *args), AttnRes)) == 1


# --- the custom op ------------------------------------------------------------------------------


def _custom(
    h: Hand, version: int, eps: float = 1e-5, write: int = -1, **over: Any
) -> dict[str, fx.Node]:
    stock_ops()
    op = torch.ops._C.kimi_k3_attn_res.default
    n = {
        "prefix": h.input("prefix", M, H),
        "delta": h.input("delta", M, H),
        "blocks": h.input("blocks", M, SLOTS, H),
        "norm_weight": h.input("norm", H),
        "qk_weight": h.input("qk", 1, H),
        "output_norm_weight": h.input("out_norm", H),
    }
    n["output"] = h.call(
        aten.empty.memory_format, [M, H], dtype=BF16, device="cpu", pin_memory=False
    )
    given: dict[str, Any] = {
        "delta": n["delta"],
        "norm_weight": n["norm_weight"],
        "qk_weight": n["qk_weight"],
        "output_norm_weight": n["output_norm_weight"],
        "num_blocks": 2,
        "block_write_idx": write,
        "eps": eps,
        "output_norm_eps": eps,
        **over,
    }
    written = ["prefix", "blocks", "output"]
    if version == 1:
        given |= {name: n[name] for name in written}
        call = h.graph.call_function(auto_functionalized, (op,), given)
    else:
        given |= {f"_{name}_base_index": i for i, name in enumerate(written)}
        given["_all_bases"] = [n[name] for name in written]
        call = h.graph.call_function(auto_functionalized_v2, (op,), given)
    call.meta["val"] = (None, *(n[name].meta["val"] for name in written))
    n["call"] = call
    return n


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("eps", EPS)
def test_the_custom_op(version: int, eps: float) -> None:
    h = Hand()
    n = _custom(h, version, eps, write=1)
    prefix, blocks, out = (h.item(n["call"], i) for i in (1, 2, 3))
    (read,) = found(h.view(prefix, blocks, out), AttnRes)
    assert (read.prefix, read.delta, read.blocks) == (n["prefix"], n["delta"], (n["blocks"],))
    assert (read.score_norm_weight, read.score_proj_weight) == (n["norm_weight"], n["qk_weight"])
    assert read.out_norm_weight is n["output_norm_weight"]
    assert (read.num_blocks, read.block_write) == (2, 1)
    assert (read.eps, read.out_eps, read.custom, read.round_mix) == (eps, eps, True, False)
    assert (read.out, read.new_prefix, read.blocks_out) == (out, prefix, blocks)


@pytest.mark.parametrize("version", [1, 2])
def test_none_spelled_out_and_results_nobody_reads(version: int) -> None:
    h = Hand()
    n = _custom(h, version, delta=None, output_norm_weight=None)
    out = h.item(n["call"], 3)
    (read,) = found(h.view(out), AttnRes)
    assert (read.delta, read.out_norm_weight) == (None, None)
    assert (read.new_prefix, read.blocks_out, read.out) == (None, None, out)


@pytest.mark.parametrize("version", [1, 2])
def test_a_call_whose_result_nobody_reads_is_none(version: int) -> None:
    h = Hand()
    n = _custom(h, version)
    assert found(h.view(h.item(n["call"], 1)), AttnRes) == []


@pytest.mark.parametrize("version", [1, 2])
def test_functionalised_results_by_argument(version: int) -> None:
    h = Hand()
    n = _custom(h, version)
    out = h.item(n["call"], 3)
    (call,) = found(h.view(out), FunctionalizedCall)
    assert call.name == "_C.kimi_k3_attn_res"
    assert call.results == {"prefix": None, "blocks": None, "output": out}
    assert [result_index(call.node, a) for a in ("prefix", "blocks", "output")] == [1, 2, 3]
    assert call.args["num_blocks"] == 2
    assert call.args["output"] is n["output"]


@pytest.mark.parametrize(("partial", "codes"), [(True, ["ALIAS_RISK"]), (False, [])])
def test_a_write_through_a_part_of_a_base_is_refused(partial: bool, codes: list[str]) -> None:
    h = Hand()
    over = {"_prefix_size": [M, H], "_prefix_stride": [2 * H, 1], "_prefix_storage_offset": 0}
    n = _custom(h, 2, **(over if partial else {}))
    view = h.view(h.item(n["call"], 3))
    assert refused(view, FunctionalizedCall) == codes
    assert len(found(view, AttnRes)) == (0 if partial else 1)


def test_another_mutable_op_is_none() -> None:
    stock_ops()
    h = Hand()
    x, out = h.input("x", M, 2 * H), h.input("out", M, H)
    op = torch.ops._C.silu_and_mul.default
    call = h.graph.call_function(auto_functionalized, (op,), {"result": out, "input": x})
    call.meta["val"] = (None, out.meta["val"])
    view = h.view(h.item(call, 1))
    assert found(view, AttnRes) == []
    assert len(found(view, FunctionalizedCall)) == 1
