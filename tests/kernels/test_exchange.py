"""Mailboxes in symmetric memory: real gloo groups, shared host memory in place of peers."""

from __future__ import annotations

import ctypes
import datetime
import multiprocessing as mp
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from k3fuse.kernels.common import exchange
from k3fuse.kernels.common.exchange import ExchangeError, Mapped, Workspace, workspace
from k3fuse.kernels.common.mailbox import SENTINEL, ErrorWord
from k3fuse.kernels.router.layout import FrontMailbox

HIDDEN = 256
TIMEOUT = datetime.timedelta(seconds=300)


class HostMemory:
    """Symmetric memory for processes of one host; the address of a peer is where it is mapped."""

    def __init__(self, multicast: int = 0, capture: bool = False) -> None:
        self.multicast, self.capture = multicast, capture
        self.maps: list[shared_memory.SharedMemory] = []
        self.meetings = 0

    def allocate(self, size: int) -> torch.Tensor:
        self.maps.append(shared_memory.SharedMemory(create=True, size=size))
        return torch.frombuffer(self.maps[-1].buf, dtype=torch.uint8)[:size]

    def rendezvous(self, memory: torch.Tensor, group: dist.ProcessGroup) -> Mapped:
        names: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(names, self.maps[-1].name, group=group)
        addresses = []
        for rank, name in enumerate(names):
            if rank == dist.get_rank(group):
                addresses.append(memory.data_ptr())
                continue
            self.maps.append(shared_memory.SharedMemory(name=name))
            addresses.append(torch.frombuffer(self.maps[-1].buf, dtype=torch.uint8).data_ptr())
        return Mapped(tuple(addresses), self.multicast, self.maps)

    def meet(self, group: dist.ProcessGroup) -> None:
        self.meetings += 1
        dist.barrier(group=group)

    def capturing(self) -> bool:
        return self.capture


def publish(space: Workspace, offset: int, value: int) -> None:
    """Store one word into every mailbox of the group."""
    for address in space.mapped.addresses:
        ctypes.c_uint32.from_address(address + offset).value = value


def child(rank: int, world: int, store: str, what: str, queue: Any) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=TIMEOUT
    )
    try:
        queue.put((rank, CASES[what](rank, world)))
    except BaseException as error:
        queue.put((rank, error))
    dist.barrier()
    dist.destroy_process_group()


def run(tmp_path: Path, what: str, world: int) -> list[Any]:
    context = mp.get_context("fork")
    queue = context.Queue()
    workers = [
        context.Process(target=child, args=(rank, world, str(tmp_path / "store"), what, queue))
        for rank in range(world)
    ]
    for worker in workers:
        worker.start()
    found = dict(queue.get(timeout=400) for _ in workers)
    for worker in workers:
        worker.join(30)
    for value in found.values():
        if isinstance(value, BaseException):
            raise value
    return [found[rank] for rank in range(world)]


