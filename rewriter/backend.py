"""The torch.compile backend `k3fuse`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from k3fuse.rewriter.engine import rewrite
from k3fuse.rewriter.key import decision, factors, key
from k3fuse.rewriter.options import Options
from k3fuse.rewriter.pattern import load_patterns
from k3fuse.rewriter.ranks import agree, rank_and_world
from k3fuse.rewriter.reasons import Code, Reason
from k3fuse.rewriter.report import Report, not_reached

log = logging.getLogger("k3fuse")

_REPORTS: list[Report] = []


class StrictError(RuntimeError):
    """Strict mode: expected sites are missing, or the backend was never reached."""


def reports() -> list[Report]:
    """Reports of every graph compiled in this process so far, oldest first."""
    return list(_REPORTS)


def reset_reports() -> None:
    """Forget the reports so far (one model after another in one process)."""
    _REPORTS.clear()


def k3fuse(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph: functionalise, rewrite, hand to the inner compiler.

    `torch.compile(model, backend="k3fuse", options={...})`; the options are those of `Options`.
    Graphs that need gradients go to the inner compiler as they are: the fused ops are for decode.
    Raises OptionError or TargetError for wrong options, StrictError where strict mode is on.
    """
    if mode is not None:
        raise ValueError(f"mode={mode!r} is not taken; use options={{'inner': 'inductor'}} instead")
    chosen = Options.make(options)
    if chosen.target is not None:
        chosen.target.check_process_group()
    load_patterns()  # registers the fused ops before any cached artifact that names them is loaded
    if chosen.inner == "inductor":
        return _inductor(gm, example_inputs, chosen)
    return _aot(gm, example_inputs, chosen)


def rewrite_together(
    module: fx.GraphModule,
    options: Options,
    *,
    source: str = "torch.compile",
    recompile: bool = True,
) -> Report:
    """Rewrite one AOT graph so that all ranks end with the same graph, keep and log the report.

    Raises StrictError where strict mode is on and sites are missing or ranks disagree.
    """
    report = rewrite(module, options, source=source, recompile=recompile, consent=_ask_ranks)
    differs = [r for s in report.sites for r in s.reasons if r.code is Code.RANK_DISAGREES]
    if differs:
        if options.strict:
            raise StrictError(str(differs[0]))
        _say_once(str(differs[0]))
    _REPORTS.append(report)
    report.rank, report.world = rank_and_world()
    if options.dump_dir:
        from k3fuse.rewriter.dump import write_dump

        # Ranks share a file system more often than not.
        folder = Path(options.dump_dir, f"rank_{report.rank:03d}" if report.world > 1 else "")
        write_dump(report, folder, module.graph, numbered=len(_REPORTS))
    if options.log != "off" and report.rank == 0:
        log.warning("%s", report.summary(explain=3 if options.log == "summary" else 6))
        if options.log in ("explain", "all"):
            log.warning("%s", "\n".join(report.reason_lines()))
    missing = report.missing()
    if options.strict and missing:
        text = ", ".join(f"{n} of {name}" for name, n in missing.items())
        raise StrictError(
            f"strict mode: {text} expected and not rewritten:\n"
            + "\n".join(report.reason_lines()[:6])
        )
    return report


@lru_cache(maxsize=64)
def _say_once(line: str) -> None:
    """One error a rank set, however many graphs it is about."""
    if rank_and_world()[0] == 0:
        log.error("k3fuse: %s", line)


def _ask_ranks(report: Report) -> Reason | None:
    """Every rank calls this once a graph, with sites or without; a difference stops all of them."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    differing = agree(decision(report))
    if not differing:
        return None
    return Reason(
        Code.RANK_DISAGREES,
        f"ranks {differing} chose other sites than rank 0, or read them otherwise; all keep the "
        "stock graph",
        expected="equal sites, dtypes, shapes and version",
        actual=decision(report),
    )


class _JointPass(CustomGraphPass):
    """The rewrite as Inductor's first graph pass: after AOTAutograd, before any pass of its own.

    Inductor's graph cache keys the graph after this pass, with every op, kernel choice and
    composition in it; the pass adds everything else that its decisions depend on.
    """

    def __init__(self, options: Options, before: Sequence[Any] = ()) -> None:
        """before: passes that were set already; torch 2.11 takes one pass and no list of them."""
        self.options = options
        self.before = tuple(before)

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite an inference graph; leave a training graph as it is."""
        for other in self.before:
            other(graph)
        names = [n.name for n in graph.nodes if n.op == "placeholder"]
        if graph.owning_module is not None and not any(n.startswith("tangents_") for n in names):
            # Inductor reads the graph, not the module's Python code.
            rewrite_together(graph.owning_module, self.options, recompile=False)

    def uuid(self) -> str | None:
        """Part of Inductor's cache key; None (no caching) where an earlier pass has none."""
        others = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.before]
        if None in others:
            return None
        return " ".join(
            [f"k3fuse {key(factors(self.options, load_patterns()))}", *map(str, others)]
        )


def _inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options
) -> Callable[..., Any]:
    """Inductor, with the rewrite between AOTAutograd and lowering.

    AOTAutograd's own cache would skip the rewrite on a warm start, and with it the report; it is
    switched off for this compile. Inductor's graph cache stays on. Where the caller compiles ahead
    of time (vLLM's mode 2 does), the result must be one that can be saved, and that cache makes it.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx

    others = inductor_config.joint_custom_pre_pass or []
    others = list(others) if isinstance(others, (list, tuple)) else [others]
    patches = {"joint_custom_pre_pass": _JointPass(options, others)}
    ahead_of_time = bool(functorch_config.bundled_autograd_cache)
    with functorch_config.patch(enable_autograd_cache=ahead_of_time):
        return compile_fx(gm, list(example_inputs), config_patches=patches)  # type: ignore[return-value]


def _aot(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """AOTAutograd without decompositions; the graph then runs as it is, or node by node (eager)."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def inference(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        report = rewrite_together(module, options)
        if options.inner == "eager" and report.found:
            return make_boxed_func(fx.Interpreter(module).run)  # type: ignore[no-any-return]
        return make_boxed_func(module.forward)  # type: ignore[no-any-return]

    def training(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        return make_boxed_func(module.forward)  # type: ignore[no-any-return]

    compiled = aot_autograd(
        fw_compiler=training, bw_compiler=training, inference_compiler=inference
    )
    return compiled(gm, list(example_inputs))


def check(expect: Mapping[str, int], *, target: str = "") -> Report:
    """Compare the sites of every graph so far with what a model should have.

    Returns one report of all graphs. Raises StrictError where the backend was never reached
    (COMPILE_NOT_REACHED) or a pattern has fewer sites than expected.
    """
    if not _REPORTS:
        report = not_reached(target, expect)
        raise StrictError(
            report.notes[0] + "; compile the model with backend='k3fuse' and call it once"
        )
    merged = Report(
        "all graphs", _REPORTS[0].target, _REPORTS[0].m, _REPORTS[0].tp, _REPORTS[0].patterns,
        expected=dict(expect),
    )  # fmt: skip
    for report in _REPORTS:
        merged.sites += report.sites
        merged.near += report.near
    if missing := merged.missing():
        text = ", ".join(f"{n} of {name}" for name, n in missing.items())
        raise StrictError(
            f"{text} expected and not rewritten:\n" + "\n".join(merged.reason_lines()[:6])
        )
    return merged
