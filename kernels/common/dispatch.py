"""What every fused op does at run time: policy row -> reference or kernel, else the composition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.common.composition import Composition, CompositionError
from k3fuse.kernels.common.policy import MAX_M, REFERENCE, Row, Table


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of one output; outputs are always contiguous and never alias anything."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, like: Tensor) -> Tensor:
        """An uninitialised output on the device of `like`."""
        return like.new_empty(self.shape, dtype=self.dtype)


def operands(overload: torch._ops.OpOverload[..., Any], args: Sequence[Any]) -> list[Any]:
    """The inputs of an op's composition: its tensor arguments in schema order.

    `args` are the positional arguments, tensors or graph nodes alike; lists are flattened and None
    is skipped. All tensor arguments of the k3fuse ops are positional.
    """
    found: list[Any] = []
    for parameter, value in zip(overload._schema.arguments, args, strict=False):
        if "Tensor" not in str(parameter.type) or value is None:
            continue
        found.extend(value if isinstance(value, list | tuple) else [value])
    return found


def run(
    table: Table,
    op: str,
    *,
    target: str,
    m: int,
    composition: str,
    inputs: Sequence[Tensor],
    specs: Sequence[Spec],
    reference: Callable[[], list[Tensor]],
    kernel: Callable[[Row], list[Tensor]] | None = None,
    misfit: Callable[[Row], str] | None = None,
    complete: Callable[[list[Tensor]], list[Tensor]] | None = None,
) -> list[Tensor]:
    """Outputs of one call, as `specs` says.

    The reference runs where the policy names it and for no tokens, `kernel` where it names one, the
    tensors are on a GPU and `misfit` has nothing against them. A count outside the policy, a row
    whose kernel does not exist yet, and other tensors run the composition: what the graph held
    before the rewrite, so never something slower than stock. `complete` adds what the op has more
    than the graph had.

    An op that exchanges rows must go the same way on all ranks of its group: its `misfit` may ask
    for what they have agreed on (dtypes, shapes, form), not for where a tensor lies (`placement`).
    Raises RuntimeError if there is no composition, CompositionError if it gives other outputs than
    the op.
    """
    row = table.lookup(target, m)
    whole = complete or (lambda outputs: outputs)
    if m == 0 and all(0 in spec.shape for spec in specs):
        return [spec.empty(inputs[0]) for spec in specs]
    # Without rows there is still an output of a size of its own: the plan of no units.
    if m == 0 or (row is not None and row.kernel == REFERENCE):
        return _finish(op, whole(reference()), inputs, specs)
    against = ""
    if row is not None and row.kernel is not None and kernel is not None and inputs[0].is_cuda:
        unfit = misfit(row) if misfit is not None else ""
        if not unfit:
            return kernel(row)
        against = f"does not take the operands: {unfit}"
    if not composition:
        why = f"outside its policy (1..{MAX_M})" if row is None else row.reason
        if row is not None and row.kernel is not None:
            against = against or f"runs on a GPU, the operands are on {inputs[0].device}"
            why = f"its kernel {row.kernel!r} {against}"
        raise RuntimeError(
            f"k3fuse.{op}: M={m} on target {target!r}: {why}, and the op carries no composition to "
            "run instead; build the graph with the composition text of the replaced nodes"
        )
    return _finish(op, whole(Composition.from_text(composition).run(inputs)), inputs, specs)


def _finish(
    op: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], specs: Sequence[Spec]
) -> list[Tensor]:
    """`outputs` checked against `specs`, contiguous, no aliases of inputs or of each other."""
    got = [Spec(tuple(t.shape), t.dtype) for t in outputs]
    if got != list(specs):
        raise CompositionError(f"k3fuse.{op}: outputs are {got}, the op promises {list(specs)}")
    taken = {_storage(t) for t in inputs}
    finished: list[Tensor] = []
    for tensor, spec in zip(outputs, specs, strict=True):
        # is_contiguous() ignores the strides of dimensions of size 1; the fake tensor does not.
        if tensor.stride() != _contiguous_stride(spec.shape) or _storage(tensor) in taken:
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=tensor.device).copy_(tensor)
        taken.add(_storage(tensor))
        finished.append(tensor)
    return finished


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))
