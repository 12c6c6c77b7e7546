"""Exit with 1 where a graph lacks expected sites: python check_in_ci.py GRAPH.json router=1."""

import sys

from k3fuse.rewriter.inspecting import inspect_source


def missing(graph: str, expected: dict[str, int]) -> list[str]:
    """One line a pattern that has fewer sites than expected, with the first reason."""
    document = inspect_source(graph, target="gb300:tp8", plan=True)
    lines = []
    for pattern, sites in expected.items():
        found = document["patterns"][pattern]["found"]
        if found < sites:
            reasons = [
                r for s in document["sites"] if s["pattern"] == pattern for r in s["reasons"]
            ]
            why = f"{reasons[0]['code']}: {reasons[0]['hint']}" if reasons else "nothing like it"
            lines.append(f"{pattern}: {found} of {sites}; {why}")
    return lines


def main(graph: str, *counts: str) -> int:
    """Print what is missing; return the exit code."""
    lines = missing(graph, {name: int(n) for name, n in (c.split("=") for c in counts)})
    print("\n".join(lines) or "as expected")
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
