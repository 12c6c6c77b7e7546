"""One worker that was asked: route, rewrite, and a word at the end of the start, whatever came."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from k3fuse.kernels.common.registry import OPS
from k3fuse.rewriter import backend, options
from k3fuse.rewriter.backend import StrictError
from k3fuse.rewriter.pattern import load_patterns
from k3fuse.rewriter.ranks import agree
from k3fuse.rewriter.reasons import Code, Reason
from k3fuse_vllm.experts import use_engine
from k3fuse_vllm.experts_op import experts_op
from k3fuse_vllm.facts import Facts
from k3fuse_vllm.processes import group_sizes, rank
from k3fuse_vllm.record import Outcome, Record
from k3fuse_vllm.regional import small_steps
from k3fuse_vllm.routes import Decision, decide
from k3fuse_vllm.settings import OWN, Route, Settings

log = logging.getLogger("k3fuse")


def watch(worker: Any, config: Any) -> Watch | None:
    """Follow one worker from here to the end of its warm-up; None where nobody asked after all.

    Raises OptionError for a wrong option and StrictError where strict mode meets a refusal: the
    engine then fails to start.
    """
    facts = Facts.of(config)
    settings = Settings.of(facts)
    if settings is None:
        return None
    found = Watch(worker, config, facts, settings.with_groups(group_sizes()))
    found.begin()
    return found


class Watch:
    """The state of one worker's rewrite."""

    def __init__(self, worker: Any, config: Any, facts: Facts, settings: Settings) -> None:
        self.worker, self.config, self.facts, self.settings = worker, config, facts, settings
        self.decision: Decision = with_kernels(decide(facts, settings), settings)
        self.record = Record(config, settings, self.decision, facts)
        self.regions: Any = None

    def begin(self) -> None:
        """Set this process up and wrap the worker's two steps that matter."""
        backend.reset_reports()
        given = {k: v for k, v in self.settings.given.items() if k not in OWN}
        if self.settings.options.target is not None:
            given["target"] = self.settings.options.target.name
        given["groups"] = dict(self.settings.options.groups)
        if not self.decision.active:
            given["disable"] = list(_pattern_names())
        options.set_process_options(given)
        for note in self.decision.notes:
            self._say(note)
        for reason in self.decision.reasons:
            self._say(f"{reason}; fix: {reason.fix}")
        if self.decision.reasons and self.settings.options.strict:
            raise StrictError(str(self.decision.reasons[0]))
        if self.settings.fresh:
            _no_caches()
        if self.decision.route is Route.BACKEND:
            _take_inductor_settings(self.config.compilation_config.inductor_compile_config)
        load_patterns()  # registers the fused ops before a cached artifact that names them loads
        experts_op()
        use_engine(self.config)
        if self.facts.passes:
            from k3fuse_vllm.graph_pass import set_engine

            set_engine(self.settings, self.decision)
        self._wrap("load_model", before=self._before_load, after=self._after_load)
        self._wrap("compile_or_warm_up_model", before=self._before_warm_up, after=self._finish)

    def _wrap(self, name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
        step = getattr(self.worker, name)

        @functools.wraps(step)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before()
            result = step(*args, **kwargs)
            after()
            return result

        setattr(self.worker, name, wrapped)

    def _before_load(self) -> None:
        if self.decision.active and self.decision.route is Route.REGIONAL:
            from k3fuse_vllm.regional import Regions

            self.regions = Regions(self.facts, self.settings)
            self.regions.prepare()

    def _after_load(self) -> None:
        if self.regions is not None:
            self.regions.compile(self.worker.model_runner.model)

    def _before_warm_up(self) -> None:
        # Compiled here, so that no CUDA graph capture and no request meets a cold layer.
        if self.regions is not None:
            self.regions.reach(self.worker.model_runner)
        elif self.decision.active and self.facts.mode == 1:
            # The profiling step compiled for its own count alone, which is none of a decode step.
            small_steps(self.worker.model_runner)

    def _finish(self) -> None:
        """Say what happened, keep it, and compare it with the other ranks."""
        regions = self.regions.for_report() if self.regions is not None else None
        outcome = self.record.outcome(backend.reports(), regions)
        if self.decision.active and outcome.site_hash is not None:
            self._compare(outcome)
        if rank() == 0:
            path = self.record.write(outcome)
            log.warning("%s", outcome.summary(str(path)))
        else:
            self.record.write(outcome)
        if self.settings.options.strict and (not outcome.reached or outcome.document["reasons"]):
            raise StrictError(outcome.headline())
        if self.settings.options.strict and (missing := outcome.missing()):
            text = ", ".join(f"{n} of {name}" for name, n in missing.items())
            raise StrictError(f"strict mode: {text} expected and not rewritten")

    def _compare(self, outcome: Outcome) -> None:
        if not (torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1):
            return
        differing = agree(str(outcome.site_hash))
        if differing:
            raise StrictError(
                str(
                    Reason(
                        Code.RANK_DISAGREES,
                        f"ranks {differing} run other sites than rank 0 at the end of the start; "
                        "a compile cache of one rank is stale: remove it and start again",
                    )
                )
            )

    def _say(self, text: str) -> None:
        if rank() == 0:
            log.warning("k3fuse: %s", text)


def with_kernels(decision: Decision, settings: Settings) -> Decision:
    """Refuse the regional route where no kernel exists for the target.

    A compiled layer without a fused kernel would be slower than vLLM's own decode code.
    """
    target = settings.options.target
    if decision.route is not Route.REGIONAL or settings.options.plan or target is None:
        return decision
    if target.is_reference or any(
        row is not None and row.kernel is not None
        for info in OPS.values()
        for row in (info.table.lookup(target.name, 1),)
    ):
        return decision
    reason = Reason(
        Code.KERNEL_UNAVAILABLE,
        f"no kernel is built for {target.name}",
        expected=f"a kernel for {target.name}",
        actual="none",
        hint="nothing is lost: the run is stock",
    )
    return replace(decision, reasons=(*decision.reasons, reason))


def _take_inductor_settings(wanted: Mapping[str, Any]) -> None:
    """Compile as vLLM would: it hands its Inductor settings to the backend "inductor" alone."""
    from torch._inductor import config as inductor_config

    for name, value in wanted.items():
        if isinstance(value, (bool, int, float, str)):
            with contextlib.suppress(AttributeError):
                setattr(inductor_config, name, value)


def _no_caches() -> None:
    """Compile everything anew: a warm cache would load the rewritten graph and show nothing."""
    os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    from torch._inductor import config as inductor_config

    inductor_config.force_disable_caches = True


def _pattern_names() -> list[str]:
    return [pattern.name for pattern in load_patterns()]
