"""CTAs that find no room wait for others to exit; a grid that needs all of them deadlocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from k3fuse.kernels.simulator import DeadlockError, Launch, SimReport, simulate, simulate_sequence
from ptx_text import kernel

SEEDS = (None, *range(20))
SMEM = 120_000  # one CTA an SM
# CTA i waits for the flag that CTA i + {ahead} sets after its own wait; the last ones do not wait.
CHAIN = """
  setp.ne.u32 %p1, %r0, 0;
  @%p1 bra DONE;
  add.s32 %r2, %r1, {ahead};
  setp.ge.u32 %p2, %r2, {ctas};
  @%p2 bra SET;
  mul.wide.u32 %d3, %r2, 4;
  add.s64 %d3, %d0, %d3;
WAIT:
  ld.acquire.gpu.global.u32 %r5, [%d3];
  setp.eq.u32 %p3, %r5, 0;
  @%p3 bra WAIT;
SET:
  mul.wide.u32 %d4, %r1, 4;
  add.s64 %d4, %d0, %d4;
  st.release.gpu.global.u32 [%d4], 1;
DONE:
"""


def chain(
    ctas: int, ahead: int, sms: int | None, seed: int | None, cluster: int = 1
) -> tuple[list[int], SimReport]:
    flags = torch.zeros(ctas, dtype=torch.int32)
    report = simulate(
        kernel(CHAIN.format(ahead=ahead, ctas=ctas), params=1), grid=(ctas, 1, 1),
        cluster=(cluster, 1, 1), block=(32, 1, 1), params=[[flags]], dynamic_smem=SMEM, sms=sms,
        seed=seed,
    )  # fmt: skip
    return flags.tolist(), report


@pytest.mark.parametrize("seed", SEEDS)
def test_a_grid_whose_first_ctas_wait_for_its_last(seed: int | None) -> None:
    for sms in (None, 8, 20):
        assert chain(8, 1, sms, seed)[0] == [1] * 8
    with pytest.raises(DeadlockError) as caught:
        chain(8, 1, 7, seed)
    message = str(caught.value)
    assert (
        "7 CTAs wait for CTAs that are not resident: 1 of the 8 CTAs of the grid find no room on 7 "
        "SMs, bound by shared memory" in message
    )
    assert "reads 0x0 from byte 4 of buffer 'p0'" in message


def test_a_grid_whose_last_ctas_wait_for_its_first_needs_one_sm() -> None:
    for seed in SEEDS:
        flags, report = chain(8, -1, 1, seed)
        assert flags == [1] * 8
        assert report.opcodes["st.release.gpu.global.u32"] == 8


def test_clusters_are_resident_whole() -> None:
    for seed in (None, 1, 2):
        assert chain(8, 2, 8, seed, cluster=2)[0] == [1] * 8
        with pytest.raises(DeadlockError, match=r"6 CTAs wait .*: 2 of the 8 CTAs"):
            chain(8, 2, 7, seed, cluster=2)


def test_several_ctas_share_an_sm() -> None:
    flags = torch.zeros(40, dtype=torch.int32)
    text = kernel(CHAIN.format(ahead=1, ctas=40), params=1)
    options: dict[str, Any] = {"grid": (40, 1, 1), "block": (32, 1, 1), "params": [[flags]]}
    simulate(text, sms=2, **options)
    assert flags.tolist() == [1] * 40
    flags.zero_()
    with pytest.raises(DeadlockError, match="8 of the 40 CTAs of the grid find no room on 1 SMs"):
        simulate(text, sms=1, **options)
    flags.zero_()
    # 32 threads of 255 registers take 8192: 8 CTAs an SM.
    with pytest.raises(DeadlockError, match=r"24 of the 40 .* on 2 SMs, bound by registers"):
        simulate(text, sms=2, registers=255, **options)


def pair(sms: int, seed: int | None, polled: bool = True) -> list[int]:
    """A successor that polls before its wait, of a producer that triggers at once."""
    flag, out = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    wait = "griddepcontrol.wait;"
    poll = (
        "AGAIN:\nld.acquire.gpu.global.u32 %r5, [%d3];\nsetp.eq.u32 %p3, %r5, 0;\n@%p3 bra AGAIN;\n"
    )
    address = "mul.wide.u32 %d2, %r1, 4;\nadd.s64 %d3, %d0, %d2;\nadd.s64 %d4, %d1, %d2;\n"
    producer = address + "griddepcontrol.launch_dependents;\nst.release.gpu.global.u32 [%d3], 5;"
    consumer = address + poll + "st.relaxed.gpu.global.u32 [%d4], %r5;\n" + wait
    # The middle launch holds every SM until the consumer, which finds no room, has answered.
    hold = "griddepcontrol.launch_dependents;\n" + address.replace("%d0", "%d1") + poll + wait
    grids = [(4, producer), (3 if polled else 1, hold), (4, consumer)]
    simulate_sequence(
        [
            Launch(kernel(body), (ctas, 1, 1), (32, 1, 1), [[flag, out]], dynamic_smem=SMEM,
                   pdl=place > 0, label=name)
            for place, ((ctas, body), name) in enumerate(
                zip(grids, ("produce", "hold", "consume"), strict=True)
            )
        ],
        sms=sms, seed=seed,
    )  # fmt: skip
    return out.tolist()


def test_a_successor_takes_free_slots_only() -> None:
    for seed in SEEDS:
        assert pair(7, seed) == [5] * 4
        assert pair(4, seed) == [5] * 4, "consumer CTAs that exit make room for the others"
        with pytest.raises(DeadlockError) as caught:
            pair(3, seed)
        assert (
            "3 CTAs wait for CTAs that are not resident: 4 of the 4 CTAs of launch 2 'consume'"
            in (str(caught.value))
        )
        assert pair(3, seed, polled=False) == [5] * 4


def test_a_cta_that_no_sm_holds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no cluster of 16 CTAs of .* 4 SMs, bound by shared"):
        chain(16, 1, 4, None, cluster=16)
