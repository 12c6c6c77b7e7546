"""Argument checks of the fused ops, for real and for fake tensors alike.

All raise ValueError or TypeError with the argument's name, its value and the fix. Token counts are
compared only where both are plain integers: comparing two symbols would add a guard that ties two
batch dimensions together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def rank(name: str, tensor: Tensor, *ranks: int) -> None:
    """`tensor` has one of `ranks` dimensions."""
    if tensor.dim() not in ranks:
        expected = " or ".join(map(str, ranks))
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; expected {expected} dimensions. Use view()"
        )


def unit_stride(name: str, tensor: Tensor) -> None:
    """The last dimension is dense (rows may be strided)."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has strides {tensor.stride()}; its last dimension must have stride 1. "
            "Call contiguous() before"
        )


def size(name: str, tensor: Tensor, dim: int, expected: int, meaning: str) -> None:
    """`tensor.shape[dim] == expected`."""
    if tensor.shape[dim] != expected:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; dim {dim} must be {expected} ({meaning})"
        )


def tokens(name: str, tensor: Tensor, m: int, at_least: bool = False) -> None:
    """`tensor` has `m` rows (or no fewer), where both counts are plain integers."""
    have = tensor.shape[0]
    if isinstance(have, torch.SymInt) or isinstance(m, torch.SymInt):
        return
    if have < m or (have != m and not at_least):
        raise ValueError(
            f"{name} has {have} rows for M={m} tokens; pass {'at least ' if at_least else ''}{m}"
        )


def dtype(name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    """`tensor.dtype` is one of `allowed`."""
    if tensor.dtype not in allowed:
        raise TypeError(
            f"{name} is {tensor.dtype}; expected {' or '.join(map(str, allowed))}. Call to() before"
        )


def rows(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """A matrix [rows, columns] with dense columns."""
    rank(name, tensor, 2)
    dtype(name, tensor, *dtypes)
    unit_stride(name, tensor)


def weight(name: str, tensor: Tensor, k: int, like: Tensor) -> None:
    """A weight [N, k] of the dtype of `like`."""
    rows(name, tensor, like.dtype)
    size(name, tensor, 1, k, "the reduction length")


def vector(name: str, tensor: Tensor, n: int) -> None:
    """A vector [n] of any float dtype."""
    rank(name, tensor, 1)
    dtype(name, tensor, *FLOATS)
    size(name, tensor, 0, n, "the row length")
    unit_stride(name, tensor)


def flags(name: str, text: str, known: Sequence[str]) -> frozenset[str]:
    """Parts of a '+'-joined flag text; ValueError for an unknown one. "" is the empty set."""
    parts = frozenset(text.split("+")) if text else frozenset()
    unknown = sorted(parts - set(known))
    if unknown:
        raise ValueError(f"{name}={text!r} holds {unknown}; known, joined by '+': {list(known)}")
    return parts
