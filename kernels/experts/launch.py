"""From the op's tensors to its launches: shared gate and up, experts, tail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.build.errors import LaunchError, VariantError
from k3fuse.kernels.build.launch import Rows
from k3fuse.kernels.build.variant import Variant, parameter_names
from k3fuse.kernels.common.exchange import Workspace
from k3fuse.kernels.common.operands import address, dense, float_bits, pitch, readable
from k3fuse.kernels.common.placement import misplaced, placed
from k3fuse.kernels.common.policy import MAX_M, Row, chip_of
from k3fuse.kernels.common.runtime import RUNTIME, Runtime
from k3fuse.kernels.experts import gate_up
from k3fuse.kernels.experts.block_config import MAP_ALIGNMENT, BlockConfig, fits_block
from k3fuse.kernels.experts.block_shuffled import fits_shuffled
from k3fuse.kernels.experts.builder import BUILDER, config_of
from k3fuse.kernels.experts.config import CLUSTER, MAX_EXPERTS, WARPS
from k3fuse.kernels.experts.layouts import ROWS, TRTLLM
from k3fuse.kernels.experts.policy import BLOCK, ENGINES, ENVIRONMENT, TWIN, engine_of
from k3fuse.kernels.experts.reference import Activation
from k3fuse.kernels.prefetch.launch import NOTHING, Ahead
from k3fuse.kernels.tail import launch as tail
from k3fuse.kernels.tail.mix import Mix
from k3fuse.kernels.tail.policy import MIXED_TABLE
from k3fuse.kernels.tail.policy import TABLE as TAIL

BF16 = torch.bfloat16
# Torch type of the ids -> the variant's wide_ids; of the routing weights -> float_weights.
IDS = {torch.int64: 1, torch.int32: 0}
WEIGHTS = {torch.bfloat16: 0, torch.float32: 1}


@dataclass(frozen=True)
class Operands:
    """The op's tensors; names and shapes as in the op.

    layout: of weights and scales, of `layouts.LAYOUTS`. width: columns of an expert's hidden row
    that count, 0 for all that are stored.
    """

    hidden: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    w13: Tensor
    w13_scale: Tensor | None
    w2: Tensor
    w2_scale: Tensor | None
    shared_hidden: Tensor | None
    shared_gate_up: Sequence[Tensor]
    shared_down: Tensor | None
    latent_norm_weight: Tensor | None
    up_weight: Tensor | None
    shared_row: Tensor | None = None
    latent_q: Tensor | None = None
    latent_scale: Tensor | None = None
    layout: str = ROWS
    width: int = 0

    @property
    def inter(self) -> int:
        """Columns of an expert's hidden row."""
        return self.width or 2 * self.w2.shape[2]

    @property
    def shared_x(self) -> Tensor:
        """What the shared expert reads: its hidden row, where that is made already."""
        if self.shared_row is not None:
            return self.shared_row
        return self.hidden if self.shared_hidden is None else self.shared_hidden

    @property
    def mxfp8(self) -> tuple[Tensor, Tensor] | None:
        """E4M3 and E8M0 of `hidden`, where somebody has rounded it."""
        if self.latent_q is None or self.latent_scale is None:
            return None
        return dense(self.latent_q), dense(self.latent_scale)

    @property
    def halves(self) -> tuple[Tensor, Tensor]:
        """Gate and up [S, H] of the shared expert."""
        first = self.shared_gate_up[0]
        if len(self.shared_gate_up) > 1:
            return first, self.shared_gate_up[1]
        gate, up = first.chunk(2)
        return gate, up

    @property
    def weights(self) -> dict[str, Tensor]:
        """Weights and scales that are read in place, by name."""
        named = {
            "w13": self.w13, "w13_scale": self.w13_scale, "w2": self.w2, "w2_scale": self.w2_scale,
            "shared_down": self.shared_down,
            **{f"shared_gate_up[{i}]": w for i, w in enumerate(self.shared_gate_up)},
        }  # fmt: skip
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def engine(arch: str, given: Operands) -> str:
    """The engine of the routed experts: the policy's, or the twin where it cannot take them."""
    return TWIN if twin_because(arch, given) else BLOCK


def twin_because(arch: str, given: Operands) -> str:
    """Why the twin has the routed experts, "" where the block-scaled engine has them.

    Raises ValueError as `policy.engine_of` does.
    """
    if engine_of(arch) == TWIN:
        return (
            f"it is the engine of {arch}" if ENGINES.get(arch) is None else f"{ENVIRONMENT}={TWIN}"
        )
    for name, weight in (("w13", given.w13), ("w2", given.w2)):
        if weight.data_ptr() % MAP_ALIGNMENT:
            return f"{name} starts at no multiple of {MAP_ALIGNMENT} bytes, as tensor maps need"
    latent, inter = given.hidden.shape[1], given.inter
    if not fits_block(latent, inter):
        return f"an expert of {latent} by {inter} columns does not fill the other engine's tiles"
    if given.layout == TRTLLM and not fits_shuffled(latent, inter):
        return f"shuffled rows of {latent} by {inter} columns do not fill the other engine's tiles"
    return ""


