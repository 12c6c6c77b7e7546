"""Inspect a saved graph and write the page: python page_of_a_graph.py GRAPH.json report.html."""

import sys
from pathlib import Path

from k3fuse.rewriter.html.page import page
from k3fuse.rewriter.inspecting import inspect_source


def main(graph: str, output: str) -> int:
    """Write the page; return its size in bytes."""
    document = inspect_source(graph, target="gb300:tp8", plan=True, record=True)
    return Path(output).write_text(page(document))


if __name__ == "__main__":
    print(main(*sys.argv[1:3]), "bytes")
