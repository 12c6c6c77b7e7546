"""The mailboxes of a process group in symmetric memory: allocated once, kept, checked.

`workspace` gives every rank of a group the same thing: its own mailbox (laid out by
`kernels/common/mailbox.py`, or by another `Layout`: one area a purpose), the addresses of all such
mailboxes of the group in rank order, and the multicast address where the fabric has one. It is a
collective call, so all ranks of the group must
make it, and it allocates and waits, so it must come before a CUDA graph is captured: one step run
without a graph is enough, and what was captured stays valid for every later token count.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from k3fuse.kernels.common.collective import resolve_group
from k3fuse.kernels.common.mailbox import HIDDEN, SENTINEL, WORD, ErrorWord, Mailbox

# The sentinel as the signed number that torch fills with.
_EMPTY = SENTINEL - (1 << 32)


class ExchangeError(RuntimeError):
    """A mailbox that cannot be made or must not be used any more; the text names the fix."""


@dataclass(frozen=True)
class Mapped:
    """Symmetric memory after the ranks have met.

    addresses: of every rank's memory as this process sees it, in rank order. multicast: one address
    that stores into all of them, 0 where there is none. handle: keeps the mapping alive.
    """

    addresses: tuple[int, ...]
    multicast: int
    handle: Any = field(repr=False)


class SymmetricMemory(Protocol):
    """Memory that the ranks of a group can store into."""

    def allocate(self, size: int) -> Tensor:
        """Return `size` bytes of this rank's memory, uint8, on the current device."""

    def rendezvous(self, memory: Tensor, group: dist.ProcessGroup) -> Mapped:
        """Map the memory of all ranks; collective."""

    def meet(self, group: dist.ProcessGroup) -> None:
        """Return when every rank of the group has got here with its stores performed."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""


class TorchSymmetricMemory:
    """`torch.distributed._symmetric_memory` on the current CUDA device."""

    def allocate(self, size: int) -> Tensor:
        """Memory that peers can map."""
        from torch.distributed import _symmetric_memory as symmetric

        device = torch.device("cuda", torch.cuda.current_device())
        return symmetric.empty(size, dtype=torch.uint8, device=device)

    def rendezvous(self, memory: Tensor, group: dist.ProcessGroup) -> Mapped:
        """Map all ranks; the multicast address where NVLS is there."""
        from torch.distributed import _symmetric_memory as symmetric

        handle: Any = symmetric.rendezvous(memory, group)
        start = int(handle.offset)
        addresses = tuple(int(p) + start for p in handle.buffer_ptrs)
        multicast = int(handle.multicast_ptr)
        return Mapped(addresses, multicast + start if multicast else 0, handle)

    def meet(self, group: dist.ProcessGroup) -> None:
        """Finish this device's work, then a barrier."""
        torch.cuda.synchronize()
        dist.barrier(group=group)

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return bool(torch.cuda.is_current_stream_capturing())


class Layout(Protocol):
    """How a mailbox is laid out, in bytes: slots that are armed, then counters, then the error.

    Frozen, and equal where everything is.
    """

    @property
    def tp(self) -> int:
        """Ranks of the group."""

    @property
    def data(self) -> int:
        """Bytes from the start that hold the sentinel between two calls."""

    @property
    def error(self) -> int:
        """Offset of the sticky error word."""

    @property
    def total(self) -> int:
        """Bytes of everything."""


