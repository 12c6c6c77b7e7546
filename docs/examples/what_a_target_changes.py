"""Compare the sites of one graph for two targets, as `k3fuse diff A B` does for dumps."""

import sys

from k3fuse.rewriter.compare import compare, compare_text
from k3fuse.rewriter.inspecting import inspect_source


def main(graph: str, first: str, second: str) -> str:
    """Return the lines that differ."""
    one, two = (inspect_source(graph, target=t, plan=True) for t in (first, second))
    return compare_text(compare(one, two))


if __name__ == "__main__":
    print(main(*sys.argv[1:4]), end="")
