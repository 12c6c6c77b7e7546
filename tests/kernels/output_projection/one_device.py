"""Stand-ins for the one GPU: kernels that act on raw addresses, in PyTorch or in the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from exchange import positive_zeros
from k3fuse.kernels.attn_res.reference import attn_res
from k3fuse.kernels.build.variant import Variant, parameter_names
from k3fuse.kernels.common.collective import ordered_sum
from k3fuse.kernels.common.mailbox import HIDDEN, PRODUCERS, Mailbox
from k3fuse.kernels.output_projection.builder import config_of
from k3fuse.kernels.output_projection.config import CONSUMER, FUSED, PRODUCER, Config
from k3fuse.kernels.output_projection.plan import plan_of
from k3fuse.kernels.output_projection.problem import ARMED, BF16, EPS
from k3fuse.kernels.simulator import Launch, Owned, simulate_sequence
from stand_in import StandIn, at
from stored import store

RESOURCES = {FUSED: 126, PRODUCER: 194, CONSUMER: 116}  # registers (docs page)


def rows(address: int, m: int, width: int, pitch: int) -> Tensor:
    """Rows of BF16, `pitch` apart."""
    whole = at(address, ((m - 1) * pitch + width,))
    return whole.as_strided((m, width), (pitch, 1))


class OneDevice(StandIn):
    """Its kernels are `_act`, of all ranks together."""

    def built(self, variant: Variant) -> Any:
        config = config_of(variant)
        resources = SimpleNamespace(registers=RESOURCES[config.stage], static_smem=0)
        return SimpleNamespace(plan=plan_of(config), resources=resources)

    def launch(self, variant: Variant, values: Sequence[int]) -> None:
        self.together([(variant, values)])

    def together(self, calls: Sequence[tuple[Variant, Sequence[int]]]) -> None:
        self.launched += [variant for variant, _ in calls]
        self._act([(v, dict(zip(parameter_names(v), given, strict=True))) for v, given in calls])

    def _act(self, calls: list[tuple[Variant, dict[str, int]]]) -> None:
        raise NotImplementedError


class Functional(OneDevice):
    """Kernels that do what mailbox.py says; one that would poll in vain is an error.

    broken: "scaled" outputs, a "dropped" partial, or slots that are left "unarmed".
    """

    def __init__(self, broken: str = "") -> None:
        super().__init__(broken)
        self._partials: dict[tuple[int, int, int], Tensor] = {}

    def _act(self, calls: list[tuple[Variant, dict[str, int]]]) -> None:
        named = [(config_of(v), SimpleNamespace(**given), given) for v, given in calls]
        for config, given, by_name in named:
            if config.stage != CONSUMER:
                self._produce(config, given, by_name)
        if len({config.two_shot for config, _, _ in named}) != 1:
            raise AssertionError("one exchange at a time")
        for config, given, by_name in named:
            if config.stage == CONSUMER and config.two_shot:
                self._reduce(config, given, by_name)
        for config, given, by_name in named:
            if config.stage != PRODUCER:
                self._consume(config, given, by_name)

    def _words(self, config: Config, address: int) -> Tensor:
        return at(address, (config.box.total // 4,), torch.int32)

    def _parity(self, config: Config, given: Any, ago: int) -> int:
        start = config.box.control // 4
        calls = self._words(config, given.mailbox)[start : start + PRODUCERS]
        assert len(calls.unique()) == 1
        return (int(calls[0]) - ago) % 2

    def _slots(self, config: Config, address: int, parity: int) -> Tensor:
        """Slots of a parity [rank, token, words], one-shot or receive."""
        box: Mailbox = config.box
        part = config.two_shot
        start, size = (
            (box.receive, box.receive_parity) if part else (box.one_shot, box.one_shot_parity)
        )
        words = self._words(config, address)[(start + parity * size) // 4 :][: size // 4]
        return words.view(config.tp, box.max_m, -1)

    def _gather(self, config: Config, address: int, parity: int) -> Tensor:
        box = config.box
        start = (box.gather + parity * box.gather_parity) // 4
        words = self._words(config, address)[start : start + box.gather_parity // 4]
        return words.view(box.max_m, -1)

    def _produce(self, config: Config, given: Any, by_name: dict[str, int]) -> None:
        key = given.x, given.weight, given.m
        if key not in self._partials:
            x = rows(given.x, given.m, config.k, given.x_pitch)
            weight = rows(given.weight, HIDDEN, config.k, config.k)
            self._partials[key] = positive_zeros((x.float() @ weight.float().t()).to(BF16))
        words = self._partials[key].view(torch.int32)
        parity = self._parity(config, given, 0)
        for rank in range(config.tp):
            slots = self._slots(config, by_name[f"mailbox{rank}"], parity)
            width = slots.shape[2]
            mine = words[:, rank * width : (rank + 1) * width] if config.two_shot else words
            slots[given.rank, : given.m] = mine
        start = config.box.control // 4
        self._words(config, given.mailbox)[start : start + PRODUCERS] += 1

    def _taken(self, config: Config, given: Any, slots: Tensor) -> Tensor:
        """The sum of the slots in rank order [m, words of BF16 pairs]; they are armed again."""
        got = slots[:, : given.m]
        assert not (got == ARMED).any(), "polls what nobody sends"
        partials = list(got.contiguous().view(BF16))
        if self.broken == "dropped":
            partials[3] = torch.zeros_like(partials[3])
        total = positive_zeros(ordered_sum(partials).to(BF16)).view(torch.int32)
        if self.broken != "unarmed":
            got.fill_(ARMED)
        return total

    def _reduce(self, config: Config, given: Any, by_name: dict[str, int]) -> None:
        parity = self._parity(config, given, 1)
        total = self._taken(config, given, self._slots(config, given.mailbox, parity))
        width = total.shape[1]
        for rank in range(config.tp):
            there = self._gather(config, by_name[f"mailbox{rank}"], parity)
            there[: given.m, given.rank * width : (given.rank + 1) * width] = total

    def _consume(self, config: Config, given: Any, by_name: dict[str, int]) -> None:
        parity, m = self._parity(config, given, 1), given.m
        if config.two_shot:
            there = self._gather(config, given.mailbox, parity)[:m]
            assert not (there == ARMED).any(), "polls what nobody sends"
            row = there.clone().view(BF16)
            there.fill_(ARMED)
        else:
            slots = self._slots(config, given.mailbox, parity)
            row = self._taken(config, given, slots).view(BF16)
        blocks = [rows(by_name[n], m, HIDDEN, given.block_pitch) for n in config.block_pointers]
        vectors = [at(by_name[n], (HIDDEN,)) for n in ("score_norm", "score_proj", "out_norm")]
        prefix = rows(given.prefix, m, HIDDEN, given.prefix_pitch)
        out, total = attn_res(prefix, row, blocks, len(blocks), *vectors, EPS, EPS, False)
        if self.broken == "scaled":
            out = (out.float() * 1.01).to(BF16)
        rows(given.out, m, HIDDEN, HIDDEN).copy_(out)
        rows(given.new_prefix, m, HIDDEN, HIDDEN).copy_(total)


class Simulated(OneDevice):
    """The kernels themselves, all in the memory of one rank."""

    def built(self, variant: Variant) -> Any:
        return store().get(variant)

    def _act(self, calls: list[tuple[Variant, dict[str, int]]]) -> None:
        built = self.built(calls[0][0])
        plan = replace(built.plan, pdl=False)
        known: dict[int, Tensor] = {}
        params = [
            [self._value(config_of(variant), name, given, known) for name in given]
            for variant, given in calls
        ]
        launch = Launch(
            built.ptx, plan.grid, plan.block, params, cluster=plan.cluster,
            dynamic_smem=plan.dynamic_smem, names=parameter_names(calls[0][0]),
        )  # fmt: skip
        simulate_sequence([launch], ranks=len(calls))

    @staticmethod
    def _value(config: Config, name: str, given: dict[str, int], known: dict[int, Tensor]) -> Any:
        address, m = given[name], given["m"]
        if name not in config.addresses:
            return address
        if address not in known:
            if name.startswith("mailbox"):
                known[address] = at(address, (config.box.total // 4,), torch.int32)
            elif name == "weight":
                known[address] = at(address, (HIDDEN * config.k,))
            elif name == "x":
                known[address] = at(address, ((m - 1) * given["x_pitch"] + config.k,))
            else:
                size = HIDDEN if name in ("score_norm", "score_proj", "out_norm") else m * HIDDEN
                known[address] = at(address, (size,))
        return Owned(known[address], 0)
