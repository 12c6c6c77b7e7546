"""Weights that lie badly on one rank alone: every op of an exchange goes the way of its peers.

Of each: what one rank's launch is given where a weight is at an odd address or has other strides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from host_ranks import HostRanks, Recorder
from k3fuse.kernels.attention_projection import sharded_launch
from k3fuse.kernels.attention_projection.policy import SHARDED
from k3fuse.kernels.attn_res import launch as attn_res
from k3fuse.kernels.attn_res.policy import TABLE as ATTN_RES
from k3fuse.kernels.build.launch import Rows
from k3fuse.kernels.build.variant import parameter_names
from k3fuse.kernels.common import placement
from k3fuse.kernels.common.policy import Table
from k3fuse.kernels.experts import launch as experts
from k3fuse.kernels.experts.policy import TABLE as EXPERTS
from k3fuse.kernels.experts.reference import Activation
from k3fuse.kernels.output_projection import launch as projection
from k3fuse.kernels.output_projection.policy import TABLE as PROJECTION
from k3fuse.kernels.router import launch as router
from k3fuse.kernels.router.layout import FrontMailbox
from k3fuse.kernels.router.policy import TABLE as ROUTER
from k3fuse.kernels.router.reference import Shared
from k3fuse.kernels.router.route_launch import Form
from k3fuse.kernels.tail import launch as tail
from k3fuse.kernels.tail.mix import Mix
from k3fuse.kernels.tail.policy import MIXED_TABLE
from k3fuse.kernels.tail.policy import TABLE as TAIL

BF16 = torch.bfloat16
TARGET, TP, HIDDEN, LATENT = "gb300:tp8", 8, 7168, 3584
SPACE = SimpleNamespace(
    own=0, rank=3, multicast=True,
    mapped=SimpleNamespace(multicast=4096, addresses=tuple(range(0, TP * 4096, 4096))),
)  # fmt: skip


def normal(*shape: int) -> Tensor:
    made = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=made) * shape[-1] ** -0.5).to(BF16)


def odd(weight: Tensor) -> Tensor:
    """The same elements, 8 bytes behind a multiple of 16."""
    step = 8 // weight.element_size()
    store = torch.empty(weight.numel() + 2 * step, dtype=weight.dtype)
    start = step + (-store.data_ptr() % 16) // weight.element_size()
    moved = store[start : start + weight.numel()].view(weight.shape).copy_(weight)
    assert moved.data_ptr() % 16 == 8
    return moved


def strided(weight: Tensor) -> Tensor:
    """The same elements, its last two axes the other way round in memory."""
    return weight.transpose(-1, -2).contiguous().transpose(-1, -2)


@dataclass
class Call:
    """One op's call: weights by name, and what asks and launches with such weights.

    pointers: the kernel parameter that starts at each weight.
    """

    weights: dict[str, Tensor]
    pointers: dict[str, str]
    misfit: Callable[[dict[str, Tensor]], str]
    launch: Callable[[dict[str, Tensor], Any], Any]


def row_of(table: Table, m: int = 2) -> Any:
    return table.lookup(TARGET, m)


def space(*_: Any) -> Any:
    return SPACE


def router_call() -> Call:
    x, form, row = normal(2, 1024), Form(96, 256, 4), row_of(ROUTER)

    def shared(w: dict[str, Tensor]) -> Shared:
        return Shared([w["shared_gate_up[0]"]], "situ", 4.0, 25.0)

    weights = {
        "gate_weight": normal(96, 1024), "latent_weight": normal(256, 1024),
        "shared_gate_up[0]": normal(32, 1024),
    }  # fmt: skip
    return Call(
        weights,
        {"gate_weight": "gate_weight", "latent_weight": "latent_weight",
         "shared_gate_up[0]": "shared_gate"},
        lambda w: router.misfit(
            row, TARGET, form, x, w["gate_weight"], w["latent_weight"], shared(w)
        ),
        lambda w, runtime: router.launch(
            row, TARGET, "tp", form, x, w["gate_weight"], w["latent_weight"], shared=shared(w),
            runtime=runtime, space=space,
        ),
    )  # fmt: skip


def projection_call() -> Call:
    x, row = normal(2, 1536), row_of(PROJECTION)
    form = projection.Form(1, prefix=True, norm=True, round_mix=False, round_before=False)
    prefix, block = normal(2, HIDDEN), normal(2, HIDDEN)

    def residual(w: dict[str, Tensor]) -> projection.Residual:
        norms = w["score_norm"], w["score_proj"], w["out_norm"]
        return projection.Residual(form, prefix, [block], *norms, 1e-5, 1e-5)

    names = ("weight", "score_norm", "score_proj", "out_norm")
    shapes = ((HIDDEN, 1536), (HIDDEN,), (HIDDEN,), (HIDDEN,))
    return Call(
        {name: normal(*shape) for name, shape in zip(names, shapes, strict=True)},
        {name: name for name in names},
        lambda w: projection.misfit(row, TARGET, x, w["weight"], residual(w)),
        lambda w, runtime: projection.launch(
            row, TARGET, "tp", x, w["weight"], residual(w), runtime=runtime, space=space
        ),
    )


def tail_call() -> Call:
    routed, shared, row = normal(2, LATENT), normal(2, HIDDEN), row_of(TAIL)
    return Call(
        {"norm_weight": normal(LATENT), "up_weight": normal(HIDDEN, LATENT)},
        {"norm_weight": "norm", "up_weight": "weight"},
        lambda w: tail.misfit(routed, shared, w["norm_weight"], w["up_weight"]),
        lambda w, runtime: tail.launch(
            row, TARGET, "tp", routed, shared, w["norm_weight"], w["up_weight"], 1e-5, True,
            runtime=runtime, space=space,
        ),
    )  # fmt: skip


def mixed_call() -> Call:
    """The tail with the next layer's AttnRes in its launch."""
    plain, row = tail_call(), row_of(MIXED_TABLE)
    routed, shared, prefix = normal(2, LATENT), normal(2, HIDDEN), normal(2, HIDDEN)

    def mix(w: dict[str, Tensor]) -> Mix:
        norms = w["score_norm"], w["score_proj"], w["out_norm"]
        return Mix(prefix, [prefix], 1, *norms, 1e-5, 1e-5, False)

    names = ("score_norm", "score_proj", "out_norm")
    return Call(
        {**plain.weights, **{name: normal(HIDDEN) for name in names}},
        {**plain.pointers, **{name: name for name in names}},
        lambda w: tail.misfit_mixed(routed, shared, w["norm_weight"], w["up_weight"], mix(w)),
        lambda w, runtime: tail.launch_mixed(
            row, TARGET, "tp", routed, shared, w["norm_weight"], w["up_weight"], 1e-5, True,
            mix(w), runtime=runtime, space=space,
        ),
    )  # fmt: skip


