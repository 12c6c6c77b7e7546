"""Every graph that was once rewritten to other values, or once crashed the rewrite, by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from build import Hand, aten, run
from check import FAMILIES, examine, groups, healthy, made
from draw import declared, spelled
from k3fuse.rewriter.canonical import op_of

BF16 = torch.bfloat16
Case = tuple[str, dict[str, Any], str]

# name -> family, knobs, and what has to come of it: a code, or "rewritten" (to equal values).
WRONG_VALUES: dict[str, Case] = {
    "a weight transposed in two blocks": ("o_add_norm", {"linear": "blocks"}, "OP_MISMATCH"),
    "a latent weight transposed in two blocks": (
        "router", {"linear": "blocks", "latent": True}, "rewritten",
    ),
    "a mix followed by a norm without weight": (
        "attn_res", {"norm_weightless": True, "no_out_norm": False, "round_mix": False},
        "OP_MISMATCH",
    ),
    "a latent norm without weight": (
        "experts", {"norm_weightless": True, "norm_how": "wide"}, "OP_MISMATCH",
    ),
    "weights renormalised over pairs of tokens": ("router", {"renorm": "pairs"}, "rewritten"),
    "weights renormalised over half of the slots": ("router", {"renorm": "halves"}, "rewritten"),
    "weights gathered from pairs of tokens": ("router", {"weights": "pairs"}, "ANCHOR_ABSENT"),
    "half of the tokens as the gate": (
        "experts", {"shared": True, "merged": True, "shared_tokens": True}, "OP_MISMATCH",
    ),
    "a shared expert of another beta": (
        "experts", {"experts": "mx", "shared": True, "shared_beta": 2.5}, "ATTR_MISMATCH",
    ),
    "a shared expert of another linear beta": (
        "experts", {"experts": "mx", "shared": True, "shared_linear_beta": 4.0}, "ATTR_MISMATCH",
    ),
    "a shared expert of another activation": (
        "experts", {"experts": "mx", "shared": True, "shared_activation": "silu"},
        "ATTR_MISMATCH",
    ),
    "a projected row added to itself": (
        "o_attn_res", {"sum": "a + a", "write": False}, "OP_MISMATCH",
    ),
    "scores rounded before the selection": (
        "router", {"logits": "rounded scores", "weights_dtype": (BF16,)}, "DTYPE_MISMATCH",
    ),
    "a correction bias rounded in the graph": ("router", {"bias": "rounded"}, "rewritten"),
    "a norm weight rounded in the graph": (
        "o_add_norm", {"norm_how": "weight rounded", "norm_dtype": torch.float32}, "rewritten",
    ),
    "a square shared weight read untransposed": (
        "experts", {"square_shared": True, "down_linear": "untransposed", "shared": True},
        "STRIDE_OR_ALIGN",
    ),
}  # fmt: skip
CRASHES: dict[str, Case] = {
    "a norm of half rows before attention": (
        "attn_res", {"norm_groups": 2, "no_out_norm": False, "round_mix": False}, "OP_MISMATCH",
    ),
    "a norm of half rows behind a sum": ("o_add_norm", {"norm_groups": 2}, "OP_MISMATCH"),
    "a norm of half latent rows": ("experts", {"norm_groups": 2}, "OP_MISMATCH"),
    "a bias of each token": ("router", {"bias": "token"}, "SHAPE_MISMATCH"),
    "a bias with a leading one": ("router", {"bias": "row"}, "rewritten"),
    "logits read in another grouping": (
        "router", {"logits_view": True, "bias": "none", "groups": 0}, "SHAPE_MISMATCH",
    ),
    "rows of three dimensions": ("router", {"logits": "paired"}, "SHAPE_MISMATCH"),
    "a batch of one matrix": (
        "o_add_norm", {"linear": "bmm", "between": "nothing"}, "OP_MISMATCH",
    ),
    "a prefix in another layout": (
        "o_attn_res", {"between": "contiguous", "write": False}, "STRIDE_OR_ALIGN",
    ),
    "routing weights flipped": (
        "experts", {"experts": "mx", "combine": "flipped weights"}, "SHAPE_MISMATCH",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _groups() -> None:
    groups()


@pytest.mark.parametrize("name", WRONG_VALUES | CRASHES)
def test_it_is_refused_or_keeps_its_values(name: str) -> None:
    family, knobs, expected = (WRONG_VALUES | CRASHES)[name]
    for seed in (0, 1):
        graph = spelled(family, knobs, seed)
        verdict = examine(graph, composed=seed == 1)
        assert verdict.fault == "", graph.text()
        if expected == "rewritten":
            assert verdict.outcome == "rewritten", graph.text()
        else:
            assert verdict.outcome != "rewritten", graph.text()
            assert verdict.codes <= {expected}, graph.text()
        # The control: without the defect the very same module is taken.
        assert examine(spelled(family, {}, seed)).outcome == "rewritten"


def test_two_sites_that_read_each_other_are_not_both_taken() -> None:
    """Each is one node without the other; both would be a cycle."""
    for crossed, taken in (("no", 2), ("one", 2), ("both", 1)):
        graph = spelled("two_blocks", {"crossed": crossed}, 3)
        assert examine(graph).fault == ""
        module, _ = made(graph)
        sites = [s for s in run(module).sites if s.pattern == "output_projection"]
        assert sum(s.outcome == "found" for s in sites) == taken, crossed
        codes = [r.code.value for s in sites for r in s.reasons]
        assert codes == (["INTERPOSED_OP"] if crossed == "both" else [])
        module.graph.lint()


@pytest.mark.parametrize("swapped", [False, True])
def test_a_mask_that_keeps_one_number_is_no_group_mask(swapped: bool) -> None:
    """where(chosen, keys, -inf): a number stands where the scores are read from."""
    graph = replace(spelled("router", {"groups": 1}), level="inductor")
    module, _ = made(graph)
    (where,) = module.graph.find_nodes(op="call_function", target=aten.where.self)
    if swapped:
        mask, number, keys = where.args
        where.args = (mask, keys, number)
    report = run(module)
    codes = {r.code.value for s in report.sites for r in s.reasons}
    codes |= {n.reason.code.value for n in report.near if n.pattern == "router"}
    assert report.counts()["router"].found == (0 if swapped else 1)
    assert codes == ({"ATTR_MISMATCH"} if swapped else set())


@pytest.mark.parametrize("written", [False, True])
def test_a_copy_that_the_site_reads_is_not_the_original_written_since(written: bool) -> None:
    """stack([clone(block), prefix]): the op would read the block itself, after the write."""
    h = Hand()
    block, prefix, other = (h.input(n, 4, 32) for n in ("block", "prefix", "other"))
    weights = [h.input(n, 32) for n in ("norm", "proj", "out")]
    kept = h.call(aten.clone.default, block)
    h.call(aten.add_.Tensor, block if written else other, 1)
    wide = h.call(
        aten._to_copy.default, h.call(aten.stack.default, [kept, prefix], 1), dtype=torch.float32
    )
    square = h.call(aten.pow.Tensor_Scalar, wide, 2)
    scale = h.call(
        aten.rsqrt.default, h.call(aten.add.Tensor, h.call(aten.mean.dim, square, [-1]), 1e-5)
    )
    floats = [h.call(aten._to_copy.default, w, dtype=torch.float32) for w in weights]
    weighted = h.call(aten.mul.Tensor, wide, h.call(aten.mul.Tensor, floats[0], floats[1]))
    score = h.call(aten.mul.Tensor, h.call(aten.sum.dim_IntList, weighted, [-1]), scale)
    share = h.call(aten.unsqueeze.default, h.call(aten._softmax.default, score, -1, False), -1)
    mixed = h.call(aten.sum.dim_IntList, h.call(aten.mul.Tensor, share, wide), [1])
    out = h.call(aten._to_copy.default, mixed, dtype=BF16)
    module = h.done(out, h.call(aten.relu.default, kept))
    (site,) = [s for s in run(module).sites if s.pattern == "attn_res"]
    codes = [r.code.value for r in site.reasons]
    assert codes == (["MUTATION_BETWEEN"] if written else [])


def test_a_collective_in_place_keeps_its_operand_reduced() -> None:
    """all_reduce_ writes a value that others read: the site would leave it unreduced."""
    for read_elsewhere in (False, True):
        h = Hand()
        routed, shared = h.input("routed", 4, 32), h.input("shared", 4, 64)
        norm, up = h.input("norm", 32), h.input("up", 64, 32)
        op = torch.ops._c10d_functional
        name = "all_reduce_" if read_elsewhere else "all_reduce"
        reduce = getattr(op, name).default
        wait = h.call(op.wait_tensor.default, h.call(reduce, routed, "sum", groups()[0]))
        other = h.call(
            op.wait_tensor.default, h.call(op.all_reduce.default, shared, "sum", groups()[0])
        )
        from k3fuse.patterns.latent_tail import read_tail
        from k3fuse.rewriter import safety
        from k3fuse.rewriter.site import Site

        row = h.call(aten.rms_norm.default, wait, [32], norm, 1e-5)
        y = h.call(aten.mm.default, row, h.call(aten.t.default, up))
        view = h.view(h.call(aten.add.Tensor, y, other), h.call(aten.relu.default, routed))
        found = read_tail(view, routed)
        assert found is not None
        nodes = tuple(sorted(set(found.nodes), key=view.index.__getitem__))
        site = Site(
            "experts", "", found.out, nodes, {"routed": routed, "shared": shared}, (found.out,), {}
        )
        codes = [r.code.value for r in safety.check(site, view)]
        assert codes == (["ALIAS_RISK"] if read_elsewhere else [])


def test_a_sum_stored_in_another_shape_is_looked_through() -> None:
    """The residual as [1, M, H]: the site is taken, its values stay."""
    verdict = examine(spelled("o_add_norm", {"residual_3d": True, "norm_how": "wide"}, 5))
    assert (verdict.outcome, verdict.fault) == ("rewritten", "")


def test_healthy_modules_are_what_the_families_say() -> None:
    import random

    for family in FAMILIES:
        knobs, level = healthy(family, random.Random(0))
        assert set(knobs) >= set(FAMILIES[family].healthy)
        assert level
    assert op_of(made(declared("router", 0, ()))[0].graph.find_nodes(op="output")[0]) == "output"
