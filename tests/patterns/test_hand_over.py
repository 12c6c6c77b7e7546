"""The router and the experts of a layer take the forms with the hand-over together, or neither."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from build import BF16, FP32, LEVELS, identity, rows, run, trace
from k3fuse.kernels.common.policy import Table
from k3fuse.kernels.router import reference
from k3fuse.patterns.hand_over import Taken
from k3fuse.patterns.models.mx import mxfp4_dequantise, mxfp8_round
from k3fuse.rewriter import links
from k3fuse.rewriter.edit import EditError, Editor
from k3fuse.rewriter.reasons import Code, Reason
from k3fuse.rewriter.report import Report
from k3fuse.rewriter.site import Site
from k3fuse.rewriter.view import GraphView
from tolerances import assert_close

M, H, L, I, S, E, TOP = 3, 64, 32, 32, 48, 16, 4  # noqa: E741
BETAS = 4.0, 25.0
ALONE = {"router": "router + latent", "experts": "mxfp4 mx_gathered + shared"}
JOINED = {"router": "router + latent + shared", "experts": "mxfp4 mx_gathered + shared row"}


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    g, u = gate.float(), up.float()
    gated = beta * torch.tanh(g / beta) * torch.sigmoid(g)
    return gated * (linear_beta * torch.tanh(u / linear_beta))


@dataclass(frozen=True)
class Spelling:
    """How a block differs from the plain one."""

    merged: bool = True
    row: str = "same"  # what gate and up read
    betas: tuple[float, float] = BETAS
    latent: str = "same"  # what the experts read
    ids: str = "same"
    weights: str = "same"
    read: str = "nobody"  # who else reads the shared hidden row
    edit: bool = False  # whether gate and up are written between the router and their use
    packed: bool = True


def inputs() -> list[Tensor]:
    """x, gate, bias, latent; w13, w2 and scales; shared gate, up and down; norm, up; another x."""
    made = torch.Generator().manual_seed(3)

    def codes(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=made).to(torch.uint8)

    def weight(n: int, k: int, seed: int) -> Tensor:
        return (rows(n, k, seed=seed).float() * k**-0.5).to(BF16)

    return [
        rows(M, H), weight(E, H, 1), 0.1 * rows(E, dtype=FP32), weight(L, H, 2),
        codes(0, 256, E, 2 * I, L // 2), codes(122, 125, E, 2 * I, L // 32),
        codes(0, 256, E, L, I // 2), codes(122, 125, E, L, I // 32),
        weight(2 * S, H, 3), weight(H, S, 4), rows(L, seed=5), weight(H, L, 6), rows(M, H, seed=7),
    ]  # fmt: skip


def block(how: Spelling) -> Callable[..., tuple[Tensor, ...]]:
    """A MoE block: router, experts, shared expert, tail."""

    def f(
        x: Tensor, gate: Tensor, bias: Tensor, down_latent: Tensor, w13: Tensor, s13: Tensor,
        w2: Tensor, s2: Tensor, gate_up: Tensor, down: Tensor, norm: Tensor, up: Tensor,
        other: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        score = torch.sigmoid(x.float() @ gate.float().t())
        ids = torch.topk(score + bias, TOP)[1]
        chosen = score.gather(-1, ids)
        weights = (chosen / (chosen.sum(-1, keepdim=True) + 1e-20)).to(BF16)
        latent = F.linear(other if how.latent == "of another row" else x, down_latent)
        read = latent + 1 if how.latent == "plus one" else latent
        used = (ids + 1) % E if how.ids == "the next" else ids
        factors = weights * 2 if how.weights == "doubled" else weights
        one = mxfp4_dequantise(w13[used], s13[used])
        two = mxfp4_dequantise(w2[used], s2[used])
        both = torch.bmm(one.flatten(1, 2), mxfp8_round(read).unsqueeze(-1)).view(M, TOP, 2 * I)
        inner = mxfp8_round(situ(both[:, :, :I], both[:, :, I:], *BETAS))
        slots = torch.bmm(two.flatten(0, 1), inner.view(-1, I, 1)).view(M, TOP, L).to(BF16)
        total = (slots.float() * factors.float().unsqueeze(-1)).sum(1).to(BF16)
        source = {"same": x, "other": other, "rolled": x.roll(1, 0)}[how.row]
        if how.merged:
            z = F.linear(source, gate_up)
            g, u = z[:, :S], z[:, S:]
        else:
            g, u = F.linear(source, gate_up[:S]), F.linear(source, gate_up[S:])
        mid = situ(g, u, *how.betas).to(BF16)
        shared = F.linear(mid, down)
        wide = total.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * norm.float()
        out = F.linear(normed.to(BF16), up) + shared
        extra = {"nobody": [], "mid": [mid.sum(0)], "gate": [g.sum(0)]}[how.read]
        return (out, *extra, weights, ids)

    return f


def judged(
    how: Spelling = Spelling(), level: str = "aot", **options: Any
) -> tuple[Report, fx.GraphModule]:
    """Rewrite for the reference; values of the rewritten graph are the original's."""
    given = inputs()
    module = trace(block(how), *given, level=level)
    wanted = copy.deepcopy(module)(*given)
    report = run(module, **options)
    for composed in (False, True):
        with (
            mock.patch.object(Table, "lookup", return_value=None) if composed else mock.MagicMock()
        ):
            got = module(*given)
        for mine, original in zip(got, wanted, strict=True):
            if original.dtype == torch.int64:
                assert torch.equal(mine, original)
            else:
                assert_close(mine, original, k=H, roundings=6)
    return report, module