def experts_call() -> Call:
    row, ids = row_of(EXPERTS), torch.tensor([[0, 1], [2, 3]])
    hidden, x, chosen = normal(2, 896), normal(2, 1024), torch.full((2, 2), 0.5)
    norm, up, situ = normal(LATENT), normal(HIDDEN, LATENT), Activation("situ", 4.0, 25.0)

    def given(w: dict[str, Tensor]) -> experts.Operands:
        return experts.Operands(
            hidden, chosen, ids, w["w13"], w["w13_scale"], w["w2"], w["w2_scale"], x,
            [w["shared_gate_up[0]"]], w["shared_down"], norm, up,
        )  # fmt: skip

    stored = {"w13": (4, 128, 448), "w13_scale": (4, 128, 28), "w2": (4, 896, 32)}
    packed = {n: torch.full(s, 17, dtype=torch.uint8) for n, s in stored.items()}
    packed["w2_scale"] = torch.full((4, 896, 2), 120, dtype=torch.uint8)
    weights = {
        **packed, "shared_down": normal(HIDDEN, 192), "shared_gate_up[0]": normal(384, 1024),
    }  # fmt: skip
    return Call(
        weights,
        {"w13": "w13", "w13_scale": "w13_scale", "w2": "w2", "w2_scale": "w2_scale",
         "shared_down": "shared_down", "shared_gate_up[0]": "gate"},
        lambda w: experts.misfit(row, TARGET, given(w), situ),
        lambda w, runtime: experts.launch(
            row, TARGET, "tp", given(w), situ, 1e-5, (), runtime=runtime, space=space
        ),
    )  # fmt: skip


