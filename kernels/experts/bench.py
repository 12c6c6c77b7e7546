"""The experts on one GPU: `k3fuse kernels gpu experts`.

A rank's experts wait for nobody, so one GPU does all of what a rank does: the launches are those of
the op's own host code (`launch.py`), built for the device. Weights are those of all experts of a
rank; a few are in memory once where the kernels' bits are compared with the simulator's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check.gpu import Device, GpuCase, Timed
from k3fuse.kernels.check.gpu_ranks import Call, Recorder
from k3fuse.kernels.check.run import Launch, run_sequence
from k3fuse.kernels.common.microscaling import dequantize_mxfp4
from k3fuse.kernels.common.policy import TP_SIZES, chip_of
from k3fuse.kernels.common.tolerances import compare, tolerance
from k3fuse.kernels.experts import reference
from k3fuse.kernels.experts.builder import config_of, k3
from k3fuse.kernels.experts.cases import SITU, Problem, kernel, problem, routing
from k3fuse.kernels.experts.launch import Operands, arrivals, partials
from k3fuse.kernels.experts.policy import BLOCK, TABLE, engine_of

BF16 = torch.bfloat16
EXPERTS = 896
TOKENS = (1, 2, 8, 9, 16, 33, 64)
TIMED = (1, 8, 64)
SIMULATED = 1  # tokens whose outputs are compared with the simulator's
WAY = "experts"


class Rank:
    """The experts of one rank. experts: in memory; shape: sizes other than Kimi K3's."""

    op = "experts"

    def __init__(
        self,
        device: Device,
        tp: int,
        *,
        tokens: Sequence[int] = TOKENS,
        timed: Sequence[int] = TIMED,
        experts: int = EXPERTS,
        shape: Mapping[str, int] | None = None,
        k: int = 7168,
        seed: int = 0,
    ) -> None:
        self.device, self.tp, self.name = device, tp, f"tp{tp}"
        self.tokens, self.timed = tokens, timed
        self.target, self.engine = f"gb300:tp{tp}", engine_of(device.arch)
        chip_of(self.target)
        self.sizes = {**k3(tp, 64), **(shape or {})}
        m = max((*tokens, *timed))
        variant = kernel(device.arch, self.sizes)
        self.config = config_of(variant)
        self.problem = problem(variant, m, seed, experts=experts)
        self.generator = torch.Generator().manual_seed(seed + 1)
        self.inputs = {
            "hidden": self.problem.x, "ids": self.problem.ids, "weights": self.problem.weights,
            "w13": self.problem.w13, "w13_scale": self.problem.w13_scale, "w2": self.problem.w2,
            "w2_scale": self.problem.w2_scale, "shared_x": self._normal(m, k),
            "gate_up": self._normal(2 * self.config.shared, k, gain=k**-0.5),
            "down": self._normal(
                self.config.hidden, self.config.shared, gain=self.config.shared**-0.5
            ),
        }  # fmt: skip
        self.there = {name: device.put(tensor) for name, tensor in self.inputs.items()}
        self.recorded: dict[int, tuple[list[Call], tuple[Tensor, Tensor]]] = {}
        self.held: list[Tensor] = []
        self.notes = [
            f"one rank of {tp}; {experts} experts in memory, uniform routing, checkpoint layout; "
            f"engine: {self.engine}",
            "shared gate and up, then routed experts and the shared down-projection: two launches",
            "time: PDL without a predecessor to overlap; ids and shared weights in turn; BF16: the "
            "distinct experts' weights in BF16, four times the bytes, padded and batched by "
            "cuBLAS, with SiTU and the sum over slots in PyTorch, all in one graph",
        ]

    def ways(self, m: int) -> Sequence[str]:
        """One."""
        return [WAY]

    def step(self, m: int, way: str) -> None:
        """Both launches."""
        calls, results = self._calls(m)
        for tensor in results:
            tensor.fill_(float("nan"))
        for call in calls:
            self.device.launch(*call)

    def outputs(self, m: int, way: str) -> Mapping[str, Tensor]:
        """routed [m, L] and shared [m, H]."""
        routed, shared = self._calls(m)[1]
        return {"routed": routed, "shared": shared}

    def wrong(self, m: int, way: str) -> str:
        """Both within the tolerance of the reference."""
        bands = {
            "routed": tolerance(BF16, self.config.latent, 2),
            "shared": tolerance(BF16, self.inputs["shared_x"].shape[1], 2),
        }
        for name, rows in self.outputs(m, way).items():
            inside = compare(rows.cpu(), self.expected[name][:m], bands[name])
            if not inside.ok:
                return f"{name} is outside the tolerance: {inside}"
        return ""

    def compared(self) -> Mapping[str, int]:
        """Elements of routed that differ from the simulator's, of the first tokens."""
        m = min(self.tokens)
        got = self.outputs(m, WAY)["routed"][:SIMULATED].cpu()
        wanted = simulated(self._small(), self._first(SIMULATED))
        differ = int((got.view(torch.int16) != wanted.view(torch.int16)).sum())
        said = f"elements of routed with other bits than the simulator's, of {got.numel():,}"
        return {said: differ}

    def after(self) -> str:
        """The counts of the slots' sums are zeros again."""
        left = int(arrivals(self.there["hidden"].device).abs().max())
        return "" if left == 0 else f"a count is {left} between two steps"

    def time(self, m: int) -> Timed:
        """The policy's kernels, and the same in BF16 from cuBLAS; ids and weights in turn."""
        there = self.there
        size = there["gate_up"].nbytes + there["down"].nbytes
        copies = 2 + 2 * self.device.l2_bytes // size
        experts, top_k = there["w13"].shape[0], self.config.top_k
        made, plain = [], []
        for _ in range(copies):
            ids = routing("uniform", m, top_k, experts, self.generator)
            given = replace(
                self._operands(m), topk_ids=self.device.put(ids),
                shared_gate_up=[there["gate_up"].clone()], shared_down=there["down"].clone(),
            )  # fmt: skip
            made.append((given, *self._record(m, given)))
            plain.append(self._batched(given, ids))

        def kernels(number: int) -> None:
            for call in made[number % copies][1]:
                self.device.launch(*call)

        def unfused(number: int) -> None:
            plain[number % copies](lambda made: None)

        row = TABLE.lookup(self.target, m)
        name = "" if row is None else row.kernel or ""
        return Timed(lambda: None, {name: kernels, "BF16, cuBLAS": unfused})

    # --- what is right ---------------------------------------------------------------------------

    @cached_property
    def expected(self) -> dict[str, Tensor]:
        """Both partials of all tokens, on the CPU."""
        given = self.inputs
        return {
            "routed": self.problem.expected(),
            "shared": reference.shared_expert(
                given["shared_x"], [given["gate_up"]], given["down"], SITU
            ),
        }

    def _first(self, m: int) -> Problem:
        """The first tokens and their experts alone, numbered anew: what the simulator takes."""
        whole = self.problem
        used, ids = torch.unique(whole.ids[:m], return_inverse=True)
        small = config_of(self._small())
        return Problem(
            small, whole.x[:m], ids, whole.weights[:m], whole.w13[used], whole.w13_scale[used],
            whole.w2[used], whole.w2_scale[used],
            torch.empty(m, small.top_k, small.latent, dtype=BF16),
            torch.zeros_like(whole.arrivals[:m]), torch.empty(m, small.latent, dtype=BF16), None,
        )  # fmt: skip

    def _small(self) -> Variant:
        """The device's engine for up to 8 tokens, without the shared expert."""
        block = int(self.engine == BLOCK)
        return kernel(self.device.arch, {**self.sizes, "m": 8, "shared": 0}, block=block)

    # --- launches --------------------------------------------------------------------------------

    def _normal(self, *shape: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * gain).to(BF16)

    def _operands(self, m: int) -> Operands:
        there = self.there
        return Operands(
            there["hidden"][:m], there["weights"][:m], there["ids"][:m], there["w13"],
            there["w13_scale"], there["w2"], there["w2_scale"], there["shared_x"][:m],
            [there["gate_up"]], there["down"], None, None,
        )  # fmt: skip

    def _calls(self, m: int) -> tuple[list[Call], tuple[Tensor, Tensor]]:
        """Launches and results, recorded once: graphs need fixed addresses."""
        if m not in self.recorded:
            self.recorded[m] = self._record(m, self._operands(m))
        return self.recorded[m]

    def _record(self, m: int, given: Operands) -> tuple[list[Call], tuple[Tensor, Tensor]]:
        """The launches; their scratch is kept."""
        row = TABLE.lookup(self.target, m)
        if row is None:
            raise ValueError(f"m={m} is outside the policy of {self.target}")
        recorder = Recorder(self.device.arch, 0)
        runtime: Any = recorder
        results = partials(
            row, self.target, given, SITU, False, runtime=runtime, chip=self.device.arch,
            held=self.held,
        )  # fmt: skip
        return recorder.calls, results

    def _batched(self, given: Operands, ids: Tensor) -> Callable[[Callable[[Tensor], None]], None]:
        """The same in BF16: the distinct experts' rows, padded to the most pairs of one.

        The result takes a function that both partials are handed to.
        """
        used, place = torch.unique(ids, return_inverse=True)
        pairs = place.flatten()
        counts = torch.bincount(pairs)
        order = torch.argsort(pairs, stable=True)
        inside = torch.arange(len(pairs)) - (counts.cumsum(0) - counts)[pairs[order]]
        most = int(counts.max())
        token = torch.zeros(len(used), most, dtype=torch.int64)
        token[pairs[order], inside] = order // ids.shape[1]
        back = torch.empty_like(pairs)
        back[order] = pairs[order] * most + inside
        put, there, here = self.device.put, self.there, used.to(given.w13.device)
        w13 = dequantize_mxfp4(there["w13"][here], there["w13_scale"][here]).to(BF16)
        w2 = dequantize_mxfp4(there["w2"][here], there["w2_scale"][here]).to(BF16)
        token, back = put(token), put(back)
        gate_up, down = given.shared_gate_up[0], given.shared_down
        if down is None:
            raise ValueError("there is no shared expert")

        def call(take: Callable[[Tensor], None]) -> None:
            gate, up = torch.bmm(given.hidden[token], w13.transpose(1, 2)).chunk(2, -1)
            rows = torch.bmm(SITU(gate, up).to(BF16), w2.transpose(1, 2)).flatten(0, 1)[back]
            rows = rows.view(*ids.shape, -1) * given.topk_weights[..., None]
            take(rows.sum(1, dtype=torch.float32).to(BF16))
            gate, up = F.linear(given.shared_x, gate_up).chunk(2, -1)
            take(F.linear(SITU(gate, up).to(BF16), down))

        return call


def simulated(variant: Variant, made: Problem) -> Tensor:
    """What the routed experts give in the simulator."""
    run_sequence([Launch(variant, [made.values()])])
    return made.routed


# Name -> the case on a device, as `k3fuse kernels gpu` finds them.
GPU_CASES: Mapping[str, Callable[[Device], GpuCase]] = {
    f"tp{tp}": partial(Rank, tp=tp) for tp in TP_SIZES
}
