"""The AttnRes that reads a layer's delta is done by the experts' op, or stays apart with a note."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from build import BF16, FP32, LEVELS, rows, run, stock_ops, trace
from k3fuse.kernels.attn_res.reference import attn_res
from k3fuse.kernels.common.policy import Table
from k3fuse.kernels.experts import mix as behind
from k3fuse.patterns.sources.kimi_k3 import build
from k3fuse.rewriter.edit import EditError, Editor
from k3fuse.rewriter.reasons import Code, Reason
from k3fuse.rewriter.report import Report
from k3fuse.rewriter.site import Site
from k3fuse.rewriter.sources import SourceRequest
from k3fuse.rewriter.target import Target
from test_hand_over import JOINED, H, M, Spelling, block, calls, forms
from test_hand_over import inputs as block_inputs
from tolerances import assert_close

ROW = JOINED["experts"]
ALONE = {**JOINED, "attn_res": "before attention"}
MIXED = {**JOINED, "experts": f"{ROW} + mix", "attn_res": "before attention in experts"}


@dataclass(frozen=True)
class Behind:
    """How what stands behind the experts differs from the plain AttnRes."""

    total: str = "prefix + delta"
    blocks: str = "two rows"
    prefix: str = "given"
    read: str = "nobody"  # who else reads delta
    final: bool = False
    again: bool = False  # a second AttnRes of the same delta
    write: bool = False  # into the prefix, in place, between delta and the mix


def inputs() -> list[Tensor]:
    """A MoE block's, then prefix, two block rows, score norm, score projection, output norm."""
    vectors = [1 + 0.3 * rows(H, seed=20 + i).float() for i in range(3)]
    return [
        *block_inputs(), *(rows(M, H, seed=10 + i) for i in range(3)),
        *(v.to(BF16) for v in vectors),
    ]  # fmt: skip


def mix(sources: list[Tensor], norm: Tensor, proj: Tensor, out: Tensor, final: bool) -> Tensor:
    wide = torch.stack(sources, 1).float()
    scale = torch.rsqrt(wide.pow(2).mean(-1) + 1e-5)
    score = (wide * (norm.float() * proj.float())).sum(-1) * scale
    mixed = (torch.softmax(score, -1).unsqueeze(-1) * wide).sum(1)
    mixed = mixed.to(BF16).float() if final else mixed
    normed = mixed * torch.rsqrt(mixed.pow(2).mean(-1, keepdim=True) + 1e-6) * out.float()
    return normed.to(BF16)


def layer(how: Behind) -> Callable[..., tuple[Tensor, ...]]:
    """A MoE block and the AttnRes behind it."""

    def f(*given: Tensor) -> tuple[Tensor, ...]:
        prefix, first, second, norm, proj, out = given[-6:]
        delta, *rest = block(Spelling())(*given[:-6])
        before = {
            "given": lambda: prefix,
            "made behind": lambda: prefix * 2,
            "made of delta": lambda: prefix + delta.mean(),
            "delta": lambda: delta,
        }[how.prefix]()
        total = {
            "prefix + delta": lambda: before + delta,
            "delta + prefix": lambda: delta + before,
            "prefix + 2 delta": lambda: before + delta * 2,
            "rolled": lambda: before + delta.roll(1, 0),
            "a view": lambda: before + delta.view(1, M, H).view(M, H),
        }[how.total]()
        blocks = {
            "two rows": [first, second],
            "none": [],
            "delta": [first, delta],
            "with delta": [first, second * delta.mean()],
        }[how.blocks]
        mixed = mix([*blocks, total], norm, proj, out, how.final)
        more = [mix([second, first + delta], proj, norm, out, False)] if how.again else []
        more += [delta] if how.read == "the output" else []
        more += [delta.sum(0)] if how.read == "a sum" else []
        return (mixed, total, *more, *rest)

    return f