def sharded_call() -> Call:
    x, row, split = normal(2, 512), row_of(SHARDED), (64, 64)

    def listed(w: dict[str, Tensor]) -> list[Tensor]:
        return [w["weights[0]"], w["weights[1]"]]

    return Call(
        {"weights[0]": normal(80, 512), "weights[1]": normal(64, 512)},
        {},
        lambda w: sharded_launch.misfit(row, TARGET, x, listed(w), split, "tp"),
        lambda w, runtime: sharded_launch.launch(
            row, TARGET, "tp", x, listed(w), split, runtime=runtime, space=space
        ),
    )


def attn_res_call() -> Call:
    """It exchanges nothing and copies all the same."""
    prefix, delta, block, row = *(normal(2, HIDDEN) for _ in range(3)), row_of(ATTN_RES)
    names = ("score_norm", "score_proj", "out_norm")
    return Call(
        {name: normal(HIDDEN) for name in names},
        {name: name for name in names},
        lambda _: "",
        lambda w, runtime: attn_res.launch(
            row, TARGET, prefix, delta, [block], 1, *w.values(), 1e-5, 1e-5, False, runtime=runtime
        ),
    )


CALLS = {
    "router": router_call, "output_projection": projection_call, "tail": tail_call,
    "tail, mixed": mixed_call, "experts": experts_call, "attention_projection": sharded_call,
    "attn_res": attn_res_call,
}  # fmt: skip


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every copy that is made, held as the stream would until the kernels have run."""
    held: list[Tensor] = []
    clone = Tensor.clone

    def keep(self: Tensor, **how: Any) -> Tensor:
        held.append(clone(self, **how))
        return held[-1]

    monkeypatch.setattr(placement, "_SAID", set())
    monkeypatch.setattr(Tensor, "clone", keep)
    return held


def addresses(runtime: Recorder) -> dict[str, int]:
    """What each kernel got, by parameter name; the first that has a name counts."""
    found: dict[str, int] = {}
    for variant, values in runtime.launched:
        for name, value in zip(parameter_names(variant), values, strict=True):
            found.setdefault(name, value.address if isinstance(value, Rows) else value)
    return found


@pytest.mark.parametrize("how", [odd, strided])
@pytest.mark.parametrize("op", CALLS)
def test_a_weight_that_lies_badly_is_copied_and_never_a_misfit(
    op: str, how: Any, copies: list[Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    call = CALLS[op]()
    assert call.misfit(call.weights) == ""
    for name, weight in call.weights.items():
        if how is strided and weight.dim() < 2:
            continue
        given = {**call.weights, name: how(weight)}
        assert call.misfit(given) == "", name
        copies.clear()
        runtime = Recorder()
        with caplog.at_level(logging.WARNING, logger="k3fuse"):
            caplog.clear()
            call.launch(given, runtime)
            call.launch(given, Recorder())
        there = addresses(runtime)
        (first, _) = [c for c in copies if c.shape == weight.shape and torch.equal(c, weight)]
        assert first.is_contiguous()
        assert first.data_ptr() % 16 == 0
        if name in call.pointers:
            assert there[call.pointers[name]] == first.data_ptr()
        assert given[name].data_ptr() not in there.values()
        (said,) = [r.getMessage() for r in caplog.records]  # of two calls
        assert said.startswith(f"k3fuse.{op.split(',')[0]}: {name} "), said
        assert "it is copied in every call" in said


@pytest.mark.parametrize("op", CALLS)
def test_a_weight_that_lies_well_is_read_in_place(op: str, copies: list[Tensor]) -> None:
    """The control."""
    call = CALLS[op]()
    runtime = Recorder()
    call.launch(call.weights, runtime)
    there = addresses(runtime)
    assert copies == []
    for name, parameter in call.pointers.items():
        assert there[parameter] == call.weights[name].data_ptr()


@pytest.mark.parametrize("op", [op for op in CALLS if op != "attn_res"])
def test_what_all_ranks_see_alike_is_a_misfit(op: str) -> None:
    """Another dtype or size: ranks have agreed on the graph."""
    call = CALLS[op]()
    name, weight = next((n, w) for n, w in call.weights.items() if w.dtype == BF16)
    other = weight[:7000] if op == "experts" else weight.half()
    said = "hidden=7000" if op == "experts" else f"{name} is torch.float16"
    assert said in call.misfit({**call.weights, name: other})


def test_rows_that_lie_apart_are_no_reason_for_the_stream_kernel() -> None:
    """Its tensor maps take them; the stationary one needs a copy."""
    wide = torch.empty(64, 520, dtype=BF16)[:, :512]
    assert sharded_launch.misplaced(True, wide) == ""
    assert "has strides (520, 1)" in sharded_launch.misplaced(False, wide)
    assert "lie a multiple of 16 bytes apart" in sharded_launch.misplaced(
        True, torch.empty(64, 513, dtype=BF16)[:, :512]
    )


def test_one_rank_with_such_weights_leaves_nobody_waiting(copies: list[Tensor]) -> None:
    """All ranks of a router in the simulator; ranks 2 and 5 have weights at bad places.

    The bits are those of a call in which all lie well, on every rank.
    """
    pytest.importorskip("cutlass")
    m, experts_, latent = 3, 96, 256
    form = Form(experts_, latent, 4, renormalize=True)
    x, gate, down = normal(m, 1024), normal(experts_, 1024), normal(latent, 1024)
    results = []
    for bad in (False, True):
        ranks = HostRanks(TP, multicast=False, layout=FrontMailbox(TP, experts_, latent))
        known: list[list[Tensor]] = [[x, gate, down] for _ in range(TP)]

        def call(rank: int, recorder: Any, there: Any, bad: bool = bad, known: Any = known) -> Any:
            mine = {2: (odd(gate), down), 5: (gate, strided(down))} if bad else {}
            given = mine.get(rank, (gate, down))
            assert router.misfit(row_of(ROUTER, m), TARGET, form, x, *given) == ""
            copies.clear()
            made = router.launch(
                row_of(ROUTER, m), TARGET, "tp", form, x, *given, runtime=recorder, space=there
            )
            assert len(copies) == (rank in mine)
            known[rank] += copies
            return made

        got, report = ranks.step(call, known)
        assert len(report.launches) == 2
        assert all(s.armed() and s.error() is None for s in ranks.spaces)
        results.append(got)
    for plain, moved in zip(*results, strict=True):
        for a, b, first in zip(plain, moved, results[0][0], strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, first)


def test_without_copies_a_kernel_would_get_the_odd_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the addresses: where nothing is copied, it shows."""
    call = router_call()
    monkeypatch.setattr(router, "placed", lambda _, weights: dict(weights))
    runtime = Recorder()
    moved = odd(call.weights["gate_weight"])
    call.launch({**call.weights, "gate_weight": moved}, runtime)
    assert addresses(runtime)["gate_weight"] == moved.data_ptr()
