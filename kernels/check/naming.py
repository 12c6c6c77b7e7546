"""Whose buffer is it: traffic under the name by which a buffer's owner passes it.

The simulator names a buffer after the parameter that it sees first. A mailbox of rank 1 that rank 0
writes through its parameter `peer` would be called so, even for rank 1, which calls it `inbox`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from k3fuse.kernels.simulator import Bytes, Fresh, Inside, Multicast, Owned, TensorMap

Traffic = Mapping[tuple[int, str, int, str], Bytes]
_Key = tuple[int, int]


def owned_tensor(value: object) -> torch.Tensor | None:
    """The tensor of a parameter that passes the rank's own memory; None for anything else."""
    own = isinstance(value, Fresh | Inside) or (isinstance(value, TensorMap) and value.rank is None)
    found = getattr(value, "tensor", None) if own else value
    return found if isinstance(found, torch.Tensor) else None


class Naming:
    """Follows which buffers the launches of a step pass, and under which names."""

    def __init__(self) -> None:
        self._first: dict[_Key, tuple[str, int]] = {}

    def by_owner(
        self,
        traffic: Traffic,
        names: Sequence[str],
        said: Sequence[str],
        params: Sequence[Sequence[object]],
    ) -> dict[tuple[int, str, int, str], Bytes]:
        """Return the traffic of the next launch with every buffer named as its owner passes it.

        names: of the parameters, in kernel order. said: what the simulator was told they are
        called. params: the values of each rank, in kernel order.
        """
        proper: dict[_Key, str] = {}
        loose: dict[_Key, str] = {}
        for rank, values in enumerate(params):
            for name, called, value in zip(names, said, values, strict=True):
                for tensor, owner in _buffers(value, rank):
                    key = tensor.data_ptr(), tensor.nbytes
                    self._first.setdefault(key, (called, owner))
                    loose.setdefault(key, name)
                    if owned_tensor(value) is not None and self._first[key][1] == rank:
                        proper.setdefault(key, name)
        renamed = {self._first[key]: proper.get(key, name) for key, name in loose.items()}
        found: dict[tuple[int, str, int, str], Bytes] = {}
        for (rank, name, owner, way), part in traffic.items():
            total = found.setdefault((rank, renamed.get((name, owner), name), owner, way), Bytes())
            total.requested += part.requested
            total.distinct += part.distinct
        return found


def _buffers(value: object, rank: int) -> Iterator[tuple[torch.Tensor, int]]:
    """The tensors behind a parameter and the ranks in whose memory they are."""
    if isinstance(value, Multicast):
        yield from ((tensor, owner) for owner, tensor in enumerate(value.tensors))
    elif isinstance(value, Owned):
        yield value.tensor, value.rank
    elif isinstance(value, Inside):
        yield value.tensor, rank
    elif isinstance(value, TensorMap):
        yield value.tensor, rank if value.rank is None else value.rank
    elif (tensor := owned_tensor(value)) is not None:
        yield tensor, rank