def _reaches_all(rank: int, world: int) -> list[int]:
    space = workspace("0", world, hidden=HIDDEN, provider=HostMemory(), device=lambda: 0)
    assert space.armed()
    dist.barrier()
    publish(space, space.mailbox.slot(1, rank, 63), 1000 + rank)
    dist.barrier()
    assert not space.armed()
    words = space.memory.view(torch.int32)
    got = [int(words[space.mailbox.slot(1, other, 63) // 4]) for other in range(world)]
    space.reset()
    assert space.armed()
    return got


def _subgroups(rank: int, world: int) -> tuple[str, int, int, list[int]]:
    """Two groups of two ranks, neither of which is the world."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    provider = HostMemory()
    space = workspace(group.group_name, 2, hidden=HIDDEN, provider=provider, device=lambda: 0)
    again = workspace(group.group_name, 2, hidden=HIDDEN, provider=provider, device=lambda: 0)
    assert again is space
    dist.barrier()
    publish(space, space.mailbox.slot(0, space.rank), 7 + rank)
    dist.barrier()
    words = space.memory.view(torch.int32)
    got = [int(words[space.mailbox.slot(0, other) // 4]) for other in range(2)]
    return group.group_name, space.rank, provider.meetings, got


def _errors(rank: int, world: int) -> list[str]:
    lines = []
    for make in (
        lambda: workspace("0", 8, hidden=HIDDEN, provider=HostMemory(), device=lambda: 0),
        lambda: workspace(
            "0", 2, hidden=HIDDEN, provider=HostMemory(capture=True), device=lambda: 0
        ),
        lambda: workspace("0", 2, hidden=HIDDEN, provider=Broken(), device=lambda: 1),
    ):
        with pytest.raises(ExchangeError) as caught:
            make()
        lines.append(str(caught.value))
    space = workspace("0", 2, hidden=HIDDEN, provider=HostMemory(), device=lambda: 0)
    space.check()
    with pytest.raises(ExchangeError) as caught:
        workspace("0", 4, hidden=HIDDEN, provider=HostMemory(), device=lambda: 0)
    lines.append(str(caught.value))
    if rank == 1:
        place = space.mailbox.error // 4
        space.memory.view(torch.int32)[place] = ErrorWord(5, 0).word
        with pytest.raises(ExchangeError) as caught:
            space.check()
        lines.append(str(caught.value))
    space.reset()
    space.check()
    rows = FrontMailbox(2, experts=16, latent=32)
    apart = workspace("0", 2, layout=rows, provider=HostMemory(), device=lambda: 0)
    equal = FrontMailbox(2, experts=16, latent=32)
    assert workspace("0", 2, layout=equal, provider=HostMemory(), device=lambda: 0) is apart
    assert apart is not space
    assert apart.armed()
    assert apart.memory.nbytes == rows.total
    exchange.forget("0")
    other = workspace("0", 2, hidden=HIDDEN, provider=HostMemory(multicast=64), device=lambda: 0)
    assert other is not space
    assert other.multicast
    assert not space.multicast
    return lines


class Broken(HostMemory):
    def rendezvous(self, memory: torch.Tensor, group: dist.ProcessGroup) -> Mapped:
        raise RuntimeError("no peer access")


CASES: dict[str, Callable[[int, int], Any]] = {
    "reaches_all": _reaches_all,
    "subgroups": _subgroups,
    "errors": _errors,
}


def test_a_publication_reaches_every_rank_and_a_reset_arms_all(tmp_path: Path) -> None:
    assert run(tmp_path, "reaches_all", 2) == [[1000, 1001]] * 2


def test_groups_that_are_not_the_world(tmp_path: Path) -> None:
    found = run(tmp_path, "subgroups", 4)
    names = [name for name, *_ in found]
    assert names[0] == names[2] != names[1] == names[3]
    assert [rank for _, rank, *_ in found] == [0, 0, 1, 1]
    assert {meetings for _, _, meetings, _ in found} == {1}  # the second call makes nothing
    assert [got for *_, got in found] == [[7, 9], [8, 10], [7, 9], [8, 10]]


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    first, second = run(tmp_path, "errors", 2)
    size, capture, broken, other = first
    assert size == "group '0' has 2 ranks, the kernels are for tp=8; compile for a target with tp2"
    assert "run one step without a graph first" in capture
    assert "(no peer access); they need GPUs with peer access" in broken
    assert "the kernels are for tp=4" in other
    assert second[:4] == first
    assert second[4].startswith("group '0', rank 1: token 5: the partial of rank 0 did not arrive")


def test_the_sentinel_is_the_pair_of_zeros_that_nobody_publishes() -> None:
    pair = torch.tensor([SENTINEL - (1 << 32)], dtype=torch.int32).view(torch.bfloat16)
    assert pair.tolist() == [0.0, 0.0]
    assert torch.signbit(pair).tolist() == [False, True]
