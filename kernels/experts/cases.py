"""What the experts kernel must do: cases for `k3fuse kernels check`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check import Case, CheckTarget, Launch, Output, Step
from k3fuse.kernels.check.run import Value
from k3fuse.kernels.common import microscaling
from k3fuse.kernels.common.operands import float_bits
from k3fuse.kernels.common.tolerances import tolerance
from k3fuse.kernels.experts import reference
from k3fuse.kernels.experts.block_config import BlockConfig
from k3fuse.kernels.experts.builder import BUILDER, config_of, k3
from k3fuse.kernels.experts.config import CLUSTER, WARPS, Config
from k3fuse.kernels.experts.layouts import shuffled
from k3fuse.kernels.experts.policy import BLOCK, engine_of
from k3fuse.kernels.experts.reference import Activation
from k3fuse.kernels.simulator import Fresh, TensorMap

BF16 = torch.bfloat16
SITU = Activation("situ", 4.0, 25.0)
# A matrix of random E2M1 codes has entries of root mean square 2.9; codes 0..7 and their negatives.
CODES_RMS = 2.9
# Experts that a case keeps in memory; a rank of the model has 896.
EXPERTS = 18
# For random schedules and the race checker: one cluster, two units of one expert.
SMALL = {"latent": 896, "inter": 64, "hidden": 0, "shared": 0, "top_k": 2}
SMALL_EXPERTS, SMALL_M = 3, 9
# Weights in vLLM's order, as on 16 ranks: padded, half a block of columns behind a whole one.
SMALL_SHUFFLED = {**SMALL, "latent": 1792, "inter": 192}


@dataclass(frozen=True)
class Problem:
    """Operands of one launch on one rank, made from a seed, and what comes out.

    x [m, latent], ids and weights [m, top_k]; w13, w2 and their scales as `builder.py` has them.
    shared: x [m, shared], down [hidden, shared] and the output [m, hidden], or None.
    """

    config: Config
    x: Tensor
    ids: Tensor
    weights: Tensor
    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    rows: Tensor
    arrivals: Tensor
    routed: Tensor
    shared: tuple[Tensor, Tensor, Tensor] | None
    activation: Activation = SITU

    @property
    def m(self) -> int:
        """Tokens."""
        return self.x.shape[0]

    @property
    def used(self) -> int:
        """Distinct experts that exist."""
        experts = self.w13.shape[0]
        return int(torch.unique(self.ids[(self.ids >= 0) & (self.ids < experts)]).numel())

    def values(self) -> dict[str, Value]:
        """The kernel's parameters by name."""
        beta, linear = self.activation.beta, self.activation.linear_beta
        weights = self.w13, self.w13_scale, self.w2, self.w2_scale
        w13, w13_scale, w2, w2_scale = shuffled(*weights) if self.config.shuffled else weights
        found: dict[str, Value] = {
            **self.rows_in, "ids": self.ids, "weights": self.weights, "w13": w13,
            "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale, "rows": Fresh(self.rows),
            "arrivals": self.arrivals, "routed": Fresh(self.routed),
            "m": self.m, "experts": self.w13.shape[0], "beta": float_bits(beta),
            "linear_beta": float_bits(linear),
        }  # fmt: skip
        if isinstance(self.config, BlockConfig):
            found |= block_values(self.config, w13, w2, self.x)
        if self.shared is not None:
            x, down, out = self.shared
            found |= {
                "shared_x": x, "shared_down": down, "shared_out": Fresh(out),
                "shared_pitch": x.stride(0),
            }  # fmt: skip
        return found

    @property
    def rows_in(self) -> dict[str, Value]:
        """The parameters that hold x: in BF16, or rounded to MXFP8."""
        if not self.config.mxfp8:
            return {"x": self.x, "x_pitch": self.x.stride(0)}
        values, scales = rounded(self.x)
        if isinstance(self.config, BlockConfig):
            return {"x8_tiles": values, "x8_scale": scales}
        return {"x": values, "x_scale": scales}

    def needed(self) -> dict[str, int]:
        """Bytes that have to move at least: a distinct expert once, whatever its tokens."""
        found = {
            name: getattr(self, name)[0].nbytes * self.used
            for name in ("w13", "w13_scale", "w2", "w2_scale")
        }
        found |= {name: getattr(self, name).nbytes for name in ("ids", "weights", "routed")}
        if self.shared is not None:
            names = "shared_x", "shared_down", "shared_out"
            found |= {name: t.nbytes for name, t in zip(names, self.shared, strict=True)}
        # Scratch, which another division of the work would not have.
        found |= {"rows": 0, "arrivals": 0}
        if isinstance(self.config, BlockConfig) and not self.config.mxfp8:
            found |= {"x8": 0, "x8_scale": 0, "x8_tiles": 0}
        rows = {name: t.nbytes for name, t in self.rows_in.items() if isinstance(t, Tensor)}
        return found | rows

    def expected(self) -> Tensor:
        """The routed partial [m, latent]."""
        rows = reference.routed_rows(
            self.x, self.ids, self.w13, self.w13_scale, self.w2, self.w2_scale, self.activation,
            self.config.floor,
        )  # fmt: skip
        return reference.weighted_sum(rows, self.weights)

    def idle(self) -> str:
        """Whether the counts are zeros again."""
        left = int(self.arrivals.abs().max())
        return "" if left == 0 else f"a count is {left} after the launch"


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 and E8M0 of rows, as bytes."""
    values, scales = microscaling.quantize_mxfp8(x)
    return values.view(torch.uint8), scales


def block_values(config: BlockConfig, w13: Tensor, w2: Tensor, x: Tensor) -> dict[str, Value]:
    """The tensor maps of the block-scaled engine and its scratch, MXFP8 rows of each cluster."""
    experts = w13.shape[0]
    maps: dict[str, Value] = {
        "w13": TensorMap.of(w13, config.tiles("w13", experts)),
        "w2": TensorMap.of(w2, config.tiles("w2", experts)),
    }
    if "w2_ends" in config.addresses:
        maps["w2_ends"] = w2
    if config.mxfp8:
        values, given = rounded(x)
        tiles = config.tiles("x8_tiles", x.shape[0])
        return maps | {"x8_tiles": TensorMap.of(values, tiles), "x8_scale": given}
    size = (config.clusters, config.m)
    rows = torch.empty(*size, config.latent, dtype=torch.uint8)
    scales = torch.empty(*size, config.latent // microscaling.BLOCK, dtype=torch.uint8)
    return maps | {
        "x8_tiles": TensorMap.of(rows, config.tiles("x8_tiles", experts), fresh=True),
        "x8": Fresh(rows), "x8_scale": Fresh(scales),
    }  # fmt: skip


def exact_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [m, k] times weight [n, k] transposed in FP64, rounded once."""
    return (x.double() @ weight.double().t()).to(BF16)