def judged(
    how: Behind = Behind(), level: str = "aot", **options: Any
) -> tuple[Report, fx.GraphModule]:
    """Rewrite for the reference; values of the rewritten graph are the original's."""
    given = inputs()
    module = trace(layer(how), *given, level=level)
    if how.write:
        written(module)
    wanted = copy.deepcopy(module)(*[t.clone() for t in given])
    report = run(module, **options)
    for composed in (False, True):
        with (
            mock.patch.object(Table, "lookup", return_value=None) if composed else mock.MagicMock()
        ):
            got = module(*[t.clone() for t in given])
        for mine, original in zip(got, wanted, strict=True):
            if original.dtype == torch.int64:
                assert torch.equal(mine, original)
            else:
                assert_close(mine, original, k=H, roundings=8)
    return report, module


def written(module: fx.GraphModule) -> None:
    """Write the prefix in place, in front of its sum with delta."""
    (prefix,) = [n for n in module.graph.nodes if n.op == "placeholder"][-6:-5]
    (reader,) = prefix.users
    with module.graph.inserting_before(reader):
        call = module.graph.call_function(torch.ops.aten.mul_.Tensor, (prefix, 2.0))
        call.meta["val"] = prefix.meta["val"]
    module.recompile()


def notes(report: Report, pattern: str = "attn_res") -> list[str]:
    return [n for s in report.found if s.pattern == pattern for n in s.parted]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "how",
    [
        Behind(),
        Behind(total="delta + prefix", blocks="none"),
        Behind(total="a view", read="a sum"),
        Behind(prefix="made behind", read="the output"),
        Behind(final=True),
    ],
)
def test_the_op_of_the_experts_does_the_mix(how: Behind, level: str) -> None:
    report, module = judged(how, level)
    attn_res = "final in experts" if how.final else MIXED["attn_res"]
    assert forms(report) == {**MIXED, "attn_res": attn_res}
    assert set(calls(module)) == {"router", "experts"}
    call = calls(module)["experts"]
    assert len(call.args) == 29
    assert call.args[22] == (0 if how.blocks == "none" else 2)
    part = next(s for s in report.found if s.pattern == "attn_res")
    assert part.new_node == call.name
    assert part.kernel is not None
    assert part.kernel.launches == 0
    assert "experts" in part.notes[-1]
    results = {i for n in call.users for i in n.args[1:]}
    assert results == ({0, 1, 2} if how.read != "nobody" else {1, 2})


def test_without_a_hand_over_in_front() -> None:
    report, module = judged(disable=("router",))
    assert forms(report)["experts"] == "mxfp4 mx_gathered + shared + mix"
    assert calls(module)["experts"].args[17:20] == (None, None, None)


def test_mixed_values_are_checked() -> None:
    report, _ = judged(validate="values")
    assert forms(report) == MIXED
    assert report.value_runs == {"sites": 3, "runs": 2, "kept": 3}


APART = {
    "beside delta": Behind(blocks="delta"),
    "computed from the site's output": Behind(prefix="made of delta"),
    "is computed from": Behind(blocks="with delta"),
    "writes": Behind(write=True),
}


@pytest.mark.parametrize("said", APART)
def test_an_attn_res_that_has_to_stay_apart_says_why(said: str) -> None:
    report, module = judged(APART[said])
    assert forms(report) == ALONE
    assert set(calls(module)) == {"router", "experts", "attn_res"}
    for pattern, other in (("attn_res", "experts"), ("experts", "attn_res")):
        (note,) = notes(report, pattern)
        assert note.startswith(f"apart from {other}: ")
        assert said in note
    assert forms(judged()[0]) == MIXED  # the control


@pytest.mark.parametrize("total", ["prefix + 2 delta", "rolled"])
def test_an_attn_res_of_another_row_is_not_proposed(total: str) -> None:
    report, _ = judged(Behind(total=total))
    assert forms(report) == ALONE
    assert notes(report) == []


