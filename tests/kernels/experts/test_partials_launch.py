"""From logits to partials: op, captured launches, simulated kernels; both orders of weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_runs import BF16
from test_experts_launch import HIDDEN, ROW, SHARED, TARGET, Recorder, simulate
from torch import Tensor

from k3fuse.kernels.common.policy import MAX_M
from k3fuse.kernels.common.tolerances import compare, tolerance
from k3fuse.kernels.experts import launch as launching
from k3fuse.kernels.experts.cases import kernel, problem
from k3fuse.kernels.experts.layouts import plain, shuffled
from k3fuse.kernels.experts_partials.launch import launch, misfit
from k3fuse.kernels.experts_partials.op import experts_partials, given
from k3fuse.kernels.experts_partials.policy import PARTIALS, TABLE
from k3fuse.kernels.router import route_launch

M, EXPERTS, LATENT, WIDTH, TOP_K = 3, 4, 1792, 128, 2


def arguments(layout: str, m: int = M, weights: torch.dtype = BF16) -> list[Any]:
    """Positional arguments of the op: narrow experts of the kernel's 16 clusters."""
    shape = {"m": 8, "latent": LATENT, "inter": WIDTH, "top_k": TOP_K, "hidden": 0, "shared": 0}
    made = problem(kernel("sm_103a", shape), m, seed=m, experts=EXPERTS)
    stored = made.w13, made.w13_scale, made.w2, made.w2_scale
    generator = torch.Generator().manual_seed(m)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator) * size[-1] ** -0.5

    return [
        made.x, 60 * normal(m, EXPERTS), 0.1 * normal(EXPERTS),
        (HIDDEN**0.5 * normal(m, HIDDEN)).to(BF16),
        *(stored if layout == "rows" else shuffled(*stored)),
        [normal(2 * SHARED, HIDDEN).to(BF16)], normal(HIDDEN, SHARED).to(BF16), TOP_K, "sigmoid",
        True, 1.0, 1e-20, weights, "situ", 4.0, 25.0, layout, WIDTH, "",
    ]  # fmt: skip


def tensors(args: list[Any]) -> list[Tensor]:
    flat = [a for arg in args for a in (arg if isinstance(arg, list) else [arg])]
    return [a for a in flat if isinstance(a, Tensor)]


def run(args: list[Any], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Tensor], list[str]]:
    """[shared, routed] from the simulator, and which kernels made them."""
    kept: list[Tensor] = []
    empty = Tensor.new_empty

    def keep(self: Tensor, *size: Any, **how: Any) -> Tensor:
        kept.append(empty(self, *size, **how))
        return kept[-1]

    recorder, call = Recorder(), given(*args)
    runtime: Any = recorder
    assert misfit(ROW, TARGET, call) == ""
    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "new_empty", keep)
        outputs = launch(ROW, TARGET, call, False, runtime=runtime)
    experts = recorder.launched[-1][0]
    assert (experts.tuning("block"), experts.tuning("mxfp8")) == (1, 1)
    assert experts.tuning("shuffled") == (call.experts.layout == "trtllm")
    counts = launching.arrivals(call.logits.device)
    counter = route_launch._COUNTERS[call.logits.device]
    simulate(recorder, [*tensors(args), counts, counter, *(t for t in kept if t.numel())])
    assert int(counts.abs().max()) == int(counter) == 0
    return outputs, [variant.op for variant, _ in recorder.launched]


def test_the_bits_are_the_same_in_both_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three launches from the op's arguments; the padding to 256 columns is never read."""
    pytest.importorskip("cutlass")
    one = arguments("rows")
    (shared, routed), ops = run(one, monkeypatch)
    assert ops == ["router_route", "shared_gate_up", "experts"]
    assert len(ops) == TABLE.lookup(TARGET, M).launches  # type: ignore[union-attr]
    wanted = experts_partials(*one, target="reference", composition="")
    assert compare(shared, wanted[0], tolerance(BF16, HIDDEN, 2)).ok
    found = compare(routed, wanted[1], tolerance(BF16, LATENT, 2))
    assert found.ok, found
    two = arguments("trtllm")
    two[4][:, 2 * WIDTH :] = 0xFF  # what lies in the padding may be anything
    two[6][:, :, WIDTH // 2 :] = 0x77
    other, _ = run(two, monkeypatch)
    assert torch.equal(other[0], shared)
    assert torch.equal(other[1], routed)
    # The control: rows that were not shuffled are other experts.
    two[4] = two[4].roll(8, 1)
    wrong, _ = run(two, monkeypatch)
    assert not compare(wrong[1], wanted[1], tolerance(BF16, LATENT, 2)).ok


def test_the_reference_reads_both_orders_alike() -> None:
    one, two = (
        experts_partials(*arguments(layout), target="reference", composition="")
        for layout in ("rows", "trtllm")
    )
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])
    stored = arguments("rows")[4:8]
    for a, b in zip(stored, plain(*shuffled(*stored), WIDTH), strict=True):
        assert torch.equal(a, b)


def test_operands_that_do_not_fit_are_named() -> None:
    args = arguments("rows")
    for index, value, said in (
        (0, args[0].float(), "hidden is torch.float32"),
        (16, "silu", "activation is 'silu'"),
        (6, args[6].transpose(1, 2), "w2 has strides"),
        (15, torch.float16, "weights in torch.float16"),
    ):
        changed = [*args]
        changed[index] = value
        message = misfit(ROW, TARGET, given(*changed))
        assert said in message, message
    odd = torch.zeros(args[4].numel() + 8, dtype=torch.uint8)[8:].view(args[4].shape)
    assert "w13 starts at no multiple" in misfit(ROW, TARGET, given(*args[:4], odd, *args[5:]))
    assert misfit(ROW, TARGET, given(*args)) == ""  # the control


@pytest.mark.parametrize(
    ("index", "value", "error", "said"),
    [
        (19, "marlin", ValueError, "layout='marlin'; known: rows, trtllm"),
        (20, 48, ValueError, "width=48"),
        (20, 96, ValueError, r"w13 has shape .*; expected \(4, 192, 896\)"),
        (11, "softplus", ValueError, "scoring='softplus'"),
        (10, 5, ValueError, "top_k=5"),
        (1, torch.zeros(M, 5), ValueError, "the experts of w13"),
        (1, torch.zeros(M, EXPERTS, dtype=BF16), TypeError, "logits is torch.bfloat16"),
        (8, [], ValueError, "shared_gate_up holds 0 weights"),
        (21, "round_sum", ValueError, "rounding='round_sum'"),
    ],
)
def test_wrong_arguments_are_one_sentence(
    index: int, value: Any, error: type[Exception], said: str
) -> None:
    args = arguments("rows")
    args[index] = value
    with pytest.raises(error, match=said):
        experts_partials(*args, target="reference", composition="")


@pytest.mark.parametrize("target", ["gb300:tp8", "gb300:tp16"])
def test_every_row_has_kernels_that_hold_its_tokens(target: str) -> None:
    for m in (1, 8, 9, 17, 33, MAX_M):
        row = TABLE.lookup(target, m)
        assert row is not None
        assert (row.kernel, row.launches) == (PARTIALS, 3)
        assert m <= row.m_max <= max(8, 2 * m)
        assert misfit(row, target, given(*arguments("trtllm", m))) == ""
