"""The entry point of the group `vllm.general_plugins`: called in every process of vLLM.

It puts one wrapper around the start of a worker. The wrapper reads the engine's configuration;
where nobody asked for k3fuse it calls through and leaves no trace.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

log = logging.getLogger("k3fuse")
_MARK = "_k3fuse_wrapped"


def register() -> None:
    """Wrap the start of this process's worker, once however often it is called."""
    try:
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        # init_worker itself loads the plugins, so that the step behind it is the first to wrap.
        start = WorkerWrapperBase.init_device
    except (ImportError, AttributeError) as error:
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
    WorkerWrapperBase.init_device = init_device


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
