"""Order of the pages for mkdocs: guides first, then every other page that is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

FIRST = [
    "index.md", "first_ten_minutes.md", "vllm.md", "reading_a_report.md", "options.md",
    "sources.md", "writing_a_pattern.md", "writing_a_kernel.md", "workbench.md", "simulator.md",
    "simulator_races.md", "architecture.md", "glossary.md",
]  # fmt: skip
FOLDERS = ("patterns", "kernels", "reasons", "examples")


def navigation(docs: Path) -> list[Any]:
    """Pages of the docs folder, each once."""
    top = [name for name in FIRST if (docs / name).exists()]
    top += sorted(p.name for p in docs.glob("*.md") if p.name not in FIRST)
    nav: list[Any] = list(top)
    for folder in FOLDERS:
        pages = sorted(str(p.relative_to(docs)) for p in (docs / folder).rglob("*.md"))
        pages.sort(key=lambda page: not page.endswith("README.md"))
        if pages:
            nav.append({folder: pages})
    return nav


def on_config(config: Any) -> Any:
    """Called by mkdocs."""
    config["nav"] = navigation(Path(config["docs_dir"]))
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs. A link to a source file, which the site does not hold, becomes its text."""
    docs = Path(config["docs_dir"]).resolve()
    here = (docs / page.file.src_uri).parent

    def plain(match: re.Match[str]) -> str:
        target = (here / match[2].partition("#")[0]).resolve()
        outside = target.exists() and not target.is_relative_to(docs)
        return match[1] if outside else match[0]

    return re.sub(r"\[([^\]]*)\]\((\.\./[^)\s]+)\)", plain, markdown)
