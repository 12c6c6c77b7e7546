"""One rewrite of one graph: match sites, ask guards, edit, verify, report."""

from __future__ import annotations

import gc
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from torch import fx

from k3fuse.rewriter import guards as guard_engine
from k3fuse.rewriter import safety
from k3fuse.rewriter.edit import Editor
from k3fuse.rewriter.links import Linker, is_plain_view
from k3fuse.rewriter.options import Options
from k3fuse.rewriter.pattern import Pattern, load_patterns
from k3fuse.rewriter.plan import Planner, Unit, edit, same_values
from k3fuse.rewriter.prefetch import with_prefetch
from k3fuse.rewriter.reasons import Code, Reason
from k3fuse.rewriter.record import Recorder
from k3fuse.rewriter.report import Report
from k3fuse.rewriter.site import NearMiss, Site, absorb_views
from k3fuse.rewriter.target import Target
from k3fuse.rewriter.verify import snapshot, verify
from k3fuse.rewriter.view import GraphView

Progress = Callable[[str], None]
Phase = Callable[[str], AbstractContextManager[None]]

_LAYER = re.compile(r"layers?[._](\d+)(?:[._]|$)")


def rewrite(
    module: fx.GraphModule,
    options: Options,
    *,
    source: str = "graph",
    patterns: tuple[Pattern, ...] | None = None,
    progress: Progress | None = None,
    texts: bool = False,
    recompile: bool = True,
    consent: Callable[[Report], Reason | None] | None = None,
) -> Report:
    """Rewrite `module` in place and report. A graph without an accepted site is not touched.

    texts: keep each site before and after, model lines and bytes (for dumps and the page).
    recompile: see Editor.finish.
    The graph must be a functional ATen graph with fake values in meta["val"].
    """
    with _no_garbage_collection():
        return _rewrite(module, options, source, patterns, progress, texts, recompile, consent)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pause the cyclic collector: walking a large graph's objects again and again frees nothing.

    It takes a fifth of the time at 93 layers.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _rewrite(
    module: fx.GraphModule,
    options: Options,
    source: str,
    patterns: tuple[Pattern, ...] | None,
    progress: Progress | None,
    texts: bool,
    recompile: bool,
    consent: Callable[[Report], Reason | None] | None,
) -> Report:
    target = options.target or Target.detect()
    target = replace(
        target, batch_invariant=options.batch_invariant, row_sharded=options.row_sharded
    )
    loaded = load_patterns() if patterns is None else patterns
    say = progress or (lambda _: None)
    report = Report(
        source=source,
        target=target.name,
        m=None,
        tp=target.tp,
        patterns=tuple(p.name for p in loaded),
        optional=tuple(p.name for p in loaded if p.optional),
        expected=dict(options.expect),
        changed_options=options.changed(),
        plan=options.plan,
    )
    start = time.perf_counter()

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        say(name)
        begin = time.perf_counter()
        yield
        report.phases[name] = report.phases.get(name, 0.0) + time.perf_counter() - begin

    with phase("read"):
        view = GraphView(module.graph, options.groups)
        report.nodes_before = report.nodes_after = len(view.nodes)
    with phase("match"):
        _match(view, loaded, report)
        _number_layers(view, report, options)
    with phase("guard"):
        for site in report.sites:
            _judge(site, view, loaded, target, options)
        _shadow(view, report, loaded)
        linker = Linker(
            view, report.found, lambda site: _judge(site, view, loaded, target, options)
        )
        linker.join(loaded, report.found)
        _token_count(report)
    if consent is not None and (objection := consent(report)) is not None:
        for site in report.found:
            site.refuse(objection)
    ready = None
    if report.found and not options.dry_run:
        ready = _plan(module, view, loaded, linker, report, target, options, phase)
    recorder = Recorder(report) if texts or options.dump_dir else None
    if recorder is not None:
        with phase("record"):
            named = {n: x for n in view.nodes if (x := _layer_named(n)) is not None}
            recorder.before(view, named)
    made: dict[int, tuple[fx.Node, ...]] = {}
    if ready is not None:
        made = _apply(module, *ready, report, options, phase, recompile=recompile)
    if recorder is not None:
        with phase("record"):
            recorder.after(made)
    # A dump's own work is no part of the rewrite.
    report.seconds = time.perf_counter() - start - report.phases.get("record", 0.0)
    return report