@pytest.mark.parametrize("m", [8, 9])
def test_the_policy_decides_where_there_are_kernels(m: int) -> None:
    graph = build(SourceRequest(Target.parse("gb300:tp8"), m, 2, "list"))[0]
    report = run(graph.module, "gb300:tp8", plan=True, groups=graph.groups)
    (experts,) = [s for s in report.found if s.pattern == "experts"]
    (final,) = [s for s in report.found if s.pattern == "attn_res" and s.layer is None]
    assert (final.within is experts) == (m != 9)
    assert final.kernel is not None
    assert final.kernel.launches == (1 if m == 9 else 0)
    reason = "needs mixed_tokens <= 8"
    assert [n.startswith(f"apart from experts: {reason}") for n in final.parted] == [True] * (
        m == 9
    )


def test_delta_and_delta_are_no_prefix_and_delta() -> None:
    report, _ = judged(Behind(prefix="delta"))
    assert forms(report) == ALONE
    assert "beside delta" in notes(report)[0]


def test_the_second_attn_res_of_a_delta_stays_apart() -> None:
    report, module = judged(Behind(again=True))
    found = sorted(s.form for s in report.found if s.pattern == "attn_res")
    assert found == ["before attention", "before attention in experts"]
    assert "already" in notes(report)[0]
    assert set(calls(module)) == {"router", "experts", "attn_res"}


def custom(**over: Any) -> fx.GraphModule:
    """The MoE block, then vLLM's op in its functional form; over: arguments that differ."""
    stock_ops()
    given = [*block_inputs(), rows(M, H, seed=10), rows(M, 3, H, seed=11)]
    given += [1 + 0.3 * rows(H, seed=20 + i) for i in range(3)]
    module = trace(lambda *t: block(Spelling())(*t[:-5])[:1], *given)
    graph = module.graph
    prefix, bank, norm, proj, out = [n for n in graph.nodes if n.op == "placeholder"][-5:]
    (end,) = [n for n in graph.nodes if n.op == "output"]
    (delta,) = end.args[0]
    with graph.inserting_before(end):
        wide = graph.call_function(torch.ops.aten._to_copy.default, (prefix,), {"dtype": FP32})
        wide.meta["val"] = prefix.meta["val"].float()
        named = {"delta": delta, "prefix": prefix, "wide": wide}
        read = named[over.pop("prefix", "prefix")]
        empty = graph.call_function(torch.ops.aten.empty_like.default, (read,))
        arguments = {
            "prefix": read, "blocks": bank, "output": empty, "delta": delta, "norm_weight": norm,
            "qk_weight": proj, "output_norm_weight": out, "num_blocks": 2, "block_write_idx": 2,
            "eps": 1e-5, "output_norm_eps": 1e-6,
        }  # fmt: skip
        arguments |= over
        op = torch.ops._C.kimi_k3_attn_res.default
        call = graph.call_function(auto_functionalized, (op,), arguments)
        empty.meta["val"] = arguments["prefix"].meta["val"]
        written = [arguments[n].meta["val"] for n in ("prefix", "blocks", "output")]
        call.meta["val"] = (None, *written)
        parts = [graph.call_function(operator.getitem, (call, i)) for i in (1, 2, 3)]
        for part, value in zip(parts, written, strict=True):
            part.meta["val"] = value
    end.args = ((*parts, delta),)
    module.recompile()
    return module


