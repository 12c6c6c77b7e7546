"""The prefetch between a predecessor and the output projection: who waits for whom, and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from exchange import kernel, store
from host_ranks import HostRanks, Recorder
from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.check import Launch
from k3fuse.kernels.output_projection.config import CONSUMER, FUSED, PRODUCER
from k3fuse.kernels.output_projection.launch import Residual, launch
from k3fuse.kernels.output_projection.policy import TABLE
from k3fuse.kernels.prefetch.builder import BUILDER
from k3fuse.kernels.prefetch.launch import Ahead
from left_out import sites
from scaled import Scaled
from test_output_projection_launch import DELTA, EPS, Step, expected, rows
from tolerances import assert_close

pytest.importorskip("cutlass")

WAIT = "griddepcontrol.wait;"
SIZE = 40_000  # three requests


def asked(built: Built | None = None) -> Launch:
    """A prefetch of one weight; `built` in its kernel's place."""
    variant = BUILDER.variant("sm_103a", {"ranges": 4}, {"ctas": 2})
    given: dict[str, Any] = {f"range{i}": 0 for i in range(4)} | {f"bytes{i}": 0 for i in range(4)}
    given |= {"range0": torch.zeros(SIZE, dtype=torch.uint8), "bytes0": SIZE}
    return Launch(built or store().get(variant), [given])


def unwaited() -> Built:
    built = store().get(BUILDER.variant("sm_103a", {"ranges": 4}, {"ctas": 2}))
    assert built.ptx.count(WAIT) == 1
    return replace(built, ptx=built.ptx.replace(WAIT, ""))


FORMS: dict[str, Callable[[Launch], Scaled]] = {
    "fused": lambda p: Scaled([kernel(FUSED, 8, 8, blocks=1)], 1, ahead=[p]),
    "split": lambda p: Scaled(
        [kernel(s, 8, 1, blocks=1) for s in (PRODUCER, CONSUMER)], 1, ahead=[p]
    ),
}


@pytest.mark.parametrize("form", ["fused", pytest.param("split", marks=pytest.mark.nightly)])
def test_who_waits_for_the_prefetch_finds_what_came_before_it(form: str) -> None:
    """AttnRes makes x and the prefix; races are looked for, and two random schedules run."""
    scaled = FORMS[form](asked())
    assert scaled.found() == ""
    # Without the wait at its end the projection may start reading x while AttnRes still writes it.
    assert "OverlapError" in FORMS[form](asked(unwaited())).found()
    # The projection's own wait is needed as before.
    less = [mutated for text, mutated in sites(scaled.built[-1]) if text == WAIT]
    assert less
    assert [bool(scaled.found(mutated)) for mutated in less] == [True] * len(less)


@pytest.mark.nightly
def test_the_host_code_of_all_ranks_asks_for_its_rows_once() -> None:
    """Of a weight whose rows the ranks split, each asks for its own; then one whole weight."""
    step, form = Step("gb300:tp8", 1, 5), DELTA
    split, whole = rows(896, 256, 1), rows(40, 64, 2)
    inputs = []
    row = TABLE.lookup("gb300:tp8", 1)
    assert row is not None
    for rank in range(8):
        own = [step.prefix, step.bank, *step.weights, split, whole]
        inputs.append([step.x[rank], step.w[rank], *(t.clone() for t in own)])

    def call(rank: int, recorder: Recorder, space: Any) -> list[torch.Tensor]:
        runtime: Any = recorder
        x, w, prefix, bank, first, second, third, *weights = inputs[rank]
        given = Residual(form, prefix, [bank], first, second, third, EPS, EPS)
        return launch(
            row, "gb300:tp8", "tp", x, w, given, Ahead(weights, (896, 0)), runtime=runtime,
            space=space,
        )  # fmt: skip

    ranks = HostRanks(8, multicast=True)
    results, report = ranks.step(call, inputs)
    for rank, got in enumerate(results):
        for mine, first, want in zip(got, results[0], expected(step, form), strict=True):
            assert torch.equal(mine, first), rank
            assert_close(mine, want, k=1536, roundings=4)
    assert all(space.armed() and space.error() is None for space in ranks.spaces)
    asked_for = report.launches[0].traffic
    assert {way for *_, way in asked_for} == {"read"}
    for rank in range(8):
        parts = [part for (who, _, _, _), part in asked_for.items() if who == rank]
        assert sum(p.distinct for p in parts) == 112 * 512 + whole.nbytes
        assert sum(p.requested for p in parts) == 112 * 512 + whole.nbytes
