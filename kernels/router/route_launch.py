"""From tensors to one launch of the route kernel, behind the front kernel or on plain logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.common.operands import address, dense, float_bits
from k3fuse.kernels.common.policy import chip_of
from k3fuse.kernels.common.runtime import RUNTIME, Runtime
from k3fuse.kernels.router.layout import FrontMailbox
from k3fuse.kernels.router.route_builder import BUILDER, config_of
from k3fuse.kernels.router.route_config import BLOCK, Config, arrivals_offset
from k3fuse.kernels.router.units import PLAN_WORDS

# Kernels are compiled for these token counts: CTAs without a token cost instructions, too.
TOKENS = (*range(1, 9), 16, 32, 64)
PLAN_FROM = 9  # fewer tokens: whoever needs units derives them from the ids


@dataclass(frozen=True)
class Form:
    """What one call does with its rows.

    experts, latent: columns, latent 0 for none. top_k: 0 to copy the logits out (gather); then the
    rest counts for nothing. scoring: of `reference.SCORINGS`. bias: whether there is one. quantize:
    the latent row in MXFP8, too. plan: the expert plan.
    """

    experts: int
    latent: int
    top_k: int = 0
    scoring: str = "sigmoid"
    renormalize: bool = False
    weights_dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    quantize: bool = False
    plan: bool = False


@dataclass(frozen=True)
class Rows:
    """Where logits and latent are: in a mailbox (its address and layout), or plain.

    logits [M, E] FP32, latent [M, L] BF16, contiguous and 16-byte aligned; None for the mailbox's.
    """

    mailbox: int = 0
    layout: FrontMailbox | None = None
    logits: Tensor | None = None
    latent: Tensor | None = None


@lru_cache(maxsize=256)
def variant(target: str, m: int, form: Form, *, logits: bool, latent: bool) -> Variant:
    """The kernel for `m` tokens. logits, latent: whether they are plain.

    Raises VariantError for sizes and dtypes outside the kernel.
    """
    arch, tp = chip_of(target)
    if form.weights_dtype not in (torch.bfloat16, torch.float32):
        raise VariantError(f"weights in {form.weights_dtype}; use torch.bfloat16 or torch.float32")
    size = next((tokens for tokens in TOKENS if tokens >= m), m)
    config = {"local_logits": int(logits), "local_latent": int(latent), "bias": int(form.bias)}
    if form.top_k:
        config |= {
            "softmax": int(form.scoring == "softmax"), "renormalize": int(form.renormalize),
            "wide": int(form.weights_dtype == torch.float32), "quantize": int(form.quantize),
            "plan": int(form.plan and m >= PLAN_FROM),
        }  # fmt: skip
    shape = {"m": size, "e": form.experts, "l": form.latent, "k": form.top_k, "tp": tp}
    return BUILDER.variant(arch, shape, config)


def misfit(target: str, m: int, form: Form, *, logits: bool = False, latent: bool = False) -> str:
    """Why no kernel serves the form, "" where one does."""
    try:
        variant(target, m, form, logits=logits, latent=latent)
    except VariantError as error:
        return str(error)
    return ""


def launch(
    target: str,
    m: int,
    form: Form,
    rows: Rows,
    like: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    eps: float = 0.0,
    runtime: Runtime = RUNTIME,
) -> list[Tensor]:
    """Run the kernel on `m` tokens; results are made on the device of `like`.

    bias [E] is read as FP32. Returns [weights, ids] or, for gather, [logits]; then the latent row
    where there is one (the plain one as it is); with `quantize` latent_q and latent_scale; with
    `plan` the plan, which is filled from PLAN_FROM tokens on. Raises VariantError, LaunchError.
    """
    chosen = variant(
        target, m, form, logits=rows.logits is not None, latent=rows.latent is not None
    )
    config = config_of(chosen)
    made = _results(config, form, m, like)
    if rows.latent is not None:
        made["latent"] = rows.latent
    source = None if bias is None else dense(bias.float())
    values = {
        "mailbox": rows.mailbox, "logits": address(rows.logits), "latent_in": address(rows.latent),
        "bias": address(source), **{name: address(tensor) for name, tensor in made.items()},
        "arrivals": _arrivals(rows, like.device),
        "m": m, "scale": float_bits(scale), "eps": float_bits(eps),
    }  # fmt: skip
    runtime.kernel(chosen)(*(values[name] for name in (*config.pointers, *config.sizes)))
    return list(made.values())


def _results(config: Config, form: Form, m: int, like: Tensor) -> dict[str, Tensor]:
    """Outputs by parameter name, in the order in which they are returned."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if config.top_k:
        shapes["weights"] = (m, config.top_k), form.weights_dtype
        shapes["ids"] = (m, config.top_k), torch.int64
    else:
        shapes["logits_out"] = (m, config.experts), torch.float32
    if config.latent:
        shapes["latent"] = (m, config.latent), torch.bfloat16
    if config.quantize:
        shapes["latent_q"] = (m, config.latent), torch.uint8
        shapes["latent_scale"] = (m, config.latent // BLOCK), torch.uint8
    if form.plan:
        shapes["plan"] = (PLAN_WORDS,), torch.int32
    skip = ("latent",) if config.local_latent else ()
    return {
        name: like.new_empty(0 if name in skip else shape, dtype=dtype)
        for name, (shape, dtype) in shapes.items()
    }


_COUNTERS: dict[torch.device, Tensor] = {}


def _arrivals(rows: Rows, device: torch.device) -> int:
    """The word that counts tokens: the mailbox's, or one a device. It is 0 between calls."""
    if rows.mailbox and rows.layout is not None:
        return rows.mailbox + arrivals_offset(rows.layout)
    if device not in _COUNTERS:
        _COUNTERS[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return address(_COUNTERS[device])
