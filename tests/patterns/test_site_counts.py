"""Expected sites by formula in the built-in Kimi K3: layers, ranks, tokens and spellings."""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from build import run
from k3fuse.patterns.models.config import KimiK3Config
from k3fuse.patterns.sources.kimi_k3 import FORMS, build
from k3fuse.rewriter.graph_text import graph_text
from k3fuse.rewriter.report import Report
from k3fuse.rewriter.sources import SourceRequest
from k3fuse.rewriter.target import Target


@functools.cache
def rewritten(layers: int, tp: int, m: int | None, form: str = "list", plan: bool = True) -> Report:
    target = f"gb300:tp{tp}"
    graph = build(SourceRequest(Target.parse(target), m, layers, form))[0]
    return run(graph.module, target, plan=plan, groups=graph.groups, expect=graph.expected)


def formula(layers: int) -> dict[str, int]:
    """Counted by hand from the published config: MoE from layer 1, one AttnRes more at the end."""
    return {
        "attention_projection": layers,
        "output_projection": layers,
        "router": layers - 1,
        "experts": layers - 1,
        "attn_res": layers + 1,
    }


def check(report: Report, layers: int) -> None:
    counts = report.counts()
    assert {name: c.found for name, c in counts.items()} == formula(layers)
    assert {name: c.expected for name, c in counts.items()} == formula(layers)
    assert sum(c.near + c.refused for c in counts.values()) == 0, report.reason_lines()
    assert report.missing() == {}


def nightly(*sizes: int) -> object:
    return pytest.param(*sizes, marks=pytest.mark.nightly)


# At TP16 and 64 tokens, all 93 layers below.
@pytest.mark.parametrize(
    ("tp", "m"), [nightly(8, 1), (8, 8), (8, 64), (16, 8), nightly(16, 1), nightly(16, 64)]
)
def test_thirteen_layers(tp: int, m: int) -> None:
    report = rewritten(13, tp, m)
    check(report, 13)
    assert (report.m, report.tp) == (m, tp)
    forms = Counter((s.pattern, s.form) for s in report.sites)
    # Layers 3, 7 and 11 are MLA; layers 0 and 12 write a block.
    assert forms["attention_projection", "kda merged x1"] == 10
    assert forms["attention_projection", "mla merged x1"] == 3
    assert forms["output_projection", "attn_res block write"] == 2
    assert forms["output_projection", "attn_res"] == 11
    # Behind the 12 layers with experts, up to 8 tokens: one of them is the final one.
    joined = m <= 8
    assert forms["attn_res", "before attention in experts"] == 11 * joined
    assert forms["attn_res", "final in experts"] == joined
    assert forms["attn_res", "final"] == 1 - joined
    layer = [s.kernel for s in report.sites if s.layer == 2]
    families = sum(k.launches for k in layer if k is not None)
    assert len(layer) == 5
    # The core stays: one launch of KDA, three of MLA. Routing has a launch of its own; the shared
    # expert's gate and up are in the router's front.
    assert report.launches == {"kda_layer": families + 1, "mla_layer": families + 3}
    assert families + 1 == (7 if joined else 9)
    assert forms["router", "router + latent + shared"] == 12
    mixing = " + mix" if joined else ""
    assert forms["experts", f"mxfp4 mx_gathered + shared row{mixing}"] == 12


@pytest.mark.parametrize(
    ("tp", "layers"),
    [(8, 1), (8, 2), (8, 4), nightly(8, 8), (16, 2), *(nightly(16, n) for n in (1, 4, 8))],
)
def test_fewer_layers(tp: int, layers: int) -> None:
    check(rewritten(layers, tp, 4), layers)


@pytest.mark.parametrize("m", [2, 5, 16, 32])
def test_other_token_counts(m: int) -> None:
    report = rewritten(2, 8, m)
    check(report, 2)
    assert report.m == m