@dataclass(frozen=True)
class Workspace:
    """One rank's side of a group's mailboxes.

    memory: this rank's mailbox, uint8. The addresses are those of `Mapped`.
    """

    group: str
    rank: int
    mailbox: Layout
    memory: Tensor = field(repr=False)
    mapped: Mapped = field(repr=False)
    provider: SymmetricMemory = field(repr=False)

    @property
    def multicast(self) -> bool:
        """Whether publications go through the multicast address, else to one peer after another."""
        return self.mapped.multicast != 0

    @property
    def own(self) -> int:
        """Address of this rank's mailbox."""
        return self.mapped.addresses[self.rank]

    def fill(self) -> None:
        """Arm all slots and clear counters and the error word; this rank's mailbox only."""
        words = self.memory.view(torch.int32)
        end = self.mailbox.data // WORD
        words[:end].fill_(_EMPTY)
        words[end:].zero_()

    def armed(self) -> bool:
        """Whether every slot of this rank holds the sentinel, as it must between two calls."""
        words = self.memory.view(torch.int32)[: self.mailbox.data // WORD]
        return bool((words == _EMPTY).all())

    def error(self) -> ErrorWord | None:
        """What a poll that timed out has left; reads device memory, so it waits for the device."""
        place = self.mailbox.error // WORD
        return ErrorWord.of(int(self.memory.view(torch.int32)[place].item()) & 0xFFFFFFFF)

    def check(self) -> None:
        """Raise ExchangeError where a poll has timed out; waits for the device."""
        found = self.error()
        if found is not None:
            raise ExchangeError(f"group {self.group!r}, rank {self.rank}: {found.sentence()}")

    def reset(self) -> None:
        """Arm the mailboxes of the whole group again after an aborted step; collective.

        No rank may have a kernel of the group in flight that a peer does not finish.
        """
        group = resolve_group(self.group)
        # Nobody may fill while a peer's last publications are still under way.
        self.provider.meet(group)
        self.fill()
        self.provider.meet(group)


_MADE: dict[tuple[str, int, object], Workspace] = {}
_LOCK = threading.Lock()
_TORCH = TorchSymmetricMemory()


def workspace(
    group: str,
    tp: int,
    *,
    hidden: int = HIDDEN,
    layout: Layout | None = None,
    provider: SymmetricMemory | None = None,
    device: Callable[[], int] | None = None,
) -> Workspace:
    """The mailboxes of `group`, made at the first call of this process and then always the same.

    group: a process group name; it need not be the world. tp: ranks that the kernels were compiled
    for. layout: of mailboxes of their own; by default the all-reduce's, `Mailbox` of `hidden`
    elements a row. Collective at the first call with a layout. Raises ExchangeError for a group of
    another size, inside a graph capture, and where the memory cannot be shared.
    """
    memory = provider or _TORCH
    index = (device or torch.cuda.current_device)()
    key = group, index, layout or hidden
    with _LOCK:
        found = _MADE.get(key)
        if found is None:
            found = _MADE[key] = _make(group, tp, layout or Mailbox(tp, hidden), memory)
        if found.mailbox.tp != tp:
            raise ExchangeError(_other_size(group, found.mailbox.tp, tp))
        return found


def forget(group: str) -> None:
    """Drop the mailboxes of a group that is destroyed; nothing captured may run any more."""
    with _LOCK:
        for key in [k for k in _MADE if k[0] == group]:
            del _MADE[key]


def _make(group: str, tp: int, box: Layout, memory: SymmetricMemory) -> Workspace:
    if memory.capturing():
        raise ExchangeError(
            f"the mailboxes of group {group!r} do not exist yet and cannot be made while a CUDA "
            "graph is captured; run one step without a graph first"
        )
    members = resolve_group(group)
    world, rank = dist.get_world_size(members), dist.get_rank(members)
    if world != tp:
        raise ExchangeError(_other_size(group, world, tp))
    try:
        own = memory.allocate(box.total)
        mapped = memory.rendezvous(own, members)
    except RuntimeError as error:
        raise ExchangeError(
            f"the {box.total} bytes of the mailbox of group {group!r} cannot be shared between its "
            f"ranks ({error}); they need GPUs with peer access to each other"
        ) from error
    if len(mapped.addresses) != tp:
        raise ExchangeError(_other_size(group, len(mapped.addresses), tp))
    made = Workspace(group, rank, box, own, mapped, memory)
    made.fill()
    # Nobody may publish into a mailbox that its owner still fills.
    memory.meet(members)
    return made


def _other_size(group: str, world: int, tp: int) -> str:
    return (
        f"group {group!r} has {world} ranks, the kernels are for tp={tp}; "
        f"compile for a target with tp{world}"
    )
