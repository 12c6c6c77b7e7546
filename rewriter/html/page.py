"""The page: one file, nothing loaded from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from k3fuse.rewriter.html.content import content
from k3fuse.rewriter.html.picture import ARROW, STYLE

FOLDER = Path(__file__).parent


def page(document: dict[str, Any], ranks: Sequence[dict[str, Any]] = ()) -> str:
    """Return the HTML text of a report's document. ranks: documents of the other ranks.

    Every text of the report is escaped; style and script are this package's own files.
    """
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["size"] = size
    environment.filters["share"] = share
    return environment.get_template("page.html.j2").render(
        **content(document, ranks),
        style=_style(),
        script=_own("page.js"),
        arrow=Markup(ARROW),
    )


def _style() -> Markup:
    """The style sheet; the dark colours a second time for browsers that run no script."""
    text = (FOLDER / "style.css").read_text(encoding="utf-8")
    dark = re.search(r':root\[data-theme="dark"\] (\{.*?\n\})', text, re.DOTALL)
    if dark is None:
        raise ValueError("style.css has no dark theme")
    media = f"@media (prefers-color-scheme: dark) {{ html:not([data-theme]) {dark[1]} }}"
    return Markup(text.replace("/*DARK*/", media) + STYLE)


def _own(name: str) -> Markup:
    """A file of this package, unescaped."""
    return Markup((FOLDER / name).read_text(encoding="utf-8"))


def size(count: float) -> str:
    """Bytes as people read them, decimal: 90.4 MB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= factor:
            value = count / factor
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{count:.0f} B"


def share(part: float, whole: float) -> str:
    """Width of a bar in percent, 0.4 at least so that something can be seen, 100 at most."""
    return f"{min(max(100 * part / whole, 0.4), 100):.1f}" if part else "0"