def variants(
    row: Row, target: str, given: Operands, floor: bool, chip: str = ""
) -> tuple[Variant | None, Variant]:
    """The kernels that a policy row launches: gate and up (None with a row), then the experts.

    chip: architecture to build for, the target's by default. Raises VariantError for sizes outside
    the kernels.
    """
    arch, tp = chip_of(target)
    arch = chip or arch
    first = None
    if given.shared_row is None:
        width, hidden = given.halves[0].shape
        first = gate_up.BUILDER.variant(arch, {"m": row.m_max, "k": hidden, "width": width}, {})
    else:
        width = given.shared_row.shape[1]
    shape = {
        "m": row.m_max, "tp": tp, "latent": given.hidden.shape[1], "inter": given.inter,
        "hidden": 0 if given.shared_down is None else given.shared_down.shape[0],
        "shared": width, "top_k": given.topk_ids.shape[1],
    }  # fmt: skip
    block = engine(arch, given) == BLOCK
    config = {
        "floor": int(floor),
        "float_weights": WEIGHTS[given.topk_weights.dtype],
        "wide_ids": IDS[given.topk_ids.dtype],
        "mxfp8": int(given.latent_q is not None),
        "shuffled": int(given.layout == TRTLLM),
        "block": int(block),
    }
    return first, BUILDER.variant(arch, shape, config)


def misfit(
    row: Row, target: str, given: Operands, activation: Activation, mix: Mix | None = None
) -> str:
    """Why the kernels cannot serve these operands, "" where they can; alike on all ranks.

    Rows may have any stride, weights lie anywhere.
    """
    if against := _kinds_misfit(row, target, given, activation):
        return against
    if given.latent_norm_weight is None or given.up_weight is None:
        return "there is no latent norm with an up-projection, which the tail's kernel computes"
    rows = given.hidden, given.shared_x, given.latent_norm_weight, given.up_weight
    return tail.misfit(*rows) if mix is None else tail.misfit_mixed(*rows, mix)


def partials_misfit(row: Row, target: str, given: Operands, activation: Activation) -> str:
    """Why `partials` cannot serve these operands, "" where it can. Rows may have any stride.

    It exchanges nothing, so a rank whose weights lie badly may go another way than its peers.
    """
    for name, tensor in given.weights.items():
        if reason := misplaced(tensor):
            return f"{name} {reason}"
    return _kinds_misfit(row, target, given, activation)


def _kinds_misfit(row: Row, target: str, given: Operands, activation: Activation) -> str:
    """Why the kernels compute no experts of such dtypes and sizes, "" where they do."""
    if activation.name != "situ":
        return f"activation is {activation.name!r}, the kernels compute 'situ'"
    if given.w13_scale is None or given.w2_scale is None:
        return "the experts' weights have no scales, the kernel reads MXFP4"
    if given.shared_down is None:
        return "there is no shared expert, which the kernel computes beside the routed ones"
    for name, tensor in (("hidden", given.hidden), ("shared_hidden", given.shared_x)):
        if tensor.dtype != BF16:
            return f"{name} is {tensor.dtype}, the kernels take torch.bfloat16"
    if given.topk_weights.dtype not in WEIGHTS:
        return f"topk_weights is {given.topk_weights.dtype}, the kernel takes BF16 or FP32"
    if given.w13.shape[0] > MAX_EXPERTS:
        return f"there are {given.w13.shape[0]} experts, the kernel sorts {MAX_EXPERTS}"
    try:
        variants(row, target, given, False)
    except VariantError as error:
        return str(error)
    return ""


_ARRIVALS: dict[torch.device, Tensor] = {}
_LOCK = threading.Lock()


def arrivals(device: torch.device) -> Tensor:
    """The counts of the slots' sums on a device, all 0 between two launches; made once.

    Launches on one device share them, so they must be in one stream or ordered. Raises LaunchError
    inside a graph capture where they do not exist yet: the graph would own their memory.
    """
    with _LOCK:
        found = _ARRIVALS.get(device)
        if found is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise LaunchError(
                    "the experts' counts do not exist yet and cannot be made while a CUDA graph is "
                    "captured; run one step without a graph first"
                )
            found = torch.zeros(MAX_M, CLUSTER, WARPS, dtype=torch.int32, device=device)
            _ARRIVALS[device] = found
        return found


