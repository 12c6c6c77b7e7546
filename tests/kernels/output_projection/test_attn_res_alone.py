"""AttnRes where it stands alone: two tokens a cluster share the weights, with the same bits."""

from __future__ import annotations

from typing import Any

import pytest

from exchange import core, same, store
from k3fuse.kernels.attn_res.builder import BUILDER
from k3fuse.kernels.attn_res.cases import step
from k3fuse.kernels.check import run_sequence
from k3fuse.kernels.check.case import Step
from k3fuse.kernels.common.tolerances import compare

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


@pytest.mark.parametrize("blocks", [0, 8])
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


@pytest.mark.parametrize("blocks", [0, 8])
def test_a_lone_token_has_the_bits_it_has_where_two_share_weights(blocks: int) -> None:
    bits_alone(blocks)


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("blocks", range(9))
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8])
def test_every_form(form: str, blocks: int, tokens: int) -> None:
    ran(8, blocks, tokens, **FORMS[form])
    ran(tokens, blocks, **FORMS[form])
    bits_alone(blocks, **FORMS[form])
