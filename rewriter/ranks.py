"""Whether all ranks of the default process group decided alike."""

from __future__ import annotations

import datetime
import itertools

import torch.distributed as dist

# Compiling ranks drift apart by the length of a compile; a rank that failed never answers.
TIMEOUT = datetime.timedelta(minutes=10)

_ROUNDS = itertools.count()


class RankError(RuntimeError):
    """A rank did not report its sites in time."""


def rank_and_world() -> tuple[int, int]:
    """Rank and number of ranks of the default process group; (0, 1) where there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def agree(site_hash: str, timeout: datetime.timedelta = TIMEOUT) -> list[int]:
    """Exchange site hashes; return the ranks that differ from rank 0 (empty: all agree).

    Goes through the group's store, not a collective: it works for every backend, from any thread,
    and a rank that never comes is an error instead of a hang. Every rank must call it equally
    often. The fake backend has one process, which agrees with itself.
    Raises RankError naming the time-out where a rank does not answer.
    """
    world = dist.get_world_size()
    if world == 1 or dist.get_backend() == "fake":
        return []
    store = dist.distributed_c10d._get_default_store()
    prefix = f"k3fuse/sites/{next(_ROUNDS)}"
    store.set(f"{prefix}/{dist.get_rank()}", site_hash)
    keys = [f"{prefix}/{rank}" for rank in range(world)]
    try:
        store.wait(keys, timeout)
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"not every one of {world} ranks reported its sites within {timeout}; "
            "compile the same model on every rank"
        ) from error
    hashes = [store.get(key).decode() for key in keys]
    return [rank for rank, other in enumerate(hashes) if other != hashes[0]]
