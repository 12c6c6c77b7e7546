"""A stand-in for the one GPU: the tail's kernel on raw addresses, in PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.attn_res.reference import attn_res
from k3fuse.kernels.build.variant import Variant, parameter_names
from k3fuse.kernels.common.collective import ordered_sum
from k3fuse.kernels.common.geometry import HIDDEN
from k3fuse.kernels.common.numerics import rms_norm
from k3fuse.kernels.simulator import Inside, Launch, simulate_sequence
from k3fuse.kernels.tail.builder import config_of
from k3fuse.kernels.tail.mailbox import CTAS, LATENT, TailMailbox
from k3fuse.kernels.tail.problem import ARMED, BF16, EPS
from stand_in import StandIn
from stored import store


def at(address: int, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """A tensor over host memory."""
    size = torch.empty(0, dtype=dtype).element_size()
    for extent in shape:
        size *= extent
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).view(shape)


class Box:
    """One rank's mailbox in one call."""

    def __init__(self, layout: TailMailbox, address: int, call: int) -> None:
        self.words = at(address, layout.total // 4, dtype=torch.int32)
        self.layout, self.call = layout, call

    def _rows(self, start: int, m: int, size: int) -> Tensor:
        return self.words[start // 4 : start // 4 + m * size // 4].view(m, size // 4)

    def latent(self, rank: int, m: int) -> Tensor:
        return self._rows(self.layout.latent_at(self.call, rank), m, self.layout.latent_row)

    def shared(self, rank: int, m: int) -> Tensor:
        return self._rows(self.layout.shared_at(self.call, rank), m, self.layout.part)

    def finished(self, m: int) -> Tensor:
        return self._rows(self.layout.row_at(self.call), m, self.layout.row)

    def normed(self, m: int, back: int = 0) -> Tensor:
        return self._rows(self.layout.normed_at(self.call - back), m, self.layout.latent_row)


def taken(words: Tensor, arm: bool = True) -> Tensor:
    """Words that are there, as BF16; armed again."""
    assert not (words == ARMED).any(), "polls what nobody sends"
    rows = words.clone().view(BF16)
    if arm:
        words.fill_(ARMED)
    return rows


def words_of(rows: Tensor) -> Tensor:
    """Rows as they are published: no -0.0."""
    return (rows + 0.0).to(BF16).contiguous().view(torch.int32)


class Functional(StandIn):
    """Kernels that do what the mailbox promises; one that would poll in vain is an error.

    broken: "scaled" rows, a partial "dropped", words left "unarmed", another rank's "columns"; of
    AttnRes, the "old prefix", the "first block" in the place of all.
    """

    def launch(self, variant: Variant, values: Sequence[int]) -> None:
        self.launched.append(variant)
        named = dict(zip(parameter_names(variant), values, strict=True))
        if variant.op == "attn_res":
            outputs = named["out"], named["new_prefix"]
            self._attn_res(variant.size("blocks"), named, named["delta"], outputs)
            return
        given, config = SimpleNamespace(**named), config_of(variant)
        m, rank, tp, layout = given.m, given.rank, config.tp, config.box
        assert m <= config.m
        start = given.mailbox + layout.control
        pairs = at(start, CTAS, 2, dtype=torch.int32)
        call, before = (int(word) for word in pairs[0])
        boxes = [Box(layout, named[f"mailbox{owner}"], call) for owner in range(tp)]
        own = boxes[rank]
        if call:
            own.normed(before, back=1).fill_(ARMED)
        pairs[:, 0], pairs[:, 1] = call + 1, m
        routed, shared = at(given.routed, m, LATENT), at(given.shared, m, config.hidden)
        for owner, box in enumerate(boxes):
            mine = slice(owner, m, tp) if config.two_shot else slice(0, m)
            box.latent(rank, m)[mine] = words_of(routed)[mine]
            columns = slice(owner * config.rows, (owner + 1) * config.rows)
            box.shared(rank, m).copy_(words_of(shared[:, columns]))
        mine = slice(rank, m, tp) if config.two_shot else slice(0, m)
        parts = [taken(own.latent(r, m)[mine], self.broken != "unarmed") for r in range(tp)]
        if self.broken == "dropped":
            parts[3].zero_()
        latent = ordered_sum(parts).to(BF16)
        row = rms_norm(latent, at(given.norm, LATENT), EPS, BF16, config.round_before)
        for box in boxes if config.two_shot else [own]:
            box.normed(m)[mine] = words_of(row)
        normed = taken(own.normed(m), arm=False).double()
        first = rank * config.rows
        if self.broken == "columns":
            first = (rank + 1) % tp * config.rows
        weight = at(given.weight, config.hidden, LATENT)[first : first + config.rows].double()
        up = (normed @ weight.t()).to(BF16)
        columns = up + ordered_sum([taken(own.shared(r, m)) for r in range(tp)]).to(BF16)
        if self.broken == "scaled":
            columns = (columns.float() * 1.01).to(BF16)
        half = slice(rank * config.rows // 2, (rank + 1) * config.rows // 2)
        for box in boxes:
            box.finished(m)[:, half] = words_of(columns)
        at(given.out, m, config.hidden).copy_(taken(own.finished(m)))
        if config.mixes:
            self._attn_res(config.blocks, named, given.out, (given.mixed, given.new_prefix))

    def _attn_res(
        self, count: int, named: dict[str, int], delta: int, outputs: tuple[int, int]
    ) -> None:
        """Mixed rows and the new prefix, with an output norm; no rounding of the mix."""
        given, m = SimpleNamespace(**named), named["m"]

        def rows(address: int, pitch: int) -> Tensor:
            whole = at(address, (m - 1) * pitch + HIDDEN)
            return whole.as_strided((m, HIDDEN), (pitch, 1))

        prefix = rows(given.prefix, given.prefix_pitch)
        blocks = [rows(named[f"block{i}"], given.block_pitch) for i in range(count)]
        if self.broken == "first block":
            blocks = blocks[:1] * count
        found = attn_res(
            prefix, at(delta, m, HIDDEN), blocks, count, at(given.score_norm, HIDDEN),
            at(given.score_proj, HIDDEN), at(given.out_norm, HIDDEN), EPS, EPS, False,
        )  # fmt: skip
        if self.broken == "old prefix":
            found[1] = prefix
        for address, made in zip(outputs, found, strict=True):
            at(address, m, HIDDEN).copy_(made)


class Simulated(Functional):
    """The kernels themselves, all in the memory of one rank."""

    def launch(self, variant: Variant, values: Sequence[int]) -> None:
        self.launched.append(variant)
        named = dict(zip(parameter_names(variant), values, strict=True))
        m, whole = named["m"], named["m"] * HIDDEN
        sizes = {
            "routed": m * LATENT, "shared": whole, "norm": LATENT, "weight": HIDDEN * LATENT,
            **dict.fromkeys(("out", "prefix", "delta", "mixed", "new_prefix"), whole),
            **dict.fromkeys(("score_norm", "score_proj", "out_norm"), HIDDEN),
            "block0": named.get("block_pitch", 0) * m,
        }  # fmt: skip
        built = store().get(variant)
        known: dict[int, Any] = {}
        for parameter in built.plan.parameters:
            name, address = parameter.name, named[parameter.name]
            if parameter.kind != "pointer" or address in known:
                continue
            if name in sizes:
                known[address] = at(address, sizes[name])
            elif name.startswith("block"):  # of the bank that starts with the first one
                known[address] = Inside(known[named["block0"]], address - named["block0"])
            else:
                words = config_of(variant).box.total // 4
                known[address] = at(address, words, dtype=torch.int32)
        params = [known.get(value, value) for value in values]
        launch = Launch(
            built.ptx, built.plan.grid, built.plan.block, [params], cluster=built.plan.cluster,
            dynamic_smem=built.plan.dynamic_smem, names=parameter_names(variant),
        )  # fmt: skip
        simulate_sequence([launch], ranks=1)
