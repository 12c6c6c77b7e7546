"""Kernels ready to launch: from packed files, else from the cache, loaded once a device.

Finding and loading a kernel takes milliseconds, compiling it seconds, and neither may happen while
a CUDA graph is captured, so a kernel that is first asked for inside a capture is refused.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from k3fuse.kernels.build import packed
from k3fuse.kernels.build.cache import Cache
from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.errors import LaunchError, MissingDslError, PackedError
from k3fuse.kernels.build.launch import Launcher, Rows
from k3fuse.kernels.build.variant import Variant, builder

ENVIRONMENT = "K3FUSE_KERNEL_PACK"


class Launch(Protocol):
    """A kernel that is loaded: one integer a parameter, `Rows` for a map with open rows."""

    def __call__(self, *values: int | Rows) -> None:
        """Launch on the current stream."""


class Runtime:
    """The kernels of one process.

    packs: packed files to look into first; those of $K3FUSE_KERNEL_PACK by default, separated as
    PATH is. cache: where to look next, and to build. load: makes a built kernel launchable.
    capturing: whether the current stream is being captured.
    """

    def __init__(
        self,
        packs: Sequence[Path] | None = None,
        cache: Cache | None = None,
        *,
        load: Callable[[Built], Launch] = Launcher,
        device: Callable[[], int] = torch.cuda.current_device,
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ) -> None:
        self._packs = packs
        self._cache = cache
        self._load, self._device, self._capturing = load, device, capturing
        self._built: dict[Variant, Built] = {}
        self._ready: dict[tuple[int, Variant], Launch] = {}
        self._lock = threading.Lock()

    def kernel(self, variant: Variant) -> Launch:
        """Return the variant, loaded on the current device.

        Raises LaunchError inside a graph capture where it is not loaded yet and where no packed
        file holds it and nothing can compile it, and what the launcher raises.
        """
        key = self._device(), variant
        found = self._ready.get(key)
        if found is not None:
            return found
        with self._lock:
            if key not in self._ready:
                if self._capturing():
                    raise LaunchError(
                        f"{variant.label} is not loaded yet and cannot be loaded while a CUDA "
                        "graph is captured; run one step with this token count first"
                    )
                self._ready[key] = self._load(self.built(variant))
            return self._ready[key]

    def built(self, variant: Variant) -> Built:
        """Return the variant from a packed file, the cache, or the compiler."""
        if not self._built:
            for path in self._paths():
                self._built.update(
                    {k.variant: _of_this_version(path, k) for k in packed.load(path)}
                )
        if variant not in self._built:
            try:
                self._built[variant] = (self._cache or Cache()).get(variant)
            except MissingDslError as error:
                raise LaunchError(
                    f"{error}, or pack it elsewhere (`k3fuse kernels pack`) and name the file in "
                    f"{ENVIRONMENT}"
                ) from None
        return self._built[variant]

    def _paths(self) -> Sequence[Path]:
        if self._packs is not None:
            return self._packs
        return [Path(p) for p in os.environ.get(ENVIRONMENT, "").split(os.pathsep) if p]


def _of_this_version(path: Path, kernel: Built) -> Built:
    """The kernel, if what calls it here knows its geometry and its parameters."""
    if builder(kernel.variant.op).plan(kernel.variant) != kernel.plan:
        raise PackedError(
            f"{path}: {kernel.variant.label} was packed by a version of k3fuse that launches it in "
            "another way; pack it again with this version"
        )
    return kernel


RUNTIME = Runtime()
