"""No data races in the stream kernel, and nothing of its order that could be left out unnoticed."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
from attention_runs import kernel

from k3fuse.kernels.attention_projection.builder import config_of
from k3fuse.kernels.attention_projection.cases import (
    STREAM_K,
    STREAM_LIMITS,
    STREAM_ROWS,
    step,
)
from k3fuse.kernels.attention_projection.stream_config import StreamConfig
from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.check import Launch, run_sequence
from k3fuse.kernels.common.tolerances import compare
from k3fuse.kernels.simulator import SimulationError
from stored import store

pytest.importorskip("cutlass")

# One cluster, two tiles of four blocks, three places of the ring, the second tile's sums in x.
TOKENS = 9
_ORDER = re.compile(
    r"^[^\n/]*(?:fence\.proxy|mbarrier\.try_wait|barrier\.cluster|tcgen05\.commit"
    r"|mbarrier\.arrive\.expect_tx|tcgen05\.(?:de)?alloc)[^\n]*$",
    re.MULTILINE,
)
# Fences of the tensor core's own and of mbarriers' initialisation order nothing in the simulator,
# which keeps tensor memory and mbarriers consistent. The other waits of the list: test_overlap.
SITES = 47
# One of each kind: what the test of every change looks at; the others are nightly.
FEW = (0, 6, 7, 8, 11, 23, 24, 25, 41, 42, 43, 44, 46)


@cache
def built() -> Built:
    return store().get(kernel(16, (STREAM_ROWS,), STREAM_K, **STREAM_LIMITS))


def found(made: Built, seed: int | None = None, *, races: bool = True) -> str:
    """What a run of the kernel reports; "" for nothing."""
    problem = step(made.variant, TOKENS, 1)
    (launch,) = problem.launches
    try:
        report = run_sequence([Launch(made, launch.ranks)], races=races, seed=seed, cache=store())
    except SimulationError as error:
        return str(error)
    wrong = [o for o in problem.outputs if not compare(o.tensor, o.expected, o.tolerance).ok]
    return "; ".join([*(report.races or ()), *(f"{o.name} is wrong" for o in wrong)])


def sites() -> list[re.Match[str]]:
    lines = _ORDER.finditer(built().ptx)
    return [site for site in lines if "cp.async" not in site[0] and "st.async" not in site[0]]


def test_the_kernel_has_no_races() -> None:
    config = config_of(built().variant)
    assert isinstance(config, StreamConfig)
    assert (config.slots, config.blocks, config.stages, config.early) == (2, 4, 3, 1)
    for seed in (None, 1):
        assert found(built(), seed) == ""
    assert len(sites()) == SITES


@pytest.mark.parametrize(
    "site", [pytest.param(i, marks=() if i in FEW else pytest.mark.nightly) for i in range(SITES)]
)
def test_what_is_left_out_is_found(site: int) -> None:
    place = sites()[site]
    less = built().ptx[: place.start()] + built().ptx[place.end() :]
    assert found(replace(built(), ptx=less)), place[0]


# Warps of the readers but the one that gives tensor memory back, held up before they read.
_SLOW = """
{ .reg .pred p; .reg .u32 t, n; mov.u32 t, %tid.x; mov.u32 n, 0; setp.lt.u32 p, t, 160;
@p bra ON; HELD: add.u32 n, n, 1; setp.lt.u32 p, n, 4000; @p bra HELD; ON: }
"""


def test_tensor_memory_is_given_back_behind_the_last_read() -> None:
    ptx = built().ptx
    last = ptx.rindex("tcgen05.ld.sync")
    at = ptx.rindex("\n", 0, last)
    slow = ptx[:at] + _SLOW + ptx[at:]
    assert found(replace(built(), ptx=slow), races=False) == ""
    (barrier,) = re.findall(r"^\s*bar\.sync[^\n]*$", slow, re.MULTILINE)
    said = found(replace(built(), ptx=slow.replace(barrier, "")), races=False)
    assert "not allocated" in said