def _plan(
    module: fx.GraphModule, view: GraphView, patterns: tuple[Pattern, ...], linker: Linker,
    report: Report, target: Target, options: Options, phase: Phase,
) -> tuple[Editor, list[Unit]]:  # fmt: skip
    """What takes the place of every site; nothing is edited."""
    with phase("edit"):
        editor = Editor(module)
        planner = Planner(view, patterns, target, editor, linker)
        planned = planner.units(report.found)
    if options.validate == "values":
        with phase("values"):
            planned = same_values(planner, planned, report)
    if options.prefetch:
        with phase("prefetch"):
            planned = with_prefetch(view, patterns, target, planned)
    return editor, planned


def _apply(
    module: fx.GraphModule, editor: Editor, planned: list[Unit], report: Report, options: Options,
    phase: Phase, *, recompile: bool,
) -> dict[int, tuple[fx.Node, ...]]:  # fmt: skip
    """Edit and verify; id of each rewritten site -> its new nodes."""
    with phase("edit"):
        before = snapshot(module.graph)
        made = edit(editor, planned)
        if editor.events:
            editor.finish(recompile=recompile)
    with phase("verify"):
        if options.validate != "off":
            verify(module, before, editor.exchanged)
        report.validated = options.validate
    report.events = Counter(e.kind for e in editor.events)
    report.nodes_after = len(module.graph.nodes)
    report.launches = launches(report)
    return made


def _match(view: GraphView, patterns: tuple[Pattern, ...], report: Report) -> None:
    for pattern in patterns:
        for found in pattern.find(view):
            if isinstance(found, Site):
                found.nodes = absorb_views(view, found)
                report.sites.append(found)
            else:
                report.near.append(found)
    seen = {site.pattern for site in report.sites} | {miss.pattern for miss in report.near}
    report.patterns = tuple(p.name for p in patterns if p.name in seen or not p.optional)
    report.sites.sort(key=lambda s: view.index[s.nodes[0]])


def _layer_named(node: fx.Node) -> int | None:
    """Layer number in the node's module path, or in the name of a parameter it reads."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(v[0] if isinstance(v, tuple) else v) for v in stack.values()]
    paths.append(str(node.meta.get("module", "")))
    for path in reversed(paths):
        if found := _LAYER.search(path):
            return int(found[1])
    return None


def _number_layers(view: GraphView, report: Report, options: Options) -> None:
    """Layer of each site: from module paths or parameter names, else counted by output projections.

    A layer has one output projection; the attention side of a layer comes before it in the graph,
    the rest of the layer behind it.
    """
    ends = sorted(view.index[s.anchor] for s in report.sites if s.pattern == "output_projection")
    items: list[Site | NearMiss] = [*report.sites, *report.near]
    for item in items:
        if isinstance(item, Site) and item.outside_layers:
            continue
        nodes = item.nodes if isinstance(item, Site) else (item.anchor,)
        named = [n for x in nodes if (n := _layer_named(x)) is not None]
        weights = [
            w.name for x in nodes for w in x.all_input_nodes if w.op in ("placeholder", "get_attr")
        ]
        named += [int(f[1]) for w in weights if (f := _LAYER.search(w))]
        if named:
            item.layer = Counter(named).most_common(1)[0][0]
            continue
        position = view.index[item.anchor]
        passed = sum(1 for e in ends if e < position)
        before_end = item.pattern in ("attention_projection", "attn_res", "output_projection")
        item.layer = options.first_layer + (passed if before_end else max(passed - 1, 0))


def _judge(
    site: Site, view: GraphView, patterns: tuple[Pattern, ...], target: Target, options: Options
) -> None:
    pattern = next(p for p in patterns if p.name == site.pattern)
    site.source = source_line(site.anchor)
    names = (site.anchor.name,)
    if not target.arch:
        site.refuse(
            Reason(
                Code.ARCH_UNSUPPORTED,
                "no target was named and this process has no GPU the kernels are for",
                names,
                expected="gb300:tp8 or gb300:tp16",
                actual="none",
            )
        )
        return
    site.guards, reasons = guard_engine.failures(
        pattern.guards,
        site.values,
        view.shape_env,
        names,
        kernel_scope=not target.is_reference,
        row_sharded=target.row_sharded and not target.is_reference,
        seen=view.notes.setdefault("guards", {}),
    )
    site.refuse(*reasons) if reasons else None
    if other := _other_group(site, target):
        site.refuse(other)
    if unsafe := safety.check(site, view):
        site.refuse(*unsafe)
    if site.pattern in options.disable:
        site.refuse(Reason(Code.DISABLED_BY_USER, f"pattern {site.pattern} is disabled", names))
    if options.only_layers is not None and site.layer not in options.only_layers:
        site.refuse(
            Reason(Code.DISABLED_BY_USER, f"layer {site.layer} is not in only_layers", names)
        )
    if site.outcome != "found":
        return
    site.kernel = pattern.kernel(site, target)
    if site.kernel is None or not (site.kernel.available or options.plan):
        planned = f" (planned: {site.kernel.name})" if site.kernel else ""
        site.refuse(
            Reason(
                Code.KERNEL_UNAVAILABLE,
                f"no {site.pattern} kernel is built for {target.name}{planned}",
                names,
                expected=f"a kernel for {target.name}",
                actual="none",
            )
        )


def _other_group(site: Site, target: Target) -> Reason | None:
    """Why a site whose ranks are not the target's is left: its kernels are for another split."""
    ranks = next((v for s, v in site.values.items() if s.name == "TP"), None)
    if target.is_reference or ranks is None or ranks == target.tp:
        return None
    return Reason(
        Code.GROUP_MISMATCH,
        f"the graph reduces over {ranks} ranks, target {target.name} is for {target.tp}",
        (site.anchor.name,),
        expected=str(target.tp),
        actual=str(ranks),
    )


