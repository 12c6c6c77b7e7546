"""Which target a process has, and groups that cannot hold it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from k3fuse.rewriter import target
from k3fuse.rewriter.recognise.all_reduce import group_size
from k3fuse.rewriter.target import Target, TargetError


@pytest.mark.parametrize(
    ("gpu", "ranks", "name"),
    [
        (None, 8, "none"),
        ((10, 3), 8, "gb300:tp8"),
        ((10, 3), 16, "gb300:tp16"),
        ((10, 3), 4, "none"),
        ((10, 3), 1, "none"),
        ((10, 0), 8, "none"),
        ((9, 0), 8, "none"),
    ],
)
def test_the_target_of_a_process(
    monkeypatch: pytest.MonkeyPatch, gpu: tuple[int, int] | None, ranks: int, name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu)
    monkeypatch.setattr(target, "world_size", lambda: ranks)
    found = Target.detect()
    assert found.name == name
    assert found.sm == ("sm_103a" if name != "none" else "")


def test_the_reference_target_is_what_its_name_says() -> None:
    assert Target.reference() == Target.parse("reference")
    assert Target.reference().is_reference
    assert Target.reference().sm == ""
    assert not Target.parse("gb300:tp8").is_reference


def test_a_group_that_cannot_be_split_into_the_targets_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eight = Target.parse("gb300:tp8")
    for ranks in (1, 8, 16):
        monkeypatch.setattr(target, "world_size", lambda ranks=ranks: ranks)
        eight.check_process_group()
    monkeypatch.setattr(target, "world_size", lambda: 12)
    with pytest.raises(TargetError, match=r"groups of 8 ranks, the process group has 12; start"):
        eight.check_process_group()
    Target.reference().check_process_group()


def test_the_size_of_a_group_is_the_graphs_or_the_processs_or_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert group_size("tp:0", {"tp:0": 8}) == 8
    with monkeypatch.context() as without:
        without.setattr(dist, "is_initialized", lambda: False)
        assert group_size("tp:0", {}) is None
    made = not dist.is_initialized()
    if made:
        dist.init_process_group(backend="fake", world_size=4, rank=0, store=FakeStore())
    try:
        assert dist.group.WORLD is not None
        assert group_size(dist.group.WORLD.group_name, {}) == dist.get_world_size()
        assert group_size("no such group", {}) is None
    finally:
        if made:
            dist.destroy_process_group()
