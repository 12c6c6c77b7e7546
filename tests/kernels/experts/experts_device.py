"""A stand-in for the one GPU: gate and up, and the experts, on raw addresses, in PyTorch."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from k3fuse.kernels.build.variant import Variant, parameter_names
from k3fuse.kernels.experts import reference
from k3fuse.kernels.experts.builder import config_of
from k3fuse.kernels.experts.config import CLUSTER, WARPS
from k3fuse.kernels.experts.reference import Activation
from stand_in import StandIn, at

BF16 = torch.bfloat16


def situ(given: Any) -> Activation:
    """The activation whose betas a launch names by the bits of FP32."""
    betas = (struct.unpack("f", struct.pack("i", b))[0] for b in (given.beta, given.linear_beta))
    return Activation("situ", *betas)


class Functional(StandIn):
    """Kernels that compute what the reference says.

    broken: the experts take the "next expert", or "leave" a count.
    """

    def launch(self, variant: Variant, values: Sequence[int]) -> None:
        self.launched.append(variant)
        given = SimpleNamespace(**dict(zip(parameter_names(variant), values, strict=True)))
        (self._gate_up if variant.op == "shared_gate_up" else self._experts)(variant, given)

    @staticmethod
    def _gate_up(variant: Variant, given: Any) -> None:
        k, width = variant.size("k"), variant.size("width")
        assert given.x_pitch == k
        x = at(given.x, (given.m, k)).double()
        gate, up = ((x @ at(w, (width, k)).double().t()).to(BF16) for w in (given.gate, given.up))
        at(given.hidden, (given.m, width)).copy_(situ(given)(gate, up))

    def _experts(self, variant: Variant, given: Any) -> None:
        config, m, count = config_of(variant), given.m, given.experts
        assert (given.x_pitch, given.shared_pitch) == (config.latent, config.shared)
        x = at(given.x, (m, config.latent))
        ids = at(given.ids, (m, config.top_k), torch.int64)
        if self.broken == "next expert":
            ids = (ids + 1) % count
        first, half = (count, 2 * config.inter), config.latent // 2
        weights = (
            at(given.w13, (*first, half), torch.uint8),
            at(given.w13_scale, (*first, half // 16), torch.uint8),
            at(given.w2, (count, config.latent, config.inter // 2), torch.uint8),
            at(given.w2_scale, (count, config.latent, config.inter // 32), torch.uint8),
        )
        rows = torch.cat(  # token by token: the reference's bits depend on the batch
            [
                reference.routed_rows(x[t : t + 1], ids[t : t + 1], *weights, situ(given), False)
                for t in range(m)
            ]
        )
        summed = reference.weighted_sum(rows, at(given.weights, (m, config.top_k)))
        at(given.routed, (m, config.latent)).copy_(summed)
        down = at(given.shared_down, (config.hidden, config.shared)).double()
        shared = at(given.shared_x, (m, config.shared)).double() @ down.t()
        at(given.shared_out, (m, config.hidden)).copy_(shared)
        counts = at(given.arrivals, (64, CLUSTER, WARPS), torch.int32)
        assert not counts.any()
        counts[0, 0, 0] = int(self.broken == "leave")
