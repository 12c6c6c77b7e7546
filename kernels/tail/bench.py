"""What `k3fuse kernels gpu tail` runs: the tail alone, and with AttnRes behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from k3fuse.kernels.check.gpu import Device, GpuCase
from k3fuse.kernels.common.policy import TP_SIZES
from k3fuse.kernels.tail.mix_one_device import EmulatedMix
from k3fuse.kernels.tail.one_device import Emulated

# Name -> the case on a device, as `k3fuse kernels gpu` finds them.
GPU_CASES: Mapping[str, Callable[[Device], GpuCase]] = {
    **{f"tp{tp}": partial(Emulated, tp=tp) for tp in TP_SIZES},
    **{f"tp{tp}_attn_res": partial(EmulatedMix, tp=tp) for tp in TP_SIZES},
}
