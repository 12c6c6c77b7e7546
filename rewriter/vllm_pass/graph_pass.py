"""The rewrite as a post-grad pass of vLLM's own compile (mode 3).

vLLM imports this package in every process, whether k3fuse was asked for or not: what the pass needs
is imported when it runs.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import fx
from vllm.compilation.passes.inductor_pass import InductorPass

if TYPE_CHECKING:
    from k3fuse_vllm.routes import Decision
    from k3fuse_vllm.settings import Settings

log = logging.getLogger("k3fuse")


class DecodePass(InductorPass):  # type: ignore[misc]
    """Rewrites each piece that vLLM compiles for decode-sized batches.

    Options come from the engine's additional_config. The object is one per process and pickles by
    reference, so that it can sit in the configuration that vLLM sends to its workers.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite one piece in place; a refused engine's pieces stay as they are."""
        from k3fuse.rewriter import backend
        from k3fuse_vllm.settings import Route

        settings, decision = _wish()
        module = graph.owning_module
        if settings is None:
            _say_once(
                "COMPILE_NOT_REACHED  the pass runs in a process where the plugin was not loaded; "
                "let VLLM_PLUGINS include k3fuse, or unset it"
            )
        if settings is None or module is None or decision.route is not Route.PASS:
            return
        if not decision.active:
            _say_once(str(decision.reasons[0]))
            return
        backend.rewrite_together(module, settings.options, source="vLLM mode 3", recompile=False)

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        """Whether a batch of the range can be decode-sized; others stay stock.

        With "compile_ranges_endpoints": [64] the ranges are (1, 64) and (65, max). A single range
        (1, max) is taken: each op then chooses by its batch when it runs.
        """
        from k3fuse_vllm.routes import MAX_TOKENS

        return int(compile_range.start) <= MAX_TOKENS

    def uuid(self) -> str:
        """Part of Inductor's and vLLM's cache keys: versions, sources, options, target, experts."""
        from k3fuse_vllm.experts import digest
        from k3fuse_vllm.versions import decision_digest

        settings, decision = _wish()
        target = settings.options.target if settings is not None else None
        given = {**settings.given, "active": decision.active} if settings is not None else {}
        given["experts"] = digest()
        return f"k3fuse-{decision_digest(given, target.name if target is not None else '')}"

    def __reduce__(self) -> str:
        # A name: found again as k3fuse_vllm.graph_pass.decode_pass.
        return "decode_pass"

    def __deepcopy__(self, memo: Any) -> DecodePass:
        return self


_ENGINE: list[tuple[Settings, Decision]] = []


def set_engine(settings: Settings, decision: Decision) -> None:
    """Tell the pass which engine this process serves: vLLM hands a pass its graph only."""
    _ENGINE[:] = [(settings, decision)]


def _wish() -> tuple[Settings | None, Decision]:
    """Settings and decision of this process's engine."""
    if _ENGINE:
        return _ENGINE[0]
    from k3fuse_vllm.routes import Decision
    from k3fuse_vllm.settings import Route

    return None, Decision(Route.NONE)


@lru_cache(maxsize=64)
def _say_once(line: str) -> None:
    log.warning("k3fuse: %s", line)


decode_pass = DecodePass()
