"""Where weights lie. Kernels read them in place; those of an exchange are copied where they cannot.

An op that exchanges rows has to go the same way on every rank: one that ran the composition would
wait in a collective, and its peers in their mailboxes. Dtypes, shapes and forms are alike on all
ranks, which have agreed on the rewrite. Addresses and strides are a rank's own, so they must not
decide: `misfit` of such an op does not ask for them, and its launch takes what `placed` gives.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from k3fuse.kernels.common.operands import ALIGNMENT

log = logging.getLogger("k3fuse")

_SAID: set[tuple[str, str, str]] = set()
_LOCK = threading.Lock()


def misplaced(weight: Tensor) -> str:
    """Why a kernel cannot read a weight in place, "" where it can: contiguous, 16-byte aligned."""
    if not weight.is_contiguous():
        return f"has strides {weight.stride()}, the kernel reads contiguous rows"
    return unaligned(weight)


def unaligned(weight: Tensor) -> str:
    """Why a kernel cannot start to read here, "" where it can."""
    if weight.data_ptr() % ALIGNMENT:
        return f"starts at no multiple of {ALIGNMENT} bytes"
    return ""


def placed(
    op: str, weights: Mapping[str, Tensor], against: Callable[[Tensor], str] = misplaced
) -> dict[str, Tensor]:
    """The weights by name, one that `against` has a reason for as a copy that is made in each call.

    Each reason is logged once a process, with its name, its size and the fix: a copy costs what
    reading and writing the weight does. It is made in the current stream, so a captured graph makes
    it at each replay.
    """
    found: dict[str, Tensor] = {}
    copied = False
    for name, weight in weights.items():
        reason = against(weight)
        if reason:
            _say(op, name, reason, weight)
            copied = True
        found[name] = weight.clone(memory_format=torch.contiguous_format) if reason else weight
    if copied:
        # Kernels start to read weights before they wait for the launch in front of them. With one
        # more in between, the copies have ended when it starts.
        torch.zeros(1, device=next(iter(found.values())).device)
    return found


def _say(op: str, name: str, reason: str, weight: Tensor) -> None:
    with _LOCK:
        if (op, name, reason) in _SAID:
            return
        _SAID.add((op, name, reason))
    log.warning(
        "k3fuse.%s: %s %s; it is copied in every call (%.1f MB), so that this rank goes the way of "
        "the others. Make it contiguous and %d-byte aligned where it is loaded",
        op, name, reason, weight.nbytes / 1e6, ALIGNMENT,
    )  # fmt: skip