def forms(report: Report) -> dict[str, str]:
    """Forms of the accepted sites."""
    return {s.pattern: s.form for s in report.found}


def calls(module: fx.GraphModule) -> dict[str, fx.Node]:
    """Calls of fused ops by name."""
    fused = [n for n in module.graph.nodes if str(n.target).startswith("k3fuse.")]
    return {str(n.target).split(".")[1]: n for n in fused}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("merged", [True, False])
def test_the_router_makes_what_the_experts_read(merged: bool, level: str) -> None:
    report, module = judged(Spelling(merged=merged), level)
    assert forms(report) == JOINED
    router, experts = calls(module)["router"], calls(module)["experts"]
    made = {n: i for n in router.users for i in n.args[1:]}
    assert [made.get(a) for a in experts.args[17:]] == [3, 4, 5]
    assert experts.args[7:9] == (None, [])
    assert router.kwargs["quantize"] is True
    assert sorted(made.values()) == [0, 1, 2, 3, 4, 5]
    compute = [n for n in module.graph.nodes if str(n.target).startswith("aten.")]
    views = ("aten.slice.Tensor", "aten.split.Tensor", "aten.clone.default")
    assert all(str(n.target) in views for n in compute), compute
    assert all("hidden row" in s.notes[0] for s in report.found)


def test_with_values_checked() -> None:
    report, _ = judged(validate="values")
    assert forms(report) == JOINED
    assert report.value_runs == {"sites": 2, "runs": 2, "kept": 2}


