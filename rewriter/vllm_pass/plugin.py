"""The entry point of the group `vllm.general_plugins`: called in every process of vLLM.

It puts one wrapper around the start of a worker. The wrapper reads the engine's configuration;
where nobody asked for k3fuse it calls through and leaves no trace.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

log = logging.getLogger("k3fuse")
_WORKER = "vllm.v1.worker.worker_base"
_MARK = "_k3fuse_wrapped"


def register() -> None:
    """Wrap the start of this process's worker, once however often it is called.

    Some processes of vLLM have none, the one that only looks at the model's class for example, and
    importing the worker would cost them 0.3 s: it is wrapped when somebody else imports it.
    """
    module = sys.modules.get(_WORKER)
    if module is not None:
        _wrap(module)
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(importlib.abc.MetaPathFinder):
    """Finds nothing; wraps the worker's start when its module has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The worker's own spec with a step behind its execution; None for every other name."""
        if fullname != _WORKER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _wrap(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _wrap(module: ModuleType) -> None:
    try:
        worker: Any = module.WorkerWrapperBase
        # init_worker itself loads the plugins, so that the step behind it is the first to wrap.
        start = worker.init_device
    except AttributeError as error:
        log.debug("k3fuse: no worker to watch in this vLLM (%s)", error)
        return
    if getattr(start, _MARK, False):
        return

    @functools.wraps(start)
    def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = start(self, *args, **kwargs)
        config = getattr(self, "vllm_config", None)
        if config is not None and _may_ask(config):
            from k3fuse_vllm.worker import watch

            watch(self.worker, config)
        return result

    setattr(init_device, _MARK, True)
    worker.init_device = init_device


def _may_ask(config: Any) -> bool:
    """Whether the configuration names k3fuse anywhere; no import of ours before it does."""
    additional = getattr(config, "additional_config", None)
    compilation = getattr(config, "compilation_config", None)
    named = [
        getattr(compilation, "backend", ""),
        *getattr(compilation, "inductor_passes", {}).values(),
    ]
    return (isinstance(additional, dict) and "k3fuse" in additional) or any(
        "k3fuse" in (n if isinstance(n, str) else type(n).__module__) for n in named
    )
