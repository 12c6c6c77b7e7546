"""Tensor parallelism and weights that are slices of one seeded full model."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Fill = Literal["normal", "around_one", "zero", "decay_bias", "e2m1", "e8m0"]


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place in its tensor-parallel group; `group` is a c10d group name or None."""

    size: int = 1
    rank: int = 0
    group: str | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"tp_size={self.size} is not usable: use an integer of at least 1")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"tp_rank={self.rank} is not usable: use 0 to {self.size - 1}")
        if self.size > 1 and not self.group:
            raise ValueError(
                f"group={self.group!r} is not usable with tp_size={self.size}: pass the process "
                "group or its name; any name does for meta and fake tensors, such as 'tp:0'"
            )

    @classmethod
    def of(cls, size: int, rank: int, group: str | ProcessGroup | None) -> TensorParallel:
        """From a group or its name: names stay valid in graphs that outlive the process."""
        name = group if group is None or isinstance(group, str) else group.group_name
        return cls(size, rank, name)

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum of every rank's `partial`, same shape and dtype; the tensor itself for one rank."""
        if self.size == 1 or self.group is None:
            return partial
        total: Tensor = funcol.all_reduce(partial, "sum", self.group)  # type: ignore[arg-type]
        return total


@dataclass(frozen=True)
class Piece:
    """One published weight inside a parameter: full shape, split dimension and seeded filling.

    `key` seeds the values, so a weight has the same values alone, merged, and on every TP size.
    """

    key: str
    shape: tuple[int, ...]
    split: int | None = None
    fill: Fill = "normal"
    scale: float = 1.0

    def local_shape(self, tp: TensorParallel) -> tuple[int, ...]:
        """Shape on one rank. Raises ValueError where the split dimension does not divide."""
        if self.split is None:
            return self.shape
        width = self.shape[self.split]
        if width % tp.size:
            raise ValueError(
                f"tp_size={tp.size} is not usable: it must divide {width}, "
                f"dimension {self.split} of {self.key}"
            )
        return (*self.shape[: self.split], width // tp.size, *self.shape[self.split + 1 :])

    def local_values(self, tp: TensorParallel, seed: int) -> Tensor:
        """This rank's slice of the full values; FP32, or uint8 for the MX fillings."""
        full = self._full_values(seed)
        if self.split is None:
            return full
        width = self.local_shape(tp)[self.split]
        return full.narrow(self.split, tp.rank * width, width)

    def _full_values(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{self.key}".encode()))
        if self.fill == "zero":
            return torch.zeros(self.shape)
        if self.fill == "e2m1":
            return torch.randint(0, 256, self.shape, generator=generator, dtype=torch.uint8)
        if self.fill == "e8m0":
            # A random E2M1 value has RMS 2.93; the exponent brings the row to `scale`.
            middle = 127 + round(math.log2(self.scale / 2.93))
            low, high = middle - 1, middle + 2
            return torch.randint(low, high, self.shape, generator=generator, dtype=torch.uint8)
        noise = torch.randn(self.shape, generator=generator)
        if self.fill == "around_one":
            return 1.0 + 0.1 * noise
        if self.fill == "decay_bias":
            return noise - 2.0
        return self.scale * noise


def dense(key: str, rows: int, columns: int, split: int | None = None) -> Piece:
    """A [rows, columns] linear weight with variance 1 / columns."""
    return Piece(key, (rows, columns), split, scale=columns**-0.5)


class ShardedModule(nn.Module):
    """A module whose parameters are declared as pieces, so that they can be filled later."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.pieces: dict[str, tuple[tuple[Piece, ...], int]] = {}

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
            """Every sharded block returns one tensor."""

    def declare(
        self,
        name: str,
        pieces: Sequence[Piece],
        dtype: torch.dtype = torch.bfloat16,
        dim: int = 0,
    ) -> nn.Parameter:
        """An empty frozen parameter: the local pieces side by side along `dim`."""
        shapes = [piece.local_shape(self.tp) for piece in pieces]
        shape = list(shapes[0])
        shape[dim] = sum(local[dim] for local in shapes)
        self.pieces[name] = (tuple(pieces), dim)
        return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Linear(ShardedModule):
    """y = x W^T without bias: x [..., K] BF16, weight [N, K] BF16, y [..., N] BF16."""

    def __init__(self, tp: TensorParallel, *pieces: Piece) -> None:
        super().__init__(tp)
        self.weight = self.declare("weight", pieces)

    def forward(self, x: Tensor) -> Tensor:
        """Project `x`."""
        return F.linear(x, self.weight)


class Vector(ShardedModule):
    """A named [N] weight that other blocks read: a norm weight or an AttnRes score weight."""

    def __init__(
        self,
        tp: TensorParallel,
        key: str,
        width: int,
        fill: Fill = "around_one",
        scale: float = 1.0,
    ) -> None:
        super().__init__(tp)
        self.weight = self.declare("weight", [Piece(key, (width,), None, fill, scale)])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension in FP32, times the weight in FP32, one rounding to BF16."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(torch.bfloat16)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta), in FP32."""
    gate, up = gate.float(), up.float()
    gated = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    return gated * (linear_beta * torch.tanh(up / linear_beta))


@torch.no_grad()
def init_weights(model: nn.Module, seed: int) -> None:
    """Fill every declared parameter of `model` with its slice of the full model of `seed`.

    Equal seeds give TP1, TP2 and TP4 ranks slices of the same full weights.
    Raises ValueError for a parameter on the meta device.
    """
    for path, module in model.named_modules():
        if not isinstance(module, ShardedModule):
            continue
        for name, (pieces, dim) in module.pieces.items():
            parameter = module.get_parameter(name)
            if parameter.is_meta:
                raise ValueError(
                    f"model={path}.{name} on the meta device cannot be filled: "
                    "build the model on a real device first"
                )
            values = torch.cat([piece.local_values(module.tp, seed) for piece in pieces], dim)
            parameter.copy_(values)
