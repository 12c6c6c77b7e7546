"""The front kernel's exchange: schedules, reuse of the mailbox, races, what may not be left out."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from front_runs import SMALL, full, kernel, run_one, small, wrong

from k3fuse.kernels.attn_res.builder import BUILDER as ATTN_RES
from k3fuse.kernels.attn_res.cases import step as attn_res_step
from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.check import Launch, run_sequence
from k3fuse.kernels.router.front_builder import config_of
from k3fuse.kernels.router.front_problem import mailboxes, make, rearm
from k3fuse.kernels.simulator import Fresh, OverlapError, SimulationError
from stored import store

pytest.importorskip("cutlass")

# A tile of each part: two blocks of K, nothing that a larger grid would add.
TINY = {"tp": 2, "k": 1024, "experts": 64, "latent": 64, "shared": 16}
_SITE = re.compile(
    r"^[^\n/]*(?:bar\.sync|barrier\.cluster\.\w+|mbarrier\.try_wait|mbarrier\.init|fence\.mbarrier)"
    r"[^\n]*$",
    re.MULTILINE,
)


@pytest.mark.parametrize("multicast", [0, 1])
def test_random_schedules(multicast: int) -> None:
    variant, base = small(3, multicast=multicast, **TINY)
    for seed in range(3):
        problem = make(base.config, 3, seed, weights=base)
        run_one(variant, problem, seed=seed)
        assert wrong(problem) == "", seed


def test_layers_of_changing_counts_and_forms_share_a_mailbox() -> None:
    """Four layers: grids of other sizes count the calls alike, and parities alternate."""
    _, base = small(16)
    layout = base.config.box
    boxes = mailboxes(layout, 2)
    for call, (m, kind) in enumerate(
        [(3, {}), (16, {"shared": 0}), (1, {"replicated": 1}), (9, {})]
    ):
        variant, problem = small(m, seed=call, weights=base, boxes=boxes, **kind)
        run_one(variant, problem, seed=call)
        assert wrong(problem, call) == "", call
        for box in boxes:
            rearm(layout, box, call, m)


def found(built: Built) -> str:
    """What the race checker or the simulator says of one rank's run; "" for nothing."""
    problem = make(config_of(built.variant), 3, ranks=(1,))
    try:
        report = run_one(built, problem, races=True)
    except SimulationError as error:
        return str(error)
    return "; ".join(report.races or ())


def test_no_races() -> None:
    assert found(store().get(kernel(8, TINY))) == ""
    assert found(store().get(kernel(16, TINY))) == ""


# Not looked at: the wait of warps without a tile, which only pairs their arrival.
@pytest.mark.parametrize("site", range(8))
def test_what_is_left_out_is_found(site: int) -> None:
    built = store().get(kernel(8, TINY))
    places = list(_SITE.finditer(built.ptx))
    place = places[site]
    ptx = built.ptx[: place.start()] + built.ptx[place.end() :]
    assert found(replace(built, ptx=ptx)), place[0]


def test_weaker_waits_are_found() -> None:
    built = store().get(kernel(8, TINY))
    waits = "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done"
    assert built.ptx.count(waits) == 1
    # Without the cluster's acquire nothing orders what the other CTAs have sent.
    weak = built.ptx.replace(waits, waits.replace("acquire.cluster", "relaxed.cluster"))
    assert found(replace(built, ptx=weak))


def chain(built: Built, seed: int | None = None) -> str:
    """AttnRes makes x, the front kernel reads it; what is wrong, on one rank."""
    before = attn_res_step(ATTN_RES.variant("sm_103a", {"m": 3, "blocks": 0}, {"delta": 0}), 1)
    given = dict(before.launches[0].ranks[0])
    made = given["out"]
    assert isinstance(made, Fresh)
    problem = make(config_of(built.variant), 3, ranks=(0,))
    problem.x = made.tensor
    launch = problem.launch(built.variant)
    values: dict[str, Any] = {**launch.ranks[0], "x": Fresh(made.tensor)}
    first = Launch(before.launches[0].kernel, [given])
    run_sequence([first, Launch(built, [values])], seed=seed, cache=store())
    # The other rank did not run: its columns are still armed.
    config = problem.config
    logits, latent = problem.published(0)
    wanted = problem.expected()
    for got, want, rows in zip((logits, latent), wanted, config.rows[:2], strict=True):
        assert got[:, rows:].view(torch.uint8).any()
        got.copy_(torch.cat([got[:, :rows], want[:, rows:]], dim=1))
    return wrong_rows(logits, latent, wanted)


def wrong_rows(logits: torch.Tensor, latent: torch.Tensor, wanted: Any) -> str:
    near = torch.allclose(logits, wanted[0], atol=1e-3) and torch.allclose(
        latent.float(), wanted[1].float(), atol=5e-2
    )
    return "" if near else "rows differ"


def test_x_before_the_wait_is_found() -> None:
    wide = {**TINY, "k": 7168}
    built = store().get(kernel(8, wide))
    assert chain(built) == ""
    assert chain(built, seed=5) == ""
    waits = "griddepcontrol.wait;"
    assert built.ptx.count(waits) >= 1
    with pytest.raises(OverlapError):
        chain(replace(built, ptx=built.ptx.replace(waits, "")))


def test_weights_are_asked_for_before_the_predecessor_has_ended() -> None:
    variant = full(16, 8)
    before, _, behind = store().get(variant).ptx.partition("griddepcontrol.wait")
    grid = config_of(variant).geometry
    assert before.count("ld.global.nc") == 4 * grid.ring
    assert behind.count("ld.global.nc") == 4 * (grid.blocks - grid.ring)
    assert grid.ring >= 12
    assert "bulk" not in before  # x is the predecessor's
    assert SMALL["k"] < variant.size("k")
