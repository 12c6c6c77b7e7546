"""`k3fuse kernels`: what can be built, build it, show what it takes, check it, pack it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from k3fuse.rewriter import console
from k3fuse.rewriter.cli import Failure, _cache, _one_line, _shared
from k3fuse.rewriter.cli_check import check
from k3fuse.rewriter.cli_gpu import gpu
from k3fuse.rewriter.target import Target

if TYPE_CHECKING:
    from k3fuse.kernels.build.compile import Built
    from k3fuse.kernels.build.variant import Variant

SCHEMA = "k3fuse.kernels-report/1"


def _sizes(context: click.Context, parameter: click.Parameter, text: str) -> dict[str, int]:
    """Read "m=8,n=7168"."""
    found: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not (equals and name.strip() and value.strip().isdigit()):
            raise Failure(
                f"--{parameter.name} {text!r} is no list of sizes; use for example m=8,n=7168"
            )
        found[name.strip()] = int(value)
    return found


def _what(command: Callable[..., Any]) -> Callable[..., Any]:
    """Which kernels: architecture, sizes, tuning."""
    for option in (
        click.option("--config", default="", callback=_sizes, help="Tuning, as name=number,..."),
        click.option("--shape", default="", callback=_sizes, help="Sizes, as name=number,..."),
        click.option("--m", "m", type=click.IntRange(1), help="Tokens; the same as --shape m=..."),
        click.option("--arch", "archs", multiple=True, help="For example sm_103a; repeatable."),
        click.option(
            "--target", default="gb300:tp8", show_default=True, help="Names the architecture."
        ),
    ):
        command = option(command)
    return command


@click.group()
@click.pass_context
def kernels(context: click.Context) -> None:
    """Build, inspect, check and pack kernels; nothing but `gpu` needs a GPU."""
    # A builder or case of one's own may stand in the current folder, as with `python -m`.
    here = str(Path.cwd())
    sys.path.insert(0, here)
    context.call_on_close(lambda: sys.path.remove(here))


kernels.add_command(check)
kernels.add_command(gpu)


@kernels.command("list")
@click.argument("ops", nargs=-1, metavar="[OP]...")
@_what
@_cache
@_shared
def list_(
    ops: tuple[str, ...], target: str, archs: tuple[str, ...], m: int | None,
    shape: dict[str, int], config: dict[str, int], cache: Path | None,
    as_json: bool, output: Path | None,
) -> None:  # fmt: skip
    """List the variants of each OP; resources where a variant is in the cache."""
    from k3fuse.kernels.build.cache import Cache
    from k3fuse.kernels.build.errors import PackedError

    rows = []
    with _one_line():
        store = Cache(cache)
        for variant in _variants(ops, _archs(target, archs), m, shape, config):
            try:
                rows.append(_row(variant, store.peek(variant)))
            except PackedError:  # damaged: the next build replaces it
                rows.append(_row(variant, None))
    console.emit(_document(rows) if as_json else [_table(rows)], output)


@kernels.command()
@click.argument("ops", nargs=-1, metavar="[OP]...")
@_what
@_cache
@_shared
def build(
    ops: tuple[str, ...], target: str, archs: tuple[str, ...], m: int | None,
    shape: dict[str, int], config: dict[str, int], cache: Path | None,
    as_json: bool, output: Path | None,
) -> None:  # fmt: skip
    """Compile the variants of each OP (default: of every op) into the cache."""
    with _one_line():
        found = _variants(ops, _archs(target, archs), m, shape, config)
        rows = [_row(b.variant, b) for b in _built(found, cache, quiet=as_json)]
    console.emit(_document(rows) if as_json else [_table(rows)], output)


@kernels.command()
@click.argument("op")
@click.option("--packed", type=click.Path(path_type=Path), help="From a packed file, not built.")
@click.option("--ptx", is_flag=True, help="Print the PTX, too.")
@click.option("--key", is_flag=True, help="Print the cache key's factors, and what changed.")
@_what
@_cache
@_shared
def show(
    op: str, packed: Path | None, ptx: bool, key: bool, target: str, archs: tuple[str, ...],
    m: int | None, shape: dict[str, int], config: dict[str, int], cache: Path | None,
    as_json: bool, output: Path | None,
) -> None:  # fmt: skip
    """Show what one variant of OP takes: registers, shared memory, occupancy, instructions."""
    from k3fuse.kernels.build import builder
    from k3fuse.kernels.build import packed as packed_files

    sizes = {**shape, **({"m": m} if m else {})}
    with _one_line():
        chosen = _archs(target, archs)
        if packed is None:
            variants = [builder(op).variant(arch, sizes, config) for arch in chosen]
            found = _built(variants, cache, quiet=as_json)
        else:
            content = packed_files.load(packed)
            fits = [b for b in content if set(config.items()) <= set(b.variant.config)]
            found = [packed_files.select(fits or content, arch, op, sizes) for arch in chosen]
    details = [_details(b, ptx=ptx) for b in found]
    if as_json:
        console.emit(_document(details), output)
        return
    parts: list[Any] = []
    for row, built in zip(details, found, strict=True):
        parts += _details_text(row)
        if key:
            parts += ["", *_key_text(row)]
        if ptx:
            parts += ["", built.ptx]
    console.emit("\n".join(parts), output)


@kernels.command()
@click.argument("ops", nargs=-1, metavar="[OP]...")
@click.option("--no-ptx", is_flag=True, help="Leave the PTX out; only tools need it.")
@_what
@_cache
@_shared
def pack(
    ops: tuple[str, ...], no_ptx: bool, target: str, archs: tuple[str, ...], m: int | None,
    shape: dict[str, int], config: dict[str, int], cache: Path | None,
    as_json: bool, output: Path | None,
) -> None:  # fmt: skip
    """Write the variants of each OP to one file (-o) that a host without the DSL can launch."""
    from k3fuse.kernels.build import packed

    if output is None:
        raise Failure("pack writes a file; name it, for example -o kernels.k3pack")
    with _one_line():
        found = _built(_variants(ops, _archs(target, archs), m, shape, config), cache, as_json)
        packed.pack(found, output, ptx=not no_ptx)
    rows = [_row(b.variant, b) for b in found]
    size = output.stat().st_size
    if as_json:
        console.emit({**_document(rows), "file": str(output), "bytes": size}, None)
    else:
        console.emit(f"{output}: {len(rows)} kernels, {size} bytes", None)


@kernels.command()
@click.option("--case", "names", multiple=True, help="Only the cases of this name; repeatable.")
@_cache
@_shared
@click.pass_context
def bench(
    context: click.Context, names: tuple[str, ...], cache: Path | None, as_json: bool,
    output: Path | None,
) -> None:  # fmt: skip
    """Measure what the simulator costs at K3 sizes; exit code 1 where a target is missed."""
    from k3fuse.kernels.simulator import benchmark
    from k3fuse.rewriter.benchmark import machine

    known = list(dict.fromkeys(case.name for case in benchmark.CASES))
    if wrong := sorted(set(names) - set(known)):
        raise Failure(f"--case {wrong[0]!r} is unknown; use {', '.join(known)}")
    found = []
    with _one_line(), console.progress(quiet=as_json) as say:
        for case in benchmark.CASES:
            if not names or case.name in names:
                say(f"{case.name}, {case.ranks} ranks, M = {case.m}")
                found.append(benchmark.measure(case, cache))
    document = {
        "schema": "k3fuse.simulator-bench/1",
        "machine": machine(),
        "rows": [row.to_json() for row in found],
    }
    console.emit(document if as_json else [_bench_table(document["rows"])], output)
    if not all(row.ok for row in found):
        context.exit(1)


# --- helpers ----------------------------------------------------------------------------------


def _archs(target: str, archs: Sequence[str]) -> list[str]:
    """Architectures asked for, each once; checked."""
    from k3fuse.kernels.build.variant import check_arch

    chosen = list(dict.fromkeys(archs)) or [Target.parse(target).sm]
    if chosen == [""]:
        raise Failure(f"--target {target!r} names no architecture; use for example gb300:tp8")
    for arch in chosen:
        check_arch(arch)
    return chosen


def _variants(
    ops: Sequence[str], archs: Sequence[str], m: int | None,
    shape: dict[str, int], config: dict[str, int],
) -> list[Variant]:  # fmt: skip
    """Return the variants that are listed, or the one of the sizes given, an op and arch."""
    from k3fuse.kernels.build.variant import BUILDERS, builder

    sizes = {**shape, **({"m": m} if m else {})}
    found: dict[Variant, None] = {}
    for op in ops or BUILDERS:
        source = builder(op)
        for arch in archs:
            chosen = (
                [source.variant(arch, sizes, config)] if sizes or config else source.variants(arch)
            )
            found.update(dict.fromkeys(chosen))
    return list(found)


def _built(variants: Iterable[Variant], cache: Path | None, quiet: bool) -> list[Built]:
    from k3fuse.kernels.build.cache import Cache

    store, found = Cache(cache), []
    with console.progress(quiet=quiet) as say:
        for variant in variants:
            if not store.path(variant).exists():
                say(f"build {variant.label}")
            found.append(store.get(variant))
    return found


def _document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"schema": SCHEMA, "kernels": rows}


def _row(variant: Variant, built: Built | None) -> dict[str, Any]:
    """Return the keys every command gives; resources are None where nothing was built."""
    from k3fuse.kernels.build import builder

    plan = built.plan if built else builder(variant.op).plan(variant)
    return {
        "op": variant.op,
        "variant": variant.name,
        "arch": variant.arch,
        "registers": built.resources.registers if built else None,
        "spill_bytes": built.resources.spill_bytes if built else None,
        "smem_bytes": built.smem_bytes if built else None,
        "grid": list(plan.grid),
        "block": list(plan.block),
        "cluster": list(plan.cluster),
        "cubin_bytes": len(built.cubin) if built else None,
    }


def _details(built: Built, *, ptx: bool) -> dict[str, Any]:
    from dataclasses import asdict

    from k3fuse.kernels.build.cache import diff_factors, key_factors, key_of
    from k3fuse.kernels.build.resources import SM_COUNTS, occupancy

    plan = built.plan.to_json(built.variant.arch)
    factors = dict(built.factors)
    changed = diff_factors(factors, key_factors(built.variant))
    return {
        **_row(built.variant, built),
        "shape": dict(built.variant.shape),
        "config": dict(built.variant.config),
        "entry": built.entry,
        "dynamic_smem": plan["dynamic_smem"],
        "pdl": plan["pdl"],
        "parameters": plan["parameters"],
        "stack_bytes": built.resources.stack_bytes,
        "occupancy": [asdict(occupancy(built.plan, built.resources, n)) for n in SM_COUNTS],
        "sass": _most_first(built.resources.sass),
        "key": key_of(factors),
        "factors": factors,
        "changed": {name: list(pair) for name, pair in changed.items()},
        **({"ptx": built.ptx} if ptx else {}),
    }


def _most_first(counts: Mapping[str, int] | None) -> dict[str, int] | None:
    if counts is None:
        return None
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _by(values: Iterable[int]) -> str:
    return " x ".join(str(v) for v in values)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("op", "variant", "arch"):
        table.add_column(name, no_wrap=True)
    for name in ("registers", "spill bytes", "smem bytes", "grid", "block", "cluster"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        counts = [row["registers"], row["spill_bytes"], row["smem_bytes"]]
        table.add_row(
            row["op"], row["variant"], row["arch"],
            *("-" if c is None else str(c) for c in counts),
            _by(row["grid"]), _by(row["block"]), _by(row["cluster"]),
        )  # fmt: skip
    return table


def _bench_table(rows: Any) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("case")
    for name in ("ranks", "M", "warp instructions", "processor s", "target s", "peak GB",
                 "target GB"):  # fmt: skip
        table.add_column(name, justify="right")
    table.add_column("ok")
    for row in rows:
        table.add_row(
            row["case"], str(row["ranks"]), str(row["m"]), f"{row['warp_instructions']:,}",
            f"{row['seconds']:.2f}", f"{row['target_seconds']:.2f}", f"{row['gigabytes']:.2f}",
            f"{row['target_gigabytes']:.2f}", "yes" if row["ok"] else "no",
        )  # fmt: skip
    return table


def _details_text(row: dict[str, Any]) -> list[str]:
    parameters = ", ".join(f"{p['name']} {p['kind']} @{p['offset']}" for p in row["parameters"])
    lines = [
        f"{row['op']}/{row['variant']}@{row['arch']}",
        f"  launch      grid {_by(row['grid'])}, block {_by(row['block'])}, "
        f"cluster {_by(row['cluster'])}, pdl {'yes' if row['pdl'] else 'no'}",
        f"  parameters  {parameters}",
        f"  registers   {row['registers']} a thread, {row['spill_bytes']} bytes spilled, "
        f"{row['stack_bytes']} bytes of stack",
        f"  memory      {row['smem_bytes']} bytes shared a CTA ({row['dynamic_smem']} dynamic), "
        f"cubin {row['cubin_bytes']} bytes",
    ]
    for found in row["occupancy"]:
        whole = ", whole grid at once" if found["co_resident"] else ""
        lines.append(
            f"  {found['sms']} SMs     {found['ctas_per_sm']} CTAs ({found['warps_per_sm']} warps) "
            f"an SM, bound by {found['limit']}; {found['waves']:.2f} waves{whole}"
        )
    if row["sass"] is None:
        lines.append("  SASS        not read: pip install nvidia-cuda-nvdisasm, then build again")
    else:
        most = ", ".join(f"{name} {count}" for name, count in list(row["sass"].items())[:10])
        lines.append(f"  SASS        {sum(row['sass'].values())} instructions: {most}")
    return lines


def _key_text(row: dict[str, Any]) -> list[str]:
    """Return the key, its factors, and those that a build here and now would have otherwise."""
    lines = ["key " + row["key"], *(f"  {n}: {v or '-'}" for n, v in row["factors"].items())]
    if row["changed"]:
        lines.append("a build here and now would differ in")
        lines += [
            f"  {n}: {old or '-'} -> {new or '-'}" for n, (old, new) in row["changed"].items()
        ]
    return lines
