"""Processes of a test: forked from one that has imported torch and k3fuse for all of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import start_processes

# The server forks from what it has imported, and has one thread.
PRELOADED = ("torch", "torch._dynamo", "k3fuse.patterns.models", "k3fuse.rewriter.backend")


def run_ranks(function: Callable[..., None], size: int, *arguments: Any) -> None:
    """Call `function(rank, *arguments)` in a process a rank; raises where one of them fails.

    function: of a module that the processes can import. They have the environment that the first
    call of this test process had.
    """
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    launch: Any = start_processes
    launch(function, arguments, nprocs=size, start_method="forkserver")
