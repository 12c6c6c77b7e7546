"""mbarriers at constant offsets from one address, and stores to another CTA: no address arithmetic.

base: Int32, shared memory of this CTA; offsets are bytes.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from k3fuse.kernels.common.device import ptx


def init(base: Any, offset: int, count: int = 1) -> None:
    """An mbarrier for `count` arrivals a phase."""
    ptx.asm(f"mbarrier.init.shared.b64 [$0+{offset}], {count};", [], base)


def expect(base: Any, offset: int, size: Any) -> None:
    """Arrive, and expect `size` more bytes in this phase."""
    ptx.asm(f"mbarrier.arrive.expect_tx.shared.b64 _, [$0+{offset}], $1;", [], base, Int32(size))


def wait(base: Any, offset: int, parity: int, scope: str = "cta") -> None:
    """Wait for the end of the phase of `parity`; `scope` is where the awaited writes come from."""
    code = (
        "{ .reg .pred done; WAIT_${:uid}: mbarrier.try_wait.parity.acquire."
        + scope
        + f".shared::cta.b64 done, [$0+{offset}], {parity};"
        + " @done bra DONE_${:uid}; bra WAIT_${:uid}; DONE_${:uid}: }"
    )
    ptx.asm(code, [], base)


def same_place(base: Any, cta: Any) -> Any:
    """The address of the same place in CTA `cta` of the cluster."""
    code = "mapa.shared::cluster.u32 $0, $1, $2;"
    return ptx.asm(code, [Int32], base, cta, pure=True)


def send(there: Any, offset: int, values: list[Any], base: Any, barrier: int, wanted: Any) -> None:
    """Four Float32 to another CTA, where `wanted` (an Int32) is above 0.

    there: where `offset` counts from, base: where `barrier` does, both in that CTA. Their bytes are
    counted at that mbarrier.
    """
    code = (
        "{ .reg .pred p; setp.gt.s32 p, $6, 0;"
        " @p st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
        f" [$0+{offset}], {{$2,$3,$4,$5}}, [$1+{barrier}]; }}"
    )
    ptx.asm(code, [], there, base, *values, wanted)


def fence_async() -> None:
    """Writes to shared memory before come before what asynchronous copies and products do after."""
    ptx.asm("fence.proxy.async.shared::cta;", [])
