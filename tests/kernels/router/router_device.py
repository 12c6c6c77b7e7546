"""A stand-in for the one GPU: front and route kernels on raw addresses, in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.build.variant import Variant, parameter_names
from k3fuse.kernels.router import front_builder, route_bits, route_builder
from k3fuse.kernels.router.front_problem import ARMED, BF16
from k3fuse.kernels.router.layout import PRODUCERS, FrontMailbox
from stand_in import StandIn, at


class Functional(StandIn):
    """Kernels that do what the mailbox promises; one that would poll in vain is an error.

    broken: the front kernel sends "rounded" logits, or the route kernel leaves words "unarmed".
    """

    def launch(self, variant: Variant, values: Sequence[int]) -> None:
        self.launched.append(variant)
        by_name = dict(zip(parameter_names(variant), values, strict=True))
        act = self._front if variant.op == "router_front" else self._route
        act(variant, SimpleNamespace(**by_name), by_name)

    @staticmethod
    def _box(layout: FrontMailbox, address: int) -> Tensor:
        return at(address, (layout.total // 4,), torch.int32)

    def _front(self, variant: Variant, given: Any, by_name: dict[str, int]) -> None:
        config = front_builder.config_of(variant)
        layout, m = config.box, given.m
        x = at(given.x, ((m - 1) * given.x_pitch + config.k,), BF16)
        x = x.as_strided((m, config.k), (given.x_pitch, 1)).double()
        gate = at(given.gate_weight, (config.experts, config.k), BF16).double()
        logits = (x @ gate.t()).float() + 0.0
        if self.broken == "rounded":
            logits = logits.bfloat16().float()
        down = at(given.latent_weight, (config.latent, config.k), BF16).double()
        latent = (x @ down.t()).to(BF16) + 0.0
        own = self._box(layout, given.mailbox)
        counters = own[layout.control // 4 : layout.control // 4 + PRODUCERS]
        call = int(counters[0])
        counters.fill_(call + 1)
        words = latent.contiguous().view(torch.int32)
        width, part = config.rows[0], words.shape[1] // config.tp
        first = 0 if config.replicated else given.rank * width
        for owner in range(config.tp):
            box = self._box(layout, by_name[f"mailbox{owner}"])
            start = layout.at(call, 0) // 4
            rows = box[start : start + m * layout.row // 4].view(m, -1)
            if not config.replicated or owner == given.rank:
                mine = logits[:, first : first + width]
                rows[:, first : first + width] = mine.contiguous().view(torch.int32)
            place = layout.latent_offset // 4 + given.rank * part
            rows[:, place : place + part] = words[:, given.rank * part : (given.rank + 1) * part]

    def _route(self, variant: Variant, given: Any, by_name: dict[str, int]) -> None:
        config = route_builder.config_of(variant)
        layout, m = config.box, given.m
        box = self._box(layout, given.mailbox)
        call = int(box[layout.control // 4]) - 1
        start = layout.at(call, 0) // 4
        rows = box[start : start + m * layout.row // 4].view(m, -1)
        assert not (rows == ARMED).any(), "polls what nobody sends"
        middle = layout.latent_offset // 4
        logits = rows[:, :middle].clone().view(torch.float32)
        latent = rows[:, middle:].clone().view(BF16)
        if self.broken != "unarmed":
            rows.fill_(ARMED)
        at(given.latent, (m, config.latent), BF16).copy_(latent)
        if not config.top_k:
            at(given.logits_out, (m, config.experts), torch.float32).copy_(logits)
            return
        bias = at(given.bias, (config.experts,), torch.float32)
        weights, ids = route_bits.route(logits, bias, config.top_k)
        at(given.weights, (m, config.top_k), BF16).copy_(weights)
        at(given.ids, (m, config.top_k), torch.int64).copy_(ids)
