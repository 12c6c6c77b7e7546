"""AttnRes where it stands alone: two tokens a cluster share the weights, with the same bits."""

from __future__ import annotations

from typing import Any

import pytest

from exchange import core, same
from k3fuse.kernels.attn_res.builder import BUILDER
from k3fuse.kernels.attn_res.cases import step
from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.check import Launch, run_sequence
from k3fuse.kernels.check.case import Step
from k3fuse.kernels.common.tolerances import compare
from k3fuse.kernels.simulator import SimulationError
from left_out import sites
from stored import store

pytest.importorskip("cutlass")

# Upstream's warp-instructions at M = 1, blocks -> count (docs page).
UPSTREAM = {0: 4_018, 8: 19_775}
FORMS: dict[str, dict[str, int]] = {
    "delta": {}, "no delta": {"delta": 0}, "no norm": {"norm": 0}, "final": {"round_mix": 1},
}  # fmt: skip


def ran(m: int, blocks: int, tokens: int = 0, **config: int) -> tuple[Step, Any]:
    """The kernel for m tokens, run on `tokens` of them and compared with the reference."""
    made = step(BUILDER.variant("sm_103a", {"m": m, "blocks": blocks}, config), 1, tokens)
    (report,) = run_sequence(made.launches, cache=store()).reports
    for output in made.outputs:
        assert compare(output.tensor, output.expected, output.tolerance).ok, output.name
    return made, report


NIGHTLY = pytest.param(0, marks=pytest.mark.nightly)


@pytest.mark.parametrize("blocks", [NIGHTLY, 8])
def test_figures(blocks: int) -> None:
    _, one = ran(1, blocks)
    assert one.bytes_requested == one.bytes_needed
    assert core(one) <= UPSTREAM[blocks]
    _, many = ran(8, blocks)
    assert many.bytes_requested <= 1.15 * many.bytes_needed


def bits_alone(blocks: int, **config: int) -> None:
    found = []
    for m in (1, 8):
        made, _ = ran(m, blocks, tokens=1, **config)
        found.append([output.tensor for output in made.outputs])
    assert all(same(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("blocks", [NIGHTLY, 8])
def test_a_lone_token_has_the_bits_it_has_where_two_share_weights(blocks: int) -> None:
    bits_alone(blocks)


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("blocks", [0, 1, 2, 4, 5, 8])
def test_every_form(form: str, blocks: int) -> None:
    for tokens in (2, 3, 7, 8):
        ran(8, blocks, tokens, **FORMS[form])
    bits_alone(blocks, **FORMS[form])


def what_is_found(built: Built) -> str:
    """Races and wrong orders of two tokens behind a kernel that writes their deltas."""
    before = step(BUILDER.variant("sm_103a", {"m": 2, "blocks": 0}, {}), 2)
    made = step(built.variant, 1)
    first, values = dict(before.launches[0].ranks[0]), dict(made.launches[0].ranks[0])
    first["out"] = values["delta"]
    # Equal scores and a block that cancels: the wait for the squares is taken, too.
    total = values["prefix"].float() + before.outputs[0].expected.float()
    values["score_proj"].zero_()
    values["block0"].copy_(-total * (1 + 2**-7))
    launches = [Launch(before.launches[0].kernel, [first]), Launch(built, [values])]
    try:
        report = run_sequence(launches, races=True, cache=store())
    except SimulationError as error:
        return str(error)
    return "; ".join(report.races or ())


@pytest.mark.nightly
def test_nothing_can_be_left_out() -> None:
    built = store().get(BUILDER.variant("sm_103a", {"m": 2, "blocks": 1}, {}))
    assert what_is_found(built) == ""
    found = sites(built)
    assert len(found) == 17
    assert [text for text, mutated in found if not what_is_found(mutated)] == []
