"""Behind AttnRes and before another projection, in stream order: who may read what, when."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_runs import BF16, HIDDEN, band, exact, kernel, operands
from torch import Tensor

from k3fuse.kernels.attention_projection.cases import values
from k3fuse.kernels.attn_res.builder import BUILDER as ATTN_RES
from k3fuse.kernels.attn_res.cases import step as attn_res_step
from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.check import Launch, run_sequence
from k3fuse.kernels.common.tolerances import compare
from k3fuse.kernels.simulator import Fresh, OverlapError
from stored import store

pytest.importorskip("cutlass")

M, ROWS, NARROW = 3, (512, 12), (40,)


def chain(second: Built, seed: int | None = None) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """AttnRes makes x, `second` projects it to K = 512 columns, a third projects those."""
    before = attn_res_step(ATTN_RES.variant("sm_103a", {"m": M, "blocks": 0}, {"delta": 0}), 1)
    given = dict(before.launches[0].ranks[0])
    made = given["out"]
    assert isinstance(made, Fresh)
    x = made.tensor
    weights, more = operands(M, ROWS)[1], operands(M, NARROW, 512)[1]
    outs = [torch.empty(M, n, dtype=BF16) for n in ROWS]
    last = [torch.empty(M, n, dtype=BF16) for n in NARROW]
    reader = kernel(8, NARROW, 512, **dict(second.variant.config))
    run_sequence(
        [
            Launch(before.launches[0].kernel, [given]),
            Launch(second, [values(second.variant, x, weights, outs, fresh=True)]),
            Launch(reader, [values(reader, outs[0], more, last, fresh=True)]),
        ],
        seed=seed,
        cache=store(),
    )
    for out, weight in zip(outs, weights, strict=True):
        assert compare(out, exact(x, weight), band(HIDDEN)).ok
    assert compare(last[0], exact(outs[0], more[0]), band(512)).ok
    return x, outs, last


@pytest.mark.parametrize("stream", [0, 1])
def test_between_attn_res_and_a_consumer(stream: int) -> None:
    built = store().get(kernel(8, ROWS, stream=stream))
    _, outs, last = chain(built)
    _, again, same = chain(built, seed=5)
    for a, b in zip([*outs, *last], [*again, *same], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("stream", "count"), [(0, 2), (1, 1)])
def test_x_before_the_wait_is_found(stream: int, count: int) -> None:
    built = store().get(kernel(8, ROWS, stream=stream))
    waits = "griddepcontrol.wait;"
    # Of warps with a tile and of those without; of the warp that copies x.
    assert built.ptx.count(waits) == count
    with pytest.raises(OverlapError):
        chain(replace(built, ptx=built.ptx.replace(waits, "")))
