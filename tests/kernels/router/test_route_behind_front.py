"""The front kernel and the route kernel in stream order: layers, late ranks, the wait between."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest
import torch
from front_runs import SMALL, full, small, weights
from route_runs import built, kernel
from torch import Tensor

from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.residency import Member, require_co_residency
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check import Launch, run_sequence
from k3fuse.kernels.router import front_problem, reference
from k3fuse.kernels.router.route_builder import config_of
from k3fuse.kernels.router.route_problem import Problem
from k3fuse.kernels.simulator import DeadlockError, OverlapError
from stored import store

pytest.importorskip("cutlass")

FORM = {"quantize": 1, "plan": 1}
LEAN = {"shared": 0}


def route_of(front: front_problem.Problem, m: int) -> Variant:
    """The route kernel for a front kernel's rows."""
    config = front.config
    shape = {"e": config.experts, "l": config.latent, "k": 16, "tp": config.tp}
    return kernel(m, shape, **FORM)


def layer(
    front: front_problem.Problem,
    variant: Variant,
    made: Built,
    *,
    call: int = 0,
    seed: int | None = None,
    delay: Mapping[tuple[int, int], int] | None = None,
    skip: Collection[tuple[int, int]] = (),
) -> Problem:
    """Both kernels on all ranks; what comes out must be what the front kernel's own rows say."""
    alone = replace(front, boxes=front_problem.mailboxes(front.config.box, front.config.tp, call))
    run_sequence([alone.launch(variant)], cache=store())
    logits, latent = alone.published(0, call)
    generator = torch.Generator().manual_seed(call)
    bias = 0.05 * torch.randn(front.config.experts, generator=generator)
    problem = Problem(
        config_of(made.variant), logits, latent, bias, front.config.tp, boxes=front.boxes,
        calls=call,
    )  # fmt: skip
    behind = problem.launch(made.variant)
    launches = [front.launch(variant), Launch(made, behind.ranks, behind.needed)]
    run_sequence(launches, seed=seed, cache=store(), delay=delay or {}, skip=skip)
    assert problem.wrong() == ""
    assert problem.unequal() == ""
    assert problem.disarmed() == ""
    return problem


@pytest.mark.parametrize(
    ("tp", "m"),
    [(8, 3)]
    + [
        pytest.param(tp, m, marks=pytest.mark.nightly)
        for tp in (8, 16)
        for m in (1, 2, 3, 5, 8, 9, 16, 33, 64)
    ],
)
def test_real_shapes(tp: int, m: int) -> None:
    """Every rank has the same experts; by the reference's logits they are the ones, too."""
    size = next(n for n in (8, 16, 32, 64) if n >= m)
    variant = full(tp, size, shared=False)
    base = weights(tp, False)
    front = front_problem.make(base.config, m, m, weights=base)
    problem = layer(front, variant, built(kernel(64, {"tp": tp}, **FORM)))
    logits, _ = front.expected()
    wanted, _ = reference.select(logits, problem.bias, "sigmoid", 17)
    keys = (torch.sigmoid(logits) + problem.bias).gather(1, wanted)
    # FP32 sums of 7168 products in another order: logits about 1 differ by some 1e-6.
    apart = keys[:, 15] - keys[:, 16] > 1e-5
    ids = problem.results[0]["ids"]
    assert torch.equal(ids[apart].sort(dim=1).values, wanted[apart][:, :16].sort(dim=1).values)
    assert bool(apart.any())


@pytest.mark.parametrize(
    ("m", "shared"),
    [(8, False)] + [pytest.param(m, True, marks=pytest.mark.nightly) for m in (8, 64)],
)
def test_its_ctas_are_resident_beside_the_front_kernels(m: int, shared: bool) -> None:
    """A launch of its own is hidden: all of its CTAs wait where the front kernel still runs."""
    members = []
    front = store().get(full(8, m, shared))
    for made in (front, built(kernel(m, {"tp": 8}, quantize=1, plan=int(m > 8)))):
        members.append(Member.built(made.plan, made.resources, made.variant.op))
    for sms in (132, 148, 152):
        require_co_residency(members, sms)


def test_layers_of_changing_counts() -> None:
    """Four calls on one set of mailboxes: both parities come round again with other rows."""
    _, base = small(16, **LEAN)
    boxes: list[Tensor] = front_problem.mailboxes(base.config.box, 2)
    made = built(route_of(base, 16))
    for call, m in enumerate((3, 16, 1, 9)):
        variant, front = small(m, seed=call, weights=base, boxes=boxes, most=16, **LEAN)
        layer(front, variant, made, call=call, seed=call)


def test_a_late_rank_is_waited_for_and_a_dead_one_never_answers() -> None:
    variant, front = small(9, most=16, **LEAN)
    made = built(route_of(front, 16))
    layer(front, variant, made, delay={(1, 0): 400})
    variant, front = small(9, most=16, **LEAN)
    with pytest.raises(DeadlockError):
        layer(front, variant, made, skip={(1, 0), (1, 1)})


def test_without_a_wait_the_front_kernel_is_overtaken() -> None:
    """Of the choice or of the latent row; CTAs without a token wait for the order's sake alone."""
    variant, front = small(9, most=16, **LEAN)
    made = built(route_of(front, 16))
    waits = list(re.finditer(r"griddepcontrol\.wait;", made.ptx))
    assert len(waits) == 3
    for wait in waits[:2]:
        ptx = made.ptx[: wait.start()] + made.ptx[wait.end() :]
        with pytest.raises(OverlapError):
            layer(front, variant, replace(made, ptx=ptx))
        _, front = small(9, most=16, **LEAN)
    layer(front, variant, made)  # the control
    assert SMALL["tp"] == front.config.tp
