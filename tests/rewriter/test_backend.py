"""torch.compile(backend="k3fuse"): values, shapes, graph breaks, training, options, strict mode."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from build import Hand, aten, ops
from k3fuse.patterns.models.config import KimiK3Config
from k3fuse.patterns.models.kimi_k3 import KimiK3
from k3fuse.patterns.models.parallel import init_weights
from k3fuse.rewriter import backend
from k3fuse.rewriter.options import OptionError, Options
from k3fuse.rewriter.target import TargetError
from tolerances import assert_close

INNER = ("eager", "aot_eager", "inductor")
K, H = 32, 64


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    backend.reset_reports()
    yield
    torch._dynamo.reset()
    backend.reset_reports()


def compiled(
    model: Callable[..., Any], *, fullgraph: bool = True, **options: Any
) -> Callable[..., Any]:
    given = {"target": "reference", "inner": "eager", "log": "off", **options}
    made: Callable[..., Any] = torch.compile(
        model, backend="k3fuse", fullgraph=fullgraph, options=given
    )
    return made


def k3(layers: int = 4, **how: Any) -> KimiK3:
    model = KimiK3(KimiK3Config.small(layers), **how)
    init_weights(model, 0)
    return model


def step(model: Callable[..., Any], source: KimiK3, m: int) -> Tensor:
    generator = torch.Generator().manual_seed(m)
    hidden = torch.randn(m, source.config.hidden_size, generator=generator).to(torch.bfloat16)
    with torch.no_grad():
        out: Tensor = model(hidden, source.new_state(m, 8))
    return out


class Projection(nn.Module):
    """Layers of o-proj, add, RMSNorm."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ModuleList(nn.Linear(H, K, bias=False) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(K, H, bias=False) for _ in range(layers))
        self.norm = nn.ParameterList(1 + 0.1 * torch.randn(H) for _ in range(layers))
        self.to(torch.bfloat16)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        for up, out, norm in zip(self.up, self.out, self.norm, strict=True):
            residual = out(torch.tanh(up(x))) + residual
            wide = residual.float()
            scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
            x = (wide * scale * norm.float()).to(torch.bfloat16)
        return x, residual


