"""Fake results of a fused op, without running its fake implementation for every equal site."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from k3fuse.rewriter.site import Reshaped


class FakeResults:
    """Runs an op on fake values. Equal static signatures are run once: 93 layers have few forms.

    Every call returns tensors of its own: Inductor takes a shared fake storage for an alias.
    """

    def __init__(self) -> None:
        self._seen: dict[Any, list[torch.Tensor]] = {}

    def of(self, op: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Results for arguments that hold nodes (their meta["val"]), Reshaped nodes or literals.

        kwargs: names to nodes, lists of them, or literals.
        """
        if "composition" in kwargs:
            kwargs = {**kwargs, "composition": ""}  # no part of the results, and long
        kwargs = {name: _fake(value) for name, value in kwargs.items()}
        values = tuple(_fake(arg) for arg in args)
        flat = [v for value in values for v in (value if isinstance(value, list) else [value])]
        mode = next((m for v in flat if (m := getattr(v, "fake_mode", None))), None)
        if mode is None:
            return _run(op, values, kwargs)
        try:
            named = tuple((name, _signature(v)) for name, v in kwargs.items())
            key = (op, tuple(_signature(v) for v in values), named)
        except ValueError:
            with mode:
                return _run(op, values, kwargs)
        with mode:
            seen = self._seen.get(key)
            if seen is not None:
                return tuple(torch.empty_like(t) for t in seen)
            results = _run(op, values, kwargs)
        self._seen[key] = list(results)
        return results


def fake_value(leaf: Any) -> Any:
    """The value an argument stands for while tracing."""
    if isinstance(leaf, Reshaped):
        return leaf.node.meta["val"].reshape(leaf.sizes)
    return leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf


def _fake(arg: Any) -> Any:
    return [fake_value(a) for a in arg] if isinstance(arg, (list, tuple)) else fake_value(arg)


def _run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    out = op(*args, **kwargs)
    return tuple(out) if isinstance(out, (list, tuple)) else (out,)


def _signature(value: Any) -> Any:
    """Hashable description of a static value. Raises ValueError for a symbolic one."""
    if isinstance(value, list):
        return tuple(_signature(v) for v in value)
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *value.stride())
        if not all(isinstance(s, int) for s in sizes):
            raise ValueError("a symbolic size")
        return (sizes, value.dtype, value.device)
    if isinstance(value, torch.SymInt):
        raise ValueError("a symbolic size")
    return value