DIFFERENT = {
    "another row": Spelling(row="other"),
    "the row of other tokens": Spelling(row="rolled"),
    "another latent": Spelling(latent="plus one"),
    "other experts": Spelling(ids="the next"),
    "other weights": Spelling(weights="doubled"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_sites_of_different_rows_stay_alone(what: str) -> None:
    report, module = judged(DIFFERENT[what])
    assert forms(report) == ALONE
    assert calls(module)["router"].kwargs.get("quantize", False) is False
    assert len(calls(module)["experts"].args) == 17
    assert forms(judged()[0]) == JOINED  # the control


@pytest.mark.parametrize(
    ("how", "code"),
    [
        (Spelling(betas=(4.0, 24.0)), "ATTR_MISMATCH"),
        (Spelling(betas=(3.0, 25.0)), "ATTR_MISMATCH"),
        (Spelling(read="mid"), "USER_ESCAPES"),
        (Spelling(read="gate"), "USER_ESCAPES"),
    ],
)
def test_refused_experts_leave_the_router_as_it_was(how: Spelling, code: str) -> None:
    report, module = judged(how)
    assert forms(report) == {"router": ALONE["router"]}
    (site,) = [s for s in report.sites if s.pattern == "experts"]
    assert [r.code.value for r in site.reasons] == [code]
    assert calls(module)["router"].kwargs.get("quantize", False) is False


@pytest.mark.parametrize("off", ["router", "experts"])
def test_either_may_be_turned_off(off: str) -> None:
    report, module = judged(disable=(off,))
    left = {"router": "experts", "experts": "router"}[off]
    assert forms(report) == {left: ALONE[left]}
    assert set(calls(module)) == {left}


def written_between(module: fx.GraphModule) -> None:
    """Write gate and up in place, behind the router and before they are read."""
    (weight,) = [n for n in module.graph.nodes if n.name.startswith("gate_up")]
    first = min(weight.users)
    with module.graph.inserting_before(first):
        call = module.graph.call_function(torch.ops.aten.mul_.Tensor, (weight, 2.0))
        call.meta["val"] = weight.meta["val"]
    module.recompile()


@pytest.mark.parametrize("edit", [False, True])
def test_weights_written_between_are_read_behind_the_write(edit: bool) -> None:
    """The router would read them too early; the experts alone stand behind the write."""
    given = inputs()
    module = trace(block(Spelling()), *given)
    if edit:
        written_between(module)
    wanted = copy.deepcopy(module)(*[t.clone() for t in given])
    report = run(module)
    for mine, original in zip(module(*given), wanted, strict=True):
        assert_close(mine.float(), original.float(), k=H, roundings=6)
    assert ("shared" in forms(report)["router"]) is not edit


def refusing(pattern: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """An editor's method that refuses the joined form of one pattern."""

    def method(editor: Editor, site: Site, planned: Any) -> Any:
        if site.pattern == pattern and site.form == JOINED[pattern]:
            raise EditError(Reason(Code.STRIDE_OR_ALIGN, "refused here", (site.anchor.name,)))
        return real(editor, site, planned)

    return method


@pytest.mark.parametrize("pattern", ["router", "experts"])
def test_a_form_that_cannot_be_planned_parts_both(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Editor, "check", refusing(pattern, Editor.check))
    report, module = judged()
    assert forms(report) == ALONE
    assert set(calls(module)) == {"router", "experts"}
    assert all("apart from" in s.parted[-1] for s in report.found)


def test_experts_refused_behind_the_edit_leave_a_router_without_mxfp8(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The shared hidden row is a value of the graph: stock nodes read it."""
    monkeypatch.setattr(Editor, "replace", refusing("experts", Editor.replace))
    report, module = judged()
    assert forms(report) == {"router": JOINED["router"]}
    (router,) = calls(module).values()
    assert router.kwargs["quantize"] is False
    assert len(router.meta["val"]) == 4


def test_a_router_refused_behind_the_plan_takes_the_experts_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Editor, "replace", refusing("router", Editor.replace))
    report, module = judged()
    assert forms(report) == {}
    assert calls(module) == {}


@pytest.mark.parametrize("spoilt", ["row", "mxfp8"])
def test_wrong_results_are_found_by_value_and_part_both(
    spoilt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong row shows at the router; wrong MXFP8, which no node of the graph has, downstream."""
    if spoilt == "row":
        real = reference.Shared.__call__
        monkeypatch.setattr(reference.Shared, "__call__", lambda self, x: real(self, x) * 1.1)
    else:
        right = reference.completed

        def wrong(outputs: list[Tensor], quantize: bool, plan: bool, read: bool) -> list[Tensor]:
            made = right(outputs, quantize, plan, read)
            return [*made[:-1], made[-1] + 1] if quantize else made

        monkeypatch.setattr(reference, "completed", wrong)
        monkeypatch.setattr("k3fuse.kernels.router.op.reference.completed", wrong)
    report, _ = judged(validate="values")
    assert forms(report) == ALONE
    assert all("apart from" in s.parted[-1] for s in report.found)


def test_a_rank_that_disagrees_changes_nothing() -> None:
    module = trace(block(Spelling()), *inputs())
    before = identity(module)
    reason = Reason(Code.RANK_DISAGREES, "rank 1 decided otherwise", ())
    from k3fuse.rewriter.engine import rewrite
    from k3fuse.rewriter.options import Options

    options = Options.make({"target": "reference", "log": "off"})
    hashes = []
    report = rewrite(module, options, consent=lambda r: hashes.append(r.site_hash()) or reason)
    assert not report.found
    assert identity(module) == before
    # The forms are part of what the ranks compare.
    alone = run(trace(block(Spelling(row="other")), *inputs()))
    assert alone.site_hash() != hashes[0]


def test_forms_of_a_pair_have_nodes_of_their_own() -> None:
    report, module = judged(dry_run=True)
    assert forms(report) == JOINED
    view = GraphView(module.graph)
    nodes = [n for s in report.found for n in s.nodes if not links.is_plain_view(view, n)]
    assert len(nodes) == len(set(nodes))
    (experts,) = [s for s in report.found if s.pattern == "experts"]
    taken: Taken = experts.facts[3]
    assert [m.index for m in taken.results] == [4, 5]