def test_the_custom_op_that_writes_a_block() -> None:
    module = custom()
    report = run(module)
    assert forms(report) == MIXED
    tensors = [*block_inputs(), rows(M, H, seed=10), rows(M, 3, H, seed=11)]
    tensors += [1 + 0.3 * rows(H, seed=20 + i) for i in range(3)]
    prefix, bank, norm, proj, out = tensors[-5:]
    new, written, mixed, delta = module(*tensors)
    wanted = attn_res(prefix, delta, [bank], 2, norm, proj, out, 1e-5, 1e-6, False)
    assert torch.equal(mixed, wanted[0])
    assert torch.equal(new, wanted[1])
    assert torch.equal(written, torch.cat([bank[:, :2], new[:, None]], 1))


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"prefix": "delta", "delta": None}, "adds it to nothing"),
        ({"prefix": "delta"}, "beside delta"),
        ({"prefix": "wide"}, "the prefix is torch.float32, delta torch.bfloat16"),
    ],
)
def test_a_custom_op_that_has_to_stay_apart(over: dict[str, Any], said: str) -> None:
    report = run(custom(**dict(over)))
    wide = over["prefix"] == "wide"  # which the op of AttnRes refuses, too
    assert forms(report) == (JOINED if wide else ALONE)
    (site,) = [s for s in report.sites if s.pattern == "attn_res"]
    assert said in site.parted[0]


@pytest.mark.parametrize("off", ["experts", "attn_res"])
def test_either_of_the_two_may_be_turned_off(off: str) -> None:
    report, module = judged(disable=(off,))
    assert off not in forms(report)
    assert off not in calls(module)
    assert not any(s.absorbed or s.within for s in report.sites)


def refusing(forbidden: Callable[[Site], bool], real: Callable[..., Any]) -> Callable[..., Any]:
    """An editor's method that refuses some forms."""

    def method(editor: Editor, site: Site, planned: Any) -> Any:
        if forbidden(site):
            raise EditError(Reason(Code.STRIDE_OR_ALIGN, "refused here", (site.anchor.name,)))
        return real(editor, site, planned)

    return method


LINKS = {
    "mix": (lambda s: "+ mix" in s.form, ALONE, "apart from attn_res"),
    "row": (
        lambda s: "row" in s.form,
        {
            "router": "router + latent",
            "experts": "mxfp4 mx_gathered + shared + mix",
            "attn_res": MIXED["attn_res"],
        },
        "apart from router",
    ),
    "both": (
        lambda s: "row" in s.form or "+ mix" in s.form,
        {
            "router": "router + latent",
            "experts": "mxfp4 mx_gathered + shared",
            "attn_res": "before attention",
        },
        "apart from router",
    ),
}


@pytest.mark.parametrize("what", LINKS)
def test_each_link_of_the_chain_parts_on_its_own(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbidden, expected, note = LINKS[what]
    monkeypatch.setattr(Editor, "check", refusing(forbidden, Editor.check))
    report, module = judged()
    assert forms(report) == expected
    (experts,) = [s for s in report.found if s.pattern == "experts"]
    assert len(experts.parted) == (2 if what == "both" else 1)
    assert experts.parted[0] == f"{note}: refused here"
    assert ("attn_res" in calls(module)) == (what != "row")
    assert not any(s.parted for s in judged_before(monkeypatch).found)  # the control


def judged_before(monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.undo()
    return judged()[0]


def test_experts_refused_behind_the_plan_take_the_mix_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All or nothing: neither is replaced, and the router makes no MXFP8 that nobody reads."""
    monkeypatch.setattr(Editor, "replace", refusing(lambda s: "mix" in s.form, Editor.replace))
    report, module = judged()
    assert forms(report) == {"router": JOINED["router"]}
    assert {s.pattern for s in report.sites if s.outcome == "refused"} == {"experts", "attn_res"}
    (router,) = calls(module).values()
    assert router.kwargs["quantize"] is False


def test_a_router_refused_behind_the_plan_takes_the_chain_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Editor, "replace", refusing(lambda s: s.pattern == "router", Editor.replace)
    )
    report, module = judged()
    assert forms(report) == {}
    assert calls(module) == {}


def test_a_wrong_mix_is_found_by_value_and_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    right = behind.meaning

    def wrong(given: Any, delta: Tensor) -> list[Tensor]:
        out, new = right(given, delta)
        return [(out.to(FP32) * 1.1).to(BF16), new]

    monkeypatch.setattr(behind, "meaning", wrong)
    report, _ = judged(validate="values")
    assert forms(report) == ALONE
    assert "differs by" in notes(report)[0]
