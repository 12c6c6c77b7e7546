"""Compiled kernels that all tests of a run share, whatever process they are in."""

from __future__ import annotations

import fcntl
from functools import cache, partial

from k3fuse.kernels.build.cache import Cache, default_folder
from k3fuse.kernels.build.compile import Built, compile_variant
from k3fuse.kernels.build.variant import Variant


class Stored(Cache):
    """The run's folder: a kernel is compiled by one process, which others wait for.

    Without counts of machine instructions, so it is not the folder that the commands have.
    """

    def __init__(self) -> None:
        compiler = partial(compile_variant, histogram=False)
        super().__init__(default_folder() / "plain", compiler=compiler)
        self._held: dict[Variant, Built] = {}

    def get(self, variant: Variant) -> Built:
        if (held := self._held.get(variant)) is None:
            path = self.path(variant)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                held = self._held[variant] = super().get(variant)
        return held


@cache
def store() -> Stored:
    """The compiled kernels, in the folder that conftest.py made for the run."""
    return Stored()