def _shadow(view: GraphView, report: Report, patterns: tuple[Pattern, ...]) -> None:
    """Where two accepted sites share a computing node, the higher priority keeps it."""
    priority = {p.name: p.priority for p in patterns}
    taken: dict[fx.Node, Site] = {}
    for site in sorted(report.found, key=lambda s: -priority[s.pattern]):
        shared = [n for n in site.nodes if n in taken and not is_plain_view(view, n)]
        if shared:
            other = taken[shared[0]]
            site.refuse(
                Reason(
                    Code.SHADOWED_BY,
                    f"{other.pattern} of layer {other.layer} takes {shared[0].name}",
                    (shared[0].name,),
                    expected="nodes of its own",
                    actual=other.pattern,
                )
            )
            continue
        taken.update(dict.fromkeys(site.nodes, site))


def _token_count(report: Report) -> None:
    for site in report.sites:
        for symbol, value in site.values.items():
            if symbol.name == "M":
                report.m = int(value) if value.is_Integer else str(value)
                return


def source_line(node: fx.Node) -> str:
    """Last model line of the node's stack trace, "file.py:12 code", or ""."""
    stored = node.meta.get("source")
    if stored:
        return str(stored)
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]+)", line (\d+), in .*\n\s*(.+)', trace)
    if not frames:
        return ""
    path, line, code = frames[-1]
    return f"{path.rsplit('/', 1)[-1]}:{line} {code.strip()}"


def launches(report: Report) -> dict[str, object]:
    """Kernels launched by a layer of each kind after the rewrite, from the policies.

    By most layers of the kind: the first one's AttnRes stands behind no experts. Of two counts in
    as many layers the smaller one.

    The attention core is not rewritten: one launch for KDA, three for MLA (query, core, value).
    None where a family of the layer was not accepted, or hides launches in an opaque op. A layer
    may do without the optional patterns: they open the opaque op in front of a tail.
    """
    optional = set(report.optional)
    per_layer: dict[int, dict[str, Site]] = {}
    for site in report.found:
        if site.layer is not None:
            per_layer.setdefault(site.layer, {}).setdefault(site.pattern, site)
    out: dict[str, object] = {"kda_layer": None, "mla_layer": None}
    for kind, core in (("kda", 1), ("mla", 3)):
        totals: Counter[int] = Counter()
        for sites in per_layer.values():
            projection = sites.get("attention_projection")
            if projection is None or projection.form.split()[0] != kind:
                continue
            opaque = any(s.form == "tail" for s in sites.values()) and not optional & set(sites)
            if set(report.patterns) - optional - set(sites) or opaque:
                continue
            total = sum(s.kernel.launches for s in sites.values() if s.kernel is not None)
            totals[total + core] += 1
        if totals:
            out[f"{kind}_layer"] = min(totals, key=lambda n: (-totals[n], n))
    return out
