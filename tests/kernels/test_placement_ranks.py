"""Two ranks of a process group, a weight of one at an odd address: they go the same way, or part.

The kernel's mailbox is the group's store here, where a rank waits for its peer's word; the
composition is a stock all-reduce. Whoever goes alone is left waiting.
"""

from __future__ import annotations

import datetime
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.processes import run_ranks
from torch import Tensor

WORLD = 2
HIDDEN, LATENT = 7168, 3584


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def _worker(rank: int, folder: str, by_place: bool) -> None:
    """One call of the tail. by_place: its misfit asks where weights lie, as it must not."""
    from k3fuse.kernels.common import dispatch
    from k3fuse.kernels.common.placement import misplaced
    from k3fuse.kernels.tail import op

    store = dist.FileStore(f"{folder}/store", WORLD)
    patience = datetime.timedelta(seconds=1 if by_place else 100)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    rows = torch.zeros(1, LATENT, dtype=torch.bfloat16).as_subclass(OnGpu)
    weight = torch.zeros(HIDDEN * LATENT + 4, dtype=torch.bfloat16)
    start = 4 if rank == 1 else 0  # 8 bytes
    up = weight[start : start + HIDDEN * LATENT].view(HIDDEN, LATENT)
    assert bool(misplaced(up)) is (rank == 1)
    went: list[str] = []

    def launched(*_: Any, **__: Any) -> Tensor:
        went.append("kernel")
        store.set(f"word of {rank}", "there")
        store.wait([f"word of {1 - rank}"], patience)
        return torch.ones(1, HIDDEN, dtype=torch.bfloat16)

    def composed(_: Any) -> list[Tensor]:
        went.append("composition")
        total = torch.ones(1, HIDDEN)
        dist.all_reduce(total)
        return [total.bfloat16()]

    real = op.misfit
    op.launch = launched  # type: ignore[assignment]
    dispatch.Composition = SimpleNamespace(  # type: ignore[assignment, misc]
        from_text=lambda _: SimpleNamespace(run=composed)
    )
    if by_place:
        op.misfit = lambda *given: real(*given) or misplaced(given[3])
    shared = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
    norm = torch.ones(LATENT, dtype=torch.bfloat16)
    found = "done"
    try:
        op._run(rows, shared, norm, up, 1e-5, target="gb300:tp8", group="", composition="text")
    except (RuntimeError, ValueError) as error:  # DistStoreError is one
        found = type(error).__name__
    Path(folder, f"{rank}.json").write_text(json.dumps([*went, found]))


@pytest.mark.parametrize("by_place", [False, True])
def test_a_weight_at_an_odd_address_of_one_rank(by_place: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_worker, WORLD, folder, by_place)
        first, second = (json.loads(Path(folder, f"{r}.json").read_text()) for r in range(WORLD))
    if not by_place:
        assert first == second == ["kernel", "done"]
        return
    # The control: decided by place, rank 0 waits for a word that never comes and gives up, and the
    # all-reduce of rank 1 ends when its peer is gone.
    assert (first[0], second[0]) == ("kernel", "composition")
    assert "done" not in (first[1], second[1])