class Broken(nn.Module):
    """Two projections with a graph break in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Projection(1), Projection(1)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self.first(x, residual)
        torch._dynamo.graph_break()
        return self.second(x, residual)  # type: ignore[no-any-return]


def pair(m: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m)
    return tuple(torch.randn(m, H, generator=generator).to(torch.bfloat16) for _ in range(2))  # type: ignore[return-value]


def agree(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], roundings: int = 6) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b, k=H, roundings=roundings)


# --- values -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inner", "form"),
    [
        # What runs the graph knows nothing of the form: one of them does for the middle way.
        pytest.param(i, f, marks=[pytest.mark.nightly] * ((i, f) == ("aot_eager", "list")))
        for i in INNER
        for f in ("list", "bank")
    ],
)
def test_the_small_model_keeps_its_values_and_all_sites_are_found(inner: str, form: str) -> None:
    source = k3(attn_res=form)
    wanted = step(source, source, 3)
    got = step(compiled(source, inner=inner), source, 3)
    # Four layers of BF16 roundings; Inductor keeps FP32 between fused operations of the core.
    assert_close(got, wanted, k=source.config.hidden_size, roundings=16)
    merged = backend.check(source.config.expected_sites(4))
    assert {n: c.found for n, c in merged.counts().items()} == source.config.expected_sites(4)
    assert not merged.near


@pytest.mark.parametrize("inner", INNER)
def test_a_projection_keeps_its_values(inner: str) -> None:
    model, inputs = Projection(), pair(4)
    with torch.no_grad():
        wanted = model(*inputs)
        agree(compiled(model, inner=inner)(*inputs), wanted)
    (report,) = backend.reports()
    assert report.counts()["output_projection"].found == 2


def test_a_model_without_kimi_k3_is_untouched() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8))
    x = torch.randn(3, 8)
    with torch.no_grad():
        assert torch.equal(compiled(model)(x), model(x))
    (report,) = backend.reports()
    assert report.sites == []
    assert report.nodes_before == report.nodes_after


@pytest.mark.parametrize("inner", INNER)
def test_inference_mode(inner: str) -> None:
    model, inputs = Projection(), pair(4)
    with torch.inference_mode():
        agree(compiled(model, inner=inner)(*inputs), model(*inputs))
    assert backend.reports()[-1].counts()["output_projection"].found == 2


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_graph_break_between_layers(inner: str, fullgraph: bool) -> None:
    model, inputs = Broken(), pair(4)
    run = compiled(model, inner=inner, fullgraph=fullgraph)
    with torch.no_grad():
        if fullgraph:
            with pytest.raises(torch._dynamo.exc.Unsupported):
                run(*inputs)
            return
        agree(run(*inputs), model(*inputs))
    found = [r.counts()["output_projection"].found for r in backend.reports()]
    assert found == [1, 1]
    backend.check({"output_projection": 2})


def test_repeated_layers_are_rewritten_each() -> None:
    model, inputs = Projection(layers=5), pair(4)
    with torch.no_grad():
        agree(compiled(model)(*inputs), model(*inputs), roundings=12)
    (report,) = backend.reports()
    assert [s.layer for s in report.sites if s.pattern == "output_projection"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("inner", INNER)
def test_a_symbolic_token_count(inner: str) -> None:
    """One graph: the op serves M up to 64 by its kernel, above it runs what it replaced."""
    model = Projection()
    run = compiled(model, inner=inner)
    for m in (3, 5, 64, 65, 200):
        inputs = pair(m)
        for t in inputs:
            torch._dynamo.mark_dynamic(t, 0)
        with torch.no_grad():
            agree(run(*inputs), model(*inputs))
    (report,) = backend.reports()
    assert report.counts()["output_projection"].found == 2
    assert isinstance(report.m, str)


@pytest.mark.slow
def test_the_small_model_with_a_symbolic_token_count() -> None:
    source = k3(2)
    run = compiled(source)
    for m in (3, 5, 64, 65):
        generator = torch.Generator().manual_seed(m)
        hidden = torch.randn(m, source.config.hidden_size, generator=generator).to(torch.bfloat16)
        states = [source.new_state(m, 8), source.new_state(m, 8)]
        for leaf in torch.utils._pytree.tree_leaves((hidden, states[0])):
            torch._dynamo.mark_dynamic(leaf, 0)
        with torch.no_grad():
            got, wanted = run(hidden, states[0]), source(hidden, states[1])
        assert_close(got, wanted, k=source.config.hidden_size, roundings=16, what=f"M={m}")
    (report,) = backend.reports()
    assert report.missing() == {}
    assert sum(c.found for c in report.counts().values()) == sum(
        source.config.expected_sites(2).values()
    )


def test_above_the_policy_a_static_count_is_left() -> None:
    model, inputs = Projection(), pair(65)
    with torch.no_grad():
        agree(compiled(model)(*inputs), model(*inputs), roundings=1)
    (report,) = backend.reports()
    assert {s.reasons[0].code.value for s in report.sites} == {"M_OUT_OF_RANGE"}


# --- training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", INNER)
def test_a_training_call_goes_through_untouched(inner: str) -> None:
    gradients = []
    for wrap in (lambda m: m, lambda m: compiled(m, inner=inner)):
        model = Projection()
        x, residual = pair(4)
        out, total = wrap(model)(x.requires_grad_(), residual)
        (out.float().sum() + total.pow(2).sum()).backward()
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    for got, wanted in zip(*gradients, strict=True):
        assert_close(got, wanted, k=H, roundings=8)
    assert sum(len(r.found) for r in backend.reports()) == 0


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"targt": "reference"}, OptionError, "option 'targt' does not exist"),
        ({"inner": "tvm"}, OptionError, "option inner='tvm' is unknown"),
        ({"target": "gb300:tp3"}, TargetError, "tp3 is not covered"),
        ({"strict": 1}, OptionError, "option strict=1 is no bool"),
    ],
)
def test_a_wrong_option_is_an_error(
    options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    model = Projection(1)
    with pytest.raises(Exception, match=text) as error, torch.no_grad():
        compiled(model, **options)(*pair(2))
    chain: BaseException | None = error.value
    seen = []
    while chain is not None:
        seen.append(type(chain))
        chain = chain.__cause__
    assert kind in seen or kind.__name__ in str(error.value)


def test_a_mode_is_an_error() -> None:
    graph = torch.fx.symbolic_trace(nn.ReLU())
    with pytest.raises(ValueError, match="mode='max-autotune' is not taken; use options"):
        backend.k3fuse(graph, [torch.randn(2)], mode="max-autotune")


def test_the_backend_is_registered() -> None:
    assert "k3fuse" in torch._dynamo.list_backends(exclude_tags=None)


# --- strict -------------------------------------------------------------------------------------


def test_a_model_that_is_never_called_is_noticed() -> None:
    compiled(Projection(1), strict=True)
    with pytest.raises(backend.StrictError, match="COMPILE_NOT_REACHED"):
        backend.check({"output_projection": 1})


def test_a_model_that_was_called_passes_the_check() -> None:
    with torch.no_grad():
        compiled(Projection(1))(*pair(2))
    report = backend.check({"output_projection": 1})
    assert len(report.found) >= 1
    with pytest.raises(
        backend.StrictError, match="2 of output_projection expected and not rewritten"
    ):
        backend.check({"output_projection": 3})


@pytest.mark.parametrize(("expect", "fails"), [(2, False), (3, True)])
def test_strict_mode(expect: int, fails: bool) -> None:
    run = compiled(Projection(), strict=True, expect={"output_projection": expect})
    with torch.no_grad():
        if fails:
            with pytest.raises(
                Exception, match="1 of output_projection expected and not rewritten"
            ):
                run(*pair(2))
        else:
            run(*pair(2))


# --- log ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("log", "lines"), [("off", 0), ("summary", 12), ("explain", 40)])
def test_the_log(log: str, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "k3fuse"), torch.no_grad():
        compiled(Projection(), log=log)(*pair(4))
    text = "\n".join(r.getMessage() for r in caplog.records if r.name == "k3fuse")
    assert len(text.splitlines()) <= lines
    assert ("output_projection" in text) is (log != "off")


def test_reports_are_in_order_and_can_be_forgotten() -> None:
    with torch.no_grad():
        compiled(Projection(1))(*pair(2))
        compiled(Projection(3))(*pair(2))
    assert [r.counts()["output_projection"].found for r in backend.reports()] == [1, 3]
    backend.reset_reports()
    assert backend.reports() == []


def test_one_token_runs_the_graph_of_every_count() -> None:
    """The rewrite asks no symbol whether it is 1: that would be a guard, and a second graph."""
    model = compiled(Projection())
    shapes: Any = torch.fx.experimental._config
    with torch.no_grad(), shapes.patch(backed_size_oblivious=True):
        for m in (5, 1, 8):
            inputs = pair(m)
            for tensor in inputs:
                torch._dynamo.mark_dynamic(tensor, 0)
            model(*inputs)
    assert [len(r.found) for r in backend.reports()] == [3]


def test_a_pass_that_was_set_already_runs_first_and_is_in_the_key() -> None:
    """Inductor of torch 2.11 takes one pass, so that ours calls the one before."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    h = Hand()
    x, w, r, n = h.input("x", 4, K), h.input("w", H, K), h.input("r", 4, H), h.input("n", H)
    total = h.call(aten.add.Tensor, h.call(aten.mm.default, x, h.call(aten.t.default, w)), r)
    module = h.done(h.call(aten.rms_norm.default, total, [H], n, 1e-5), total)
    seen: list[list[str]] = []

    class Other(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            seen.append(ops(module))

        def uuid(self) -> str:
            return "other 1"

    options = Options.make({"target": "reference", "log": "off"})
    backend._JointPass(options, [Other()])(module.graph)
    assert [any("k3fuse" in op for op in graph) for graph in (*seen, ops(module))] == [False, True]
    alone, both = backend._JointPass(options).uuid(), backend._JointPass(options, [Other()]).uuid()
    assert alone is not None
    assert both == f"{alone} other 1"
    assert backend._JointPass(options, [Other(), lambda graph: None]).uuid() is None