def routing(kind: str, m: int, top_k: int, experts: int, generator: torch.Generator) -> Tensor:
    """Ids [m, top_k], no expert twice in a row: "uniform", "skewed" (few experts get most tokens)
    or "same" (all tokens have the same)."""
    weight = torch.ones(experts)
    if kind == "skewed":
        weight = 0.5 ** torch.arange(experts).double()
    if kind == "same":
        return torch.randperm(experts, generator=generator)[:top_k].expand(m, -1).contiguous()
    rows = weight.expand(m, -1).clamp(min=1e-6)
    return torch.multinomial(rows.float(), top_k, generator=generator)


def problem(
    variant: Variant, m: int, seed: int, *, experts: int = EXPERTS, kind: str = "uniform"
) -> Problem:
    """Operands of m tokens: x about 1, gate and up about 2, outputs about 1."""
    config = config_of(variant)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * gain).to(BF16)

    def matrix(rows: int, columns: int, gain: float) -> tuple[Tensor, Tensor]:
        size = (experts, rows, columns // 2)
        codes = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
        size = (experts, rows, columns // microscaling.BLOCK)
        power = round(float(torch.tensor(gain / CODES_RMS / columns**0.5).log2()))
        # Scales of a matrix differ by factors up to 8.
        scales = torch.randint(power + 125, power + 129, size, generator=generator)
        return codes, scales.to(torch.uint8)

    x = normal(m, config.latent)
    ids = routing(kind, m, config.top_k, experts, generator)
    weights = torch.rand(m, config.top_k, generator=generator)
    weights = weights / weights.sum(1, keepdim=True)
    w13, w2 = (
        matrix(2 * config.inter, config.latent, 2.0),
        matrix(config.latent, config.inter, 1.0),
    )
    shared = None
    if config.shared:
        shared = (
            normal(m, config.shared),
            normal(config.hidden, config.shared, gain=config.shared**-0.5),
            torch.empty(m, config.hidden, dtype=BF16),
        )
    return Problem(
        config,
        x,
        ids if config.wide_ids else ids.int(),
        weights if config.float_weights else weights.to(BF16),
        *w13,
        *w2,
        torch.empty(m, config.top_k, config.latent, dtype=BF16),
        torch.zeros(m, CLUSTER, WARPS, dtype=torch.int32),
        torch.empty(m, config.latent, dtype=BF16),
        shared,
    )


def step(variant: Variant, m: int, seed: int, **how: int | str) -> Step:
    """One launch on one rank: every rank does the same with its share."""
    made = problem(variant, m, seed, **how)  # type: ignore[arg-type]
    launch = Launch(variant, [made.values()], made.needed())
    # Two roundings to BF16: the slots' rows, and their sum.
    band = tolerance(BF16, made.config.latent, 2)
    outputs = [Output("routed", 0, made.routed, made.expected(), band)]
    if made.shared is not None:
        x, down, out = made.shared
        band = tolerance(BF16, made.config.shared)
        outputs.append(Output("shared_out", 0, out, exact_linear(x, down), band))
    return Step((launch,), tuple(outputs), {"counts are cleared": made.idle})


def kernel(arch: str, shape: Mapping[str, int], **config: int) -> Variant:
    """The variant of a shape."""
    return BUILDER.variant(arch, shape, config)


def most(m: int) -> int:
    """Tokens that the kernel for m tokens is compiled for."""
    return next(size for size in (8, 16, 32, 64) if m <= size)


def cases(target: CheckTarget, m: int) -> tuple[Case, ...]:
    """Routed experts of Kimi K3 with the shared expert beside them, by the policy's engine.

    On rows that the kernel rounds itself, and on rows that a router has rounded; on weights in the
    checkpoint's order, and in vLLM's.
    """
    block = int(engine_of(target.arch) == BLOCK)
    few, found = min(m, SMALL_M), []
    for mxfp8, order in ((0, 0), (1, 0), (0, 1)):
        how = {"block": block, "mxfp8": mxfp8, "shuffled": order}
        full = kernel(target.arch, k3(target.tp, most(m)), **how)
        narrow = SMALL_SHUFFLED if order else SMALL
        small = kernel(target.arch, {**narrow, "m": most(few)}, clusters=1, **how)
        less = partial(step, small, few, experts=SMALL_EXPERTS, kind="skewed")
        found.append(Case(BUILDER.op, full.name, partial(step, full, m), less, less))
    return tuple(found)
