"""The `k3fuse` command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click

from k3fuse.rewriter import console
from k3fuse.rewriter.saved import SavedError, SavedReport

OK, MISSING, WRONG_USE, NOT_REACHED = 0, 1, 2, 3


class Failure(click.ClickException):
    """One line on standard error and an exit code."""

    def __init__(self, message: str, code: int = WRONG_USE) -> None:
        super().__init__(message)
        self.exit_code = code  # type: ignore[misc]

    def show(self, file: Any = None) -> None:
        """Print the line."""
        click.echo(f"k3fuse: {self.message}", file=file or sys.stderr)


def _shared(command: Callable[..., Any]) -> Callable[..., Any]:
    """--json and -o, as every command has them."""
    command = click.option(
        "--json", "as_json", is_flag=True, help="One JSON document, nothing else."
    )(command)
    return click.option(
        "-o",
        "--output",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write there instead.",
    )(command)


def _cache(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--cache",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder of compiled kernels [default: $K3FUSE_KERNEL_CACHE or the user's cache].",
    )(command)


def _filters(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option("--pattern", help="Only this pattern.")(command)
    return click.option("--layer", type=int, help="Only this layer.")(command)


def _count(_: Any, __: Any, text: str) -> int | None:
    if text in ("dynamic", "dyn"):
        return None
    if not text.isdigit() or int(text) < 1:
        raise Failure(f"--m {text!r} is no token count; use an integer from 1, or 'dynamic'")
    return int(text)


class _Commands(click.Group):
    """The commands of this file and those of the entry points `k3fuse.commands`, loaded on use."""

    def list_commands(self, context: click.Context) -> list[str]:
        """All names, sorted."""
        return sorted({*self.commands, *entry_points(group="k3fuse.commands").names})

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """One command; None where there is none of that name."""
        if (found := super().get_command(context, name)) is not None:
            return found
        for entry in entry_points(group="k3fuse.commands", name=name):
            loaded: click.Command = entry.load()
            return loaded
        return None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="k3fuse")
def main() -> None:
    """Rewrite Kimi K3 decode graphs onto fused kernels, and say what did not match and why.

    Exit codes: 0 as expected, 1 sites missing or a check failed, 2 wrong use, 3 backend never
    reached.
    """


@main.command()
@click.argument("source")
@click.option("--target", default="gb300:tp8", show_default=True, help="ARCH:tpN, or reference.")
@click.option(
    "--m", "m", default="8", show_default=True, callback=_count, help="Tokens, or 'dynamic'."
)
@click.option("--plan", is_flag=True, help="As if every planned kernel existed.")
@click.option("--layers", type=click.IntRange(1), help="Layers of a built-in model.")
@click.option("--form", default="", help="Spelling of a built-in model (see the docs).")
@click.option(
    "--dump", type=click.Path(file_okay=False, path_type=Path), help="Write text dumps there."
)
@click.option(
    "--html", "page", type=click.Path(dir_okay=False, path_type=Path), help="Write the page there."
)
@_filters
@_shared
def inspect(
    source: str, target: str, m: int | None, plan: bool, layers: int | None, form: str,
    dump: Path | None, page: Path | None, pattern: str | None, layer: int | None, as_json: bool,
    output: Path | None,
) -> None:  # fmt: skip
    """Rewrite SOURCE without running it, and report.

    SOURCE: kimi-k3, kimi-linear, vllm:CONFIG.json, package.module:factory, or a saved graph
    (.json).
    """
    from k3fuse.rewriter.inspecting import inspect_source

    with console.progress(quiet=as_json) as progress, _one_line():
        report = inspect_source(
            source,
            target=target,
            m=m,
            plan=plan,
            layers=layers,
            form=form,
            dump=dump,
            record=page is not None,
            progress=progress,
        )
        if page is not None:
            from k3fuse.rewriter.html.page import page as page_of

            progress("write page")
            console.emit(page_of(report), page)
    saved = SavedReport(report)
    _check_filters(saved, pattern, layer)
    saved = saved.filtered(pattern, layer)
    console.emit(saved.document if as_json else console.report_text(saved), output)
    raise SystemExit(MISSING if saved.missing() else OK)


@main.command()
@click.argument("dump", type=click.Path(path_type=Path))
@_filters
@_shared
def explain(
    dump: Path, pattern: str | None, layer: int | None, as_json: bool, output: Path | None
) -> None:
    """Why sites of DUMP (folder or report.json) were not rewritten."""
    saved = _load(dump, pattern, layer)
    left = [s for s in saved.sites if s["outcome"] != "found"]
    document = {"schema": saved.document["schema"], "sites": left}
    console.emit(document if as_json else console.explain_text(left), output)


@main.command()
@click.argument("dump", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path), required=False)
@_filters
@_shared
def diff(
    dump: Path, other: Path | None, pattern: str | None, layer: int | None, as_json: bool,
    output: Path | None,
) -> None:  # fmt: skip
    """What changed in DUMP: a unified diff of each rewritten site.

    With OTHER: what differs between two dumps (versions, options, ranks), site by site; exit 1
    where sites or counts differ.
    """
    from k3fuse.rewriter.compare import compare, compare_text
    from k3fuse.rewriter.saved import site_diffs

    saved = _load(dump, pattern, layer)
    if other is not None:
        found = compare(saved.document, _load(other, pattern, layer).document)
        console.emit(found if as_json else compare_text(found), output)
        raise SystemExit(OK if found["same"] else MISSING)
    with _one_line():
        diffs = site_diffs(dump, saved)
    document = {"schema": saved.document["schema"], "diffs": diffs}
    console.emit(
        document if as_json else "\n".join(d["diff"] for d in diffs) or "no site was rewritten\n",
        output,
    )


@main.command()
@click.argument("dump", type=click.Path(path_type=Path))
@click.option("--expect", type=click.Path(path_type=Path), help="JSON object: pattern -> sites.")
@_shared
def check(dump: Path, expect: Path | None, as_json: bool, output: Path | None) -> None:
    """Compare the sites of DUMP with what is expected; exit 1 where any is missing."""
    saved = _load(dump, None, None)
    with _one_line():
        missing = saved.missing(expect)
    ok = not missing
    document = {"schema": saved.document["schema"], "ok": ok, "missing": missing}
    text = "as expected\n" if ok else "".join(f"missing {n} of {p}\n" for p, n in missing.items())
    console.emit(document if as_json else text, output)
    raise SystemExit(OK if ok else MISSING)


@main.command("key")
@click.argument("dump", type=click.Path(path_type=Path))
@click.argument("other", required=False, type=click.Path(path_type=Path))
@_shared
def key_(dump: Path, other: Path | None, as_json: bool, output: Path | None) -> None:
    """What the rewrite of DUMP depended on; with OTHER, what differs between the two."""
    from k3fuse.rewriter.key import differences, key

    mine = _load(dump, None, None).document.get("factors") or {}
    if not mine:
        raise Failure(f"{str(dump)!r} has no factors; write it again with `k3fuse inspect --dump`")
    document: dict[str, Any] = {"key": key(mine), "factors": mine}
    lines = [f"{name:<32} {value}" for name, value in sorted(mine.items())]
    if other is not None:
        theirs = _load(other, None, None).document.get("factors") or {}
        changed = differences(mine, theirs)
        document |= {"other": key(theirs), "differences": changed}
        lines = [f"{name:<32} {old} -> {new}" for name, (old, new) in changed.items()]
        lines = lines or ["no factor differs"]
    console.emit(document if as_json else "\n".join([f"key {key(mine)}", *lines]) + "\n", output)


@main.command(context_settings={"ignore_unknown_options": True})
@click.option("--dry-run", is_flag=True, help="Match and report; leave every graph as it is.")
@click.argument("script", type=click.Path(exists=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@_shared
def run(
    dry_run: bool, script: Path, arguments: tuple[str, ...], as_json: bool, output: Path | None
) -> None:
    """Run SCRIPT, whose models compile with backend="k3fuse", and report all its graphs."""
    from k3fuse.rewriter.inspecting import run_script

    with _one_line():
        report = run_script(script, arguments, dry_run=dry_run)
    if report is None:
        raise Failure(
            "COMPILE_NOT_REACHED: no graph reached the backend; compile a model with "
            "backend='k3fuse' and call it in the script",
            NOT_REACHED,
        )
    saved = SavedReport(report)
    console.emit(saved.document if as_json else console.report_text(saved), output)
    raise SystemExit(MISSING if saved.missing() else OK)


@main.group()
def bench() -> None:
    """Measure the rewriter itself."""


@bench.command("rewrite")
@click.option("--layers", default="1,2,4,8,13,93", show_default=True, help="Layer counts.")
@click.option("--target", default="gb300:tp8", show_default=True)
@click.option(
    "--compile-up-to",
    type=int,
    default=0,
    show_default=True,
    help="Time Inductor's compile up to so many layers.",
)
@_shared
def bench_rewrite(
    layers: str, target: str, compile_up_to: int, as_json: bool, output: Path | None
) -> None:
    """Rewrite time by number of layers, beside Inductor's own pattern passes on the same graph."""
    from k3fuse.rewriter.benchmark import measure

    parts = layers.split(",")
    if not all(p.strip().isdigit() and int(p) > 0 for p in parts):
        raise Failure(f"--layers {layers!r} is no list of counts; use for example 1,2,4")
    with console.progress(quiet=as_json) as progress, _one_line():
        document = measure([int(p) for p in parts], target, compile_up_to, progress)
    console.emit(document if as_json else console.bench_text(document), output)


# --- helpers ----------------------------------------------------------------------------------


class _one_line:  # noqa: N801 - reads as a statement
    """Turn the project's errors into one line and exit code 2."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ValueError) and type(error).__module__.startswith("k3fuse."):
            code = getattr(error, "exit_code", WRONG_USE)
            raise Failure(" ".join(str(error).split()), code) from None


def _load(path: Path, pattern: str | None, layer: int | None) -> SavedReport:
    try:
        saved = SavedReport.load(path)
    except SavedError as error:
        raise Failure(str(error)) from None
    _check_filters(saved, pattern, layer)
    return saved.filtered(pattern, layer)


def _check_filters(saved: SavedReport, pattern: str | None, layer: int | None) -> None:
    known = list(saved.document["patterns"])
    if pattern is not None and pattern not in known:
        raise Failure(f"--pattern {pattern!r} does not exist; use one of {', '.join(known)}")
    layers = sorted({s["layer"] for s in saved.sites if s["layer"] is not None})
    if layer is not None and layer not in layers:
        span = f"{layers[0]} to {layers[-1]}" if layers else "none"
        raise Failure(f"--layer {layer} has no site; layers with sites: {span}")


if __name__ == "__main__":
    main()
