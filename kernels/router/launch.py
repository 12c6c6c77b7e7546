"""From the op's tensors to launches: the front kernel, then the route kernel on what it published.

The front kernel of each rank computes its share of logits and latent and stores it into all ranks'
mailboxes; the route kernel takes whole rows out of its own, and chooses experts or copies them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.common.exchange import Workspace, workspace
from k3fuse.kernels.common.operands import address, dense, float_bits, pitch, readable
from k3fuse.kernels.common.placement import placed
from k3fuse.kernels.common.policy import Row, chip_of
from k3fuse.kernels.common.runtime import RUNTIME, Runtime
from k3fuse.kernels.router import route_launch
from k3fuse.kernels.router.front_builder import BUILDER, config_of
from k3fuse.kernels.router.layout import FrontMailbox
from k3fuse.kernels.router.policy import REPLICATED
from k3fuse.kernels.router.reference import Shared
from k3fuse.kernels.router.route_launch import Form, Rows


@lru_cache(maxsize=256)
def front_variant(
    row: Row, target: str, k: int, experts: int, latent: int, multicast: bool, shared: int = 0
) -> Variant:
    """The front kernel of a policy row. latent, shared: 0 for none.

    Raises VariantError for sizes outside the kernel.
    """
    arch, tp = chip_of(target)
    shape = {
        "m": row.m_max,
        "tp": tp,
        "k": k,
        "experts": experts,
        "latent": latent,
        "shared": shared,
    }
    tuning = {"multicast": int(multicast), "replicated": int(row.kernel == REPLICATED)}
    return BUILDER.variant(arch, shape, tuning)


def misfit(
    row: Row,
    target: str,
    form: Form,
    x: Tensor,
    gate: Tensor,
    latent: Tensor | None,
    shared: Shared | None = None,
) -> str:
    """Why the kernels cannot serve these operands, "" where they can; alike on all ranks.

    x [M, K] of any stride, weights [E, K] and [L, K] wherever they lie.
    """
    weights = {"gate_weight": gate} | ({} if latent is None else {"latent_weight": latent})
    if shared is not None:
        weights |= {f"shared_gate_up[{i}]": w for i, w in enumerate(shared.weights)}
        if shared.activation != "situ":
            return f"activation is {shared.activation!r}, the front kernel computes 'situ'"
    for name, tensor in {"x": x, **weights}.items():
        if tensor.dtype != torch.bfloat16:
            return f"{name} is {tensor.dtype}, the kernel takes torch.bfloat16"
    try:
        columns = 0 if shared is None else shared.columns
        front_variant(row, target, x.shape[1], form.experts, form.latent, True, columns)
    except VariantError as error:
        return str(error)
    return route_launch.misfit(target, x.shape[0], form)


def launch(
    row: Row,
    target: str,
    group: str,
    form: Form,
    x: Tensor,
    gate: Tensor,
    latent: Tensor | None,
    *,
    shared: Shared | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    eps: float = 0.0,
    runtime: Runtime = RUNTIME,
    space: Callable[[str, int], Workspace] | None = None,
) -> list[Tensor]:
    """Run a policy row's kernels on operands without a `misfit`; returns what `route_launch` does.

    x [M, K] may have any stride: rows that cannot be read in place are copied, and so are weights.
    The weights are the whole ones; each rank reads its rows of them. shared: gate and up of this
    rank's shared expert, whose hidden row [M, S] comes behind the latent row. Raises ExchangeError,
    LaunchError.
    """
    _, tp = chip_of(target)
    layout = FrontMailbox(tp, form.experts, form.latent)
    mailboxes = (space or partial(workspace, layout=layout))(group, tp)
    gate, latent, shared = _in_place(gate, latent, shared)
    # Before the front kernel: the route kernel reads the bias before it waits.
    bias = None if bias is None else dense(bias.float())
    rows = readable(x)
    columns = 0 if shared is None else shared.columns
    chosen = front_variant(
        row, target, x.shape[1], form.experts, form.latent, mailboxes.multicast, columns
    )
    values = {
        "x": address(rows),
        "mailbox": mailboxes.own,
        "gate_weight": address(gate),
        "latent_weight": address(latent),
        "multicast": mailboxes.mapped.multicast,
        **{f"mailbox{rank}": there for rank, there in enumerate(mailboxes.mapped.addresses)},
        "m": x.shape[0],
        "rank": mailboxes.rank,
        "x_pitch": pitch(rows),
    }
    made = []
    if shared is not None:
        made = [x.new_empty(x.shape[0], columns)]
        gate_rows, up_rows = shared.halves
        values |= {
            "shared_gate": address(gate_rows), "shared_up": address(up_rows),
            "hidden": address(made[0]), "beta": float_bits(shared.beta),
            "linear_beta": float_bits(shared.linear_beta),
        }  # fmt: skip
    config = config_of(chosen)
    runtime.kernel(chosen)(*(values[name] for name in (*config.addresses, *config.sizes)))
    published = Rows(mailboxes.own, layout)
    found = route_launch.launch(
        target, x.shape[0], form, published, x, bias=bias, scale=scale, eps=eps, runtime=runtime
    )
    place = 2 + (latent is not None)
    return [*found[:place], *made, *found[place:]]


def _in_place(
    gate: Tensor, latent: Tensor | None, shared: Shared | None
) -> tuple[Tensor, Tensor | None, Shared | None]:
    """The weights, as copies where the kernels cannot read them in place."""
    weights = {"gate_weight": gate} | ({} if latent is None else {"latent_weight": latent})
    if shared is not None:
        weights |= {f"shared_gate_up[{i}]": w for i, w in enumerate(shared.weights)}
    found = placed("router", weights)
    gate, latent = found.pop("gate_weight"), found.pop("latent_weight", None)
    return gate, latent, None if shared is None else replace(shared, weights=list(found.values()))