def partials(
    row: Row,
    target: str,
    given: Operands,
    activation: Activation,
    floor: bool,
    *,
    runtime: Runtime = RUNTIME,
    chip: str = "",
    held: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """This rank's routed [M, L] and shared [M, H] partials, BF16, in two launches.

    One with a shared row. given: operands without a `misfit`; rows that cannot be read in place are
    copied. floor: the hidden row's MXFP8 scale follows the floor rule. chip: as for `variants`.
    held: gets the launches' scratch, for those who launch later. Raises LaunchError.
    """
    first, second = variants(row, target, given, floor, chip)
    m = given.hidden.shape[0]
    betas = {
        "beta": float_bits(activation.beta), "linear_beta": float_bits(activation.linear_beta),
    }  # fmt: skip
    mid = readable(given.shared_x)
    if first is not None:
        shared_x, (gate, up) = mid, given.halves
        mid = shared_x.new_empty(m, gate.shape[0])
        before = {
            "x": address(shared_x), "gate": address(gate), "up": address(up),
            "hidden": address(mid), "m": m, "x_pitch": pitch(shared_x), **betas,
        }  # fmt: skip
        names = (*gate_up.ADDRESSES, *gate_up.SIZES)
        runtime.kernel(first)(*(before[name] for name in names))
    config = config_of(second)
    ids, weights = given.topk_ids.contiguous(), given.topk_weights.contiguous()
    x, scale = given.mxfp8 or (readable(given.hidden), None)
    rows = mid.new_empty(m, config.top_k, config.latent)
    routed, shared = mid.new_empty(m, config.latent), mid.new_empty(m, config.hidden)
    values: dict[str, int | Rows] = {
        "x": address(x), "x_scale": address(scale), "ids": address(ids),
        "weights": address(weights),
        "w13": address(given.w13), "w13_scale": address(given.w13_scale), "w2": address(given.w2),
        "w2_scale": address(given.w2_scale), "w2_ends": address(given.w2), "rows": address(rows),
        "arrivals": address(arrivals(x.device)), "routed": address(routed),
        "shared_x": address(mid), "shared_down": address(given.shared_down),
        "shared_out": address(shared),
        "m": m, "experts": given.w13.shape[0], "x_pitch": pitch(x),
        "shared_pitch": pitch(mid), **betas,
    }  # fmt: skip
    scratch: list[Tensor] = []
    if isinstance(config, BlockConfig):
        # Held until the launch, so that nothing else gets their memory before it.
        maps, scratch = tiles_of(config, given, x, scale)
        values |= maps
    runtime.kernel(second)(*(values[name] for name in parameter_names(second)))
    if held is not None:
        held += [mid, x, ids, weights, rows, *scratch, *([] if scale is None else [scale])]
    return routed, shared


def tiles_of(
    config: BlockConfig, given: Operands, x: Tensor, scale: Tensor | None
) -> tuple[dict[str, int | Rows], list[Tensor]]:
    """The tensor maps of the block-scaled engine, and its scratch: MXFP8 rows of each cluster.

    x, scale: the rows in MXFP8, which need no scratch; or in BF16, and None.
    """
    maps = {name: config.tiles(name, given.w13.shape[0]) for name in ("w13", "w2")}
    found: dict[str, int | Rows] = {
        name: Rows(address(getattr(given, name)), tiles.dims[1], tiles.strides[0])
        for name, tiles in maps.items()
    }
    if scale is not None:
        rows = Rows(address(x), x.shape[0], x.shape[1])
        return found | {"x8_tiles": rows, "x8_scale": address(scale)}, []
    eights = x.new_empty(config.clusters, config.m, config.latent, dtype=torch.uint8)
    scales = x.new_empty(config.clusters, config.m, config.scales1, dtype=torch.uint8)
    here = address(eights)
    return found | {"x8_tiles": here, "x8": here, "x8_scale": address(scales)}, [eights, scales]


def launch(
    row: Row,
    target: str,
    group: str,
    given: Operands,
    activation: Activation,
    eps: float,
    rounding: Collection[str],
    mix: Mix | None = None,
    *,
    ahead: Ahead = NOTHING,
    runtime: Runtime = RUNTIME,
    space: Callable[[str, int], Workspace] = tail.mailboxes,
) -> list[Tensor]:
    """Run a policy row's kernels on operands without a `misfit`; [delta], all [M, H] and BF16.

    With the AttnRes behind it: [delta, mix, new prefix]. Weights that cannot be read in place are
    copied. rounding: members of `reference.ROUNDING`. ahead: weights of later ops, prefetched
    before the tail. Raises ExchangeError, LaunchError.
    """
    norm, up = given.latent_norm_weight, given.up_weight
    last = (TAIL if mix is None else MIXED_TABLE).lookup(target, given.hidden.shape[0])
    if norm is None or up is None or last is None:
        raise LaunchError("these operands have a misfit; ask `misfit` before the launch")
    floor, before = "hidden_floor" in rounding, "round_before_weight" in rounding
    given = _in_place(given)
    routed, shared = partials(row, target, given, activation, floor, runtime=runtime)
    operands = last, target, group, routed, shared, norm, up, eps, before
    if mix is None:
        return [tail.launch(*operands, ahead=ahead, runtime=runtime, space=space)]
    return list(tail.launch_mixed(*operands, mix, ahead=ahead, runtime=runtime, space=space))


def _in_place(given: Operands) -> Operands:
    """The operands with copies of weights that the kernels cannot read in place."""
    found: dict[str, Any] = {**placed("experts", given.weights)}
    halves = [found.pop(f"shared_gate_up[{i}]") for i in range(len(given.shared_gate_up))]
    return replace(given, shared_gate_up=halves, **found)