@pytest.mark.parametrize("tp", [8, 16])
def test_above_the_policy_nothing_is_taken(tp: int) -> None:
    target = f"gb300:tp{tp}"
    graph = build(SourceRequest(Target.parse(target), 65, 4, "list"))[0]
    before = graph_text(graph.module.graph)
    report = run(graph.module, target, plan=True, groups=graph.groups, expect=graph.expected)
    assert not report.found
    assert {n: c.refused for n, c in report.counts().items()} == formula(4)
    assert {r.code.value for s in report.sites for r in s.reasons} == {"M_OUT_OF_RANGE"}
    assert graph_text(graph.module.graph) == before
    assert report.missing() == formula(4)


@pytest.mark.parametrize("form", FORMS)
def test_every_spelling(form: str) -> None:
    report = rewritten(4, 8, 8, form)
    check(report, 4)
    projections = [s.form for s in report.sites if s.pattern == "attention_projection"]
    separate = form.endswith("separate")
    assert projections == (
        ["kda separate x6"] * 3 + ["mla separate x3"]
        if separate
        else ["kda merged x1"] * 3 + ["mla merged x1"]
    )


def test_an_unknown_spelling_is_said() -> None:
    with pytest.raises(ValueError, match="form 'rows' of kimi-k3 is unknown; use one of list"):
        build(SourceRequest(Target.parse("gb300:tp8"), 8, 1, "rows"))


def test_a_symbolic_token_count() -> None:
    report = rewritten(4, 8, None)
    check(report, 4)
    assert isinstance(report.m, str)
    kernels = {
        s.kernel.name for s in report.sites if s.pattern == "attention_projection" and s.kernel
    }
    assert kernels == {", ".join(f"stream_gemm<={m}" for m in (8, 16, 32, 64))}
    # The experts' op decides at run time who does the AttnRes.
    joined = [s.kernel for s in report.sites if s.within is not None]
    names = ("mx_experts_and_latent_tail_mix<=8", "mx_experts_and_latent_tail<=16")
    assert len(joined) == 3
    assert all(k is not None and k.name.startswith(", ".join(names)) for k in joined)


def test_one_engine_for_all_token_counts_reaches_the_op() -> None:
    target = Target.parse("gb300:tp8")
    for asked in (False, True):
        graph = build(SourceRequest(target, 8, 4, "list"))[0]
        run(graph.module, "gb300:tp8", plan=True, groups=graph.groups, batch_invariant=asked)
        calls = [
            n for n in graph.module.graph.nodes if "k3fuse.attention_projection" in str(n.target)
        ]
        assert [n.kwargs.get("batch_invariant", False) for n in calls] == [asked] * 4


def test_layers_are_numbered() -> None:
    report = rewritten(13, 8, 8)
    for pattern in formula(13):
        layers = [s.layer for s in report.sites if s.pattern == pattern and not s.outside_layers]
        first = 1 if pattern in ("router", "experts") else 0
        assert layers == list(range(first, 13)), pattern
    mla = [s.layer for s in report.sites if s.form.startswith("mla")]
    assert mla == [3, 7, 11]
    blocks = [s.layer for s in report.sites if s.form == "attn_res block write"]
    assert blocks == [0, 12]


def test_the_full_model_by_formula() -> None:
    assert KimiK3Config().expected_sites() == formula(93)
    writes = [i for i in range(93) if KimiK3Config().is_block_write(i)]
    assert len(writes) == 8
    assert sum(KimiK3Config().is_kda(i) for i in range(93)) == 69


def test_every_rank_decides_alike() -> None:
    one, other = rewritten(2, 8, 4), rewritten.__wrapped__(2, 8, 4)
    assert one.site_hash() == other.site_hash()
    assert one.site_hash() != rewritten(2, 16, 4).site_hash()
    assert one.site_hash() != rewritten(4, 8, 4).site_hash()


@pytest.mark.slow
def test_the_full_model_at_tp16() -> None:
    report = rewritten(93, 16, 64)
    check(report, 93)
    forms = Counter((s.pattern, s.form) for s in report.sites)
    assert forms["attention_projection", "kda merged x1"] == 69
    assert forms["attention_projection", "mla merged x1"] == 24
    assert forms["output_projection", "attn_res block write"] == 8
    assert forms["output_projection", "attn_res"] == 85
    layers = sorted(s.layer for s in report.sites if s.pattern == "output_projection")
    assert layers == list(range(93))
