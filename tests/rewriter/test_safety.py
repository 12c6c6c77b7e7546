"""What forbids a replacement: outside readers, writes in between, aliases, paths that come back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from build import Hand, aten, compiled_graphs, identity, rows, run
from k3fuse.rewriter import safety
from k3fuse.rewriter.site import Site
from k3fuse.rewriter.view import GraphView

M, K, H = 4, 16, 32
Nodes = dict[str, fx.Node]


def projection(h: Hand) -> Nodes:
    """o-proj, add, RMSNorm at one rank: a site of the reference target."""
    return {
        "x": h.input("x", M, K), "w": h.input("w", H, K), "residual": h.input("residual", M, H),
        "norm": h.input("norm", H), "other": h.input("other", M, H),
    }  # fmt: skip


def body(h: Hand, n: Nodes) -> Nodes:
    n["y"] = h.call(aten.mm.default, n["x"], h.call(aten.t.default, n["w"]))
    n["sum"] = h.call(aten.add.Tensor, n["y"], n["residual"])
    n["out"] = h.call(aten.rms_norm.default, n["sum"], [H], n["norm"], 1e-5)
    return n


def outcome(module: fx.GraphModule) -> list[str]:
    """Codes of the one output projection; [] where it was replaced."""
    before = identity(module)
    report = run(module)
    (site,) = [s for s in report.sites if s.pattern == "output_projection"]
    if site.outcome == "refused":
        assert identity(module) == before
    return [r.code.value for r in site.reasons]


# --- intermediates read outside -----------------------------------------------------------------


@pytest.mark.parametrize("reader", ["nobody", "another node", "the output", "a view of it"])
@pytest.mark.parametrize("value", ["y", "sum", "out"])
def test_who_reads_what(value: str, reader: str) -> None:
    h = Hand()
    n = body(h, projection(h))
    results = [n["out"], n["sum"]]
    if reader == "another node":
        results.append(h.call(aten.relu.default, n[value]))
    elif reader == "the output":
        results.append(n[value])
    elif reader == "a view of it":
        results.append(h.call(aten.relu.default, h.call(aten.view.default, n[value], [M * H])))
    inner = value == "y" and reader != "nobody"
    assert outcome(h.done(*results)) == (["USER_ESCAPES"] if inner else [])


def test_an_escape_names_the_value_and_its_reader() -> None:
    h = Hand()
    n = body(h, projection(h))
    outside = h.call(aten.relu.default, n["y"])
    report = run(h.done(n["out"], outside))
    (site,) = [s for s in report.sites if s.pattern == "output_projection"]
    (reason,) = site.reasons
    assert reason.nodes == (n["y"].name, outside.name)
    assert n["y"].name in reason.sentence


def test_a_shared_view_of_a_weight_stays_for_its_other_reader() -> None:
    h = Hand()
    n = body(h, projection(h))
    view = n["y"].args[1]
    again = h.call(aten.mm.default, h.call(aten.relu.default, n["x"]), view)
    module = h.done(n["out"], again)
    assert outcome(module) == []
    assert aten.t.default in [m.target for m in module.graph.nodes]


# --- writes -------------------------------------------------------------------------------------

Write = Callable[[Hand, Nodes], fx.Node]
WRITES: dict[str, Write] = {
    "copy into the residual": lambda h, n: h.call(aten.copy_.default, n["residual"], n["other"]),
    "add to x": lambda h, n: h.call(aten.add_.Tensor, n["x"], 1),
    "a view of the residual": lambda h, n: h.call(
        aten.add_.Tensor, h.call(aten.slice.Tensor, n["residual"], 0, 0, 2), 1
    ),
    "fill the norm weight": lambda h, n: h.call(aten.fill_.Scalar, n["norm"], 1.0),
    "another tensor": lambda h, n: h.call(aten.add_.Tensor, n["other"], 1),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_between_reads(write: str) -> None:
    h = Hand()
    n = projection(h)
    n["y"] = h.call(aten.mm.default, n["x"], h.call(aten.t.default, n["w"]))
    written = WRITES[write](h, n)
    n["sum"] = h.call(aten.add.Tensor, n["y"], n["residual"])
    n["out"] = h.call(aten.rms_norm.default, n["sum"], [H], n["norm"], 1e-5)
    harmless = write == "another tensor"
    assert outcome(h.done(n["out"], written)) == ([] if harmless else ["MUTATION_BETWEEN"])


def values_agree(module: fx.GraphModule, inputs: list[Tensor]) -> bool:
    """Run original and rewritten on equal inputs; also every input afterwards must be equal."""
    import copy

    original = copy.deepcopy(module)
    assert run(module).found, "nothing was rewritten"
    first, second = ([t.clone() for t in inputs] for _ in range(2))
    got, wanted = module(*first), original(*second)
    return all(
        torch.allclose(a.float(), b.float(), rtol=0.02, atol=0.02)
        for a, b in zip([*got, *first], [*wanted, *second], strict=True)
    )


def real_inputs() -> list[Tensor]:
    return [rows(M, K), rows(H, K), rows(M, H), rows(H, seed=1), rows(M, H, seed=2)]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_before_or_after_the_whole_site_keeps_its_place(write: str, when: str) -> None:
    """Replaced or refused: the values are those of the original, the written inputs too."""
    h = Hand()
    n = projection(h)
    if when == "before":
        WRITES[write](h, n)
    body(h, n)
    if when == "after":
        WRITES[write](h, n)
    module = h.done(n["out"], n["sum"])
    assert values_agree(module, real_inputs())


def test_a_write_into_the_sites_own_values_is_an_alias() -> None:
    for own in (True, False):
        h = Hand()
        n = body(h, projection(h))
        written = h.call(aten.add_.Tensor, n["sum"] if own else n["other"], 1)
        assert outcome(h.done(n["out"], written)) == (["ALIAS_RISK"] if own else [])


def test_a_write_through_a_view_of_the_sites_own_values_is_an_alias() -> None:
    h = Hand()
    n = body(h, projection(h))
    part = h.call(aten.select.int, h.call(aten.view.default, n["sum"], [2, 2, H]), 0, 0)
    written = h.call(aten.mul_.Tensor, part, 2)
    assert outcome(h.done(n["out"], written)) == ["ALIAS_RISK"]


# --- shape of the site --------------------------------------------------------------------------


def two_ended(feedback: bool) -> tuple[GraphView, Site]:
    """A site of two products whose second operand may depend on its first output."""
    h = Hand()
    a, b = h.input("a", M, H), h.input("b", M, H)
    first = h.call(aten.mul.Tensor, a, 2.0)
    between = h.call(aten.relu.default, h.call(aten.sin.default, first if feedback else b))
    second = h.call(aten.mul.Tensor, between, 3.0)
    view = h.view(second, h.call(aten.neg.default, first))
    operands = {"a": a, "b": between}
    return view, Site("test", "", first, (first, second), operands, (first, second), {})


@pytest.mark.parametrize(("feedback", "codes"), [(True, ["INTERPOSED_OP"]), (False, [])])
def test_an_operand_computed_from_the_sites_output(feedback: bool, codes: list[str]) -> None:
    view, site = two_ended(feedback)
    assert [r.code.value for r in safety.check(site, view)] == codes


@pytest.mark.parametrize("lost", ["operand", "output", "nothing"])
def test_a_value_without_fake_tensor(lost: str) -> None:
    view, site = two_ended(feedback=False)
    if lost != "nothing":
        node = site.operand_nodes()[0] if lost == "operand" else site.outputs[0]
        del node.meta["val"]
    codes = [r.code.value for r in safety.check(site, view)]
    assert codes == ([] if lost == "nothing" else ["META_MISSING"])


@pytest.mark.parametrize("write", [False, True])
def test_a_reader_that_must_move_does_not_pass_a_write(write: bool) -> None:
    """relu reads the first output above the last operand; behind it something is written."""
    h = Hand()
    a, b, other = h.input("a", M, H), h.input("b", M, H), h.input("other", M, H)
    first = h.call(aten.mul.Tensor, a, 2.0)
    reader = h.call(aten.add.Tensor, first, other)
    written = h.call(aten.mul_.Tensor, other, 2.0) if write else other
    last = h.call(aten.sin.default, b)
    second = h.call(aten.mul.Tensor, last, 3.0)
    view = h.view(reader, second, written)
    site = Site("test", "", first, (first, second), {"a": a, "b": last}, (first, second), {})
    codes = [r.code.value for r in safety.check(site, view)]
    assert codes == (["MUTATION_BETWEEN"] if write else [])


def test_a_traced_cache_write_outside_the_site_is_harmless() -> None:
    """The usual decode graph: functional, with copies into the inputs at the end."""

    def step(x: Tensor, w: Tensor, residual: Tensor, norm: Tensor, cache: Tensor) -> Tensor:
        total = x @ w.t() + residual
        cache.copy_(total)
        return torch.rms_norm(total, [H], norm, 1e-5)

    (module,) = compiled_graphs(step, *real_inputs(), keep_writes=True)
    assert any(m.target is aten.copy_.default for m in module.graph.nodes)
    report = run(module)
    assert [s.outcome for s in report.sites if s.pattern == "output_projection"] == ["found"]
