"""Mailboxes of all ranks on one device, and what the other ranks send to one of them.

Nobody on the host knows a call's parity while graphs are replayed in any order: so both parities
get everything, and the kernel leaves one of them as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3fuse.kernels.check.gpu import Device
from k3fuse.kernels.common.geometry import HIDDEN
from k3fuse.kernels.common.mailbox import MAX_M, PARITIES
from k3fuse.kernels.tail.mailbox import LATENT, TailMailbox
from k3fuse.kernels.tail.problem import ARMED


class Mailboxes:
    """The mailboxes of `tp` ranks; partials [tp, rows, L] and [tp, rows, H], none of them -0.0."""

    def __init__(self, device: Device, tp: int, routed: Tensor, shared: Tensor) -> None:
        self.tp, self.layout = tp, TailMailbox(tp)
        layout = self.layout
        self.words = device.put(torch.zeros(tp, layout.total // 4, dtype=torch.int32))

        def region(start: int, end: int, *shape: int) -> Tensor:
            return self.words[:, start // 4 : end // 4].view(tp, PARITIES, *shape)

        width = HIDDEN // tp
        self.latent = region(layout.latent, layout.shared, tp, MAX_M, LATENT // 2)
        self.shared = region(layout.shared, layout.rows, tp, MAX_M, width // 2)
        self.rows = region(layout.rows, layout.normed, MAX_M, HIDDEN // 2)
        self.normed = region(layout.normed, layout.data, MAX_M, LATENT // 2)
        self.control = self.words[:, layout.control // 4 : layout.error // 4]
        self.sent_latent = routed.view(torch.int32)
        # By owner: the columns that it adds up, of all ranks.
        parts = shared.view(*shared.shape[:2], tp, width)
        self.sent_shared = parts.permute(2, 0, 1, 3).contiguous().view(torch.int32)
        self.kept = torch.empty_like(self.normed[0, 0])
        self.missed = device.put(torch.zeros(1, dtype=torch.int64))

    def own(self, rank: int) -> slice:
        """The columns of a finished row that a rank owns."""
        width = HIDDEN // self.tp
        return slice(rank * width, (rank + 1) * width)

    def _pairs(self, rank: int) -> slice:
        own = self.own(rank)
        return slice(own.start // 2, own.stop // 2)

    def _others(self, rank: int) -> list[slice]:
        return [slice(0, rank), slice(rank + 1, self.tp)]

    def stand_ins(self, m: int) -> Tensor:
        """Normalised rows for a pass in which only the owners' own ones count."""
        return self.kept[:m].fill_(0)

    def deliver(self, rank: int, m: int, finished: Tensor, normed: Tensor | None) -> None:
        """What the other ranks send to `rank`; `normed` rows in two-shot form alone.

        finished [m, H] BF16, normed [m, L] BF16 or as words. The last operation is a kernel: in a
        graph, PDL has no edge from a copy of memory.
        """
        tokens = slice(rank, m, self.tp) if normed is not None else slice(0, m)
        for other in self._others(rank):
            self.latent[rank, :, other, tokens] = self.sent_latent[other, tokens]
            self.shared[rank, :, other, :m] = self.sent_shared[rank, other, :m]
        if normed is not None:
            self.normed[rank, :, :m] = normed.view(torch.int32)
            self.normed[rank, :, tokens].fill_(ARMED)
        self.rows[rank, :, :m] = finished.view(torch.int32)
        self.rows[rank, :, :m, self._pairs(rank)].fill_(ARMED)

    def look(self, rank: int, m: int, two_shot: bool) -> None:
        """Count where the kernel has not read one whole parity, or has left something behind."""
        latent, shared = self.latent[rank], self.shared[rank]
        tokens = slice(rank, m, self.tp) if two_shot else slice(0, m)
        taken = [self.rows[rank, :, :m]]
        for other in self._others(rank):
            if other.stop > other.start:
                taken.append(shared[:, other, :m])
                if tokens.start < m:
                    taken.append(latent[:, other, tokens])
        for words in taken:
            armed = (words == ARMED).flatten(1).all(1)
            self.missed += armed[0] == armed[1]
        # Its own slots, and the row's own columns, which it fills and reads itself.
        for words in (latent[:, rank, :m], shared[:, rank, :m]):
            self.missed += (words != ARMED).any()

    def keep(self, rank: int, m: int) -> None:
        """Keep the normalised rows that a rank owns: those of the parity that is not armed."""
        first, second = self.normed[rank, :, rank : m : self.tp]
        self.kept[rank : m : self.tp] = torch.where(first == ARMED, second, first)

    def clear(self, rank: int, m: int, two_shot: bool) -> None:
        """Take back what was delivered to a rank and what it has sent.

        In one-shot form its normalised rows stay: the next call arms them.
        """
        for words in (self.latent, self.shared):
            words[rank, :, :, :m].fill_(ARMED)
            words[:, :, rank, :m].fill_(ARMED)
        self.rows[rank, :, :m].fill_(ARMED)
        self.rows[:, :, :m, self._pairs(rank)].fill_(ARMED)
        if two_shot:
            self.normed[rank, :, :m].fill_(ARMED)
            self.normed[:, :, rank : m : self.tp].fill_(ARMED)
