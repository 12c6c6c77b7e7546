"""Graph sources for the command line: built-in names, saved files, and any module of the user's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from torch import fx

from k3fuse.rewriter.target import Target

Progress = Callable[[str], None]


class SourceError(ValueError):
    """A source that does not exist or cannot be traced; one line, with the fix."""


@dataclass
class SourceGraph:
    """One captured graph, ready for the engine."""

    module: fx.GraphModule
    name: str
    groups: Mapping[str, int] = field(default_factory=dict)
    expected: Mapping[str, int] = field(default_factory=dict)
    first_layer: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SourceRequest:
    """What a built-in source is asked for.

    m is None for a symbolic count. lines: nodes shall know the model line that made them, which
    takes half as long again. argument: the part of SOURCE behind the source's name and a colon.
    """

    target: Target
    m: int | None
    layers: int | None = None
    form: str = ""
    progress: Progress = lambda _: None
    lines: bool = False
    argument: str = ""


def built_in() -> dict[str, Any]:
    """Entry points of the `k3fuse.sources` group by name."""
    return {e.name: e for e in entry_points(group="k3fuse.sources")}


def load(source: str, request: SourceRequest) -> list[SourceGraph]:
    """Resolve SOURCE: a built-in name (NAME or NAME:ARGUMENT), a file, or package.module:factory.

    Raises SourceError naming the source and what exists.
    """
    known = built_in()
    name, _, argument = source.partition(":")
    if name in known:
        return list(known[name].load()(replace(request, argument=argument)))
    path = Path(source)
    if path.suffix == ".json" or path.exists():
        return [from_file(path)]
    if ":" in source:
        return from_factory(source, request)
    raise SourceError(
        f"source {source!r} is unknown; use {', '.join(sorted(known))}, a graph file (.json), "
        "or package.module:factory"
    )


def from_file(path: Path) -> SourceGraph:
    """Load a saved graph. Raises SourceError, or GraphFileError for what is wrong inside it."""
    from k3fuse.rewriter.graph_file import load_graph

    if not path.is_file():
        raise SourceError(
            f"graph file {str(path)!r} does not exist; name a file that save_graph wrote"
        )
    loaded = load_graph(path)
    layers = loaded.meta.get("layers") or [0]
    first = layers[0] if isinstance(layers, list) and layers and isinstance(layers[0], int) else 0
    stored = loaded.meta.get("groups")
    groups = (
        {k: n for k, n in stored.items() if isinstance(n, int)} if isinstance(stored, dict) else {}
    )
    return SourceGraph(loaded.module, path.stem, groups=groups, first_layer=first)


def from_factory(source: str, request: SourceRequest) -> list[SourceGraph]:
    """Trace what `package.module:factory` returns: module, or (module, args), or (..., kwargs)."""
    module_name, _, attribute = source.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise SourceError(
            f"source {source!r}: module {module_name!r} cannot be imported ({error}); "
            "check the name and PYTHONPATH"
        ) from error
    except AttributeError as error:
        raise SourceError(f"source {source!r}: {module_name!r} has no {attribute!r}") from error
    made = factory()
    made = made if isinstance(made, tuple) else (made,)
    if not callable(made[0]) or len(made) > 3:
        raise SourceError(
            f"source {source!r} returned {type(made[0]).__name__}; return (module, args) or "
            "(module, args, kwargs)"
        )
    args = tuple(made[1]) if len(made) > 1 else ()
    kwargs = dict(made[2]) if len(made) > 2 else {}
    request.progress("trace")
    return capture(made[0], args, kwargs, name=source)


def capture(
    module: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    name: str,
    fullgraph: bool = False,
) -> list[SourceGraph]:
    """Call `module` once under torch.compile and keep every functional ATen graph it makes.

    A model that Dynamo broke into several graphs says so in the first graph's notes.
    Raises SourceError with the place where Dynamo broke when no graph comes out.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.exc import TorchDynamoException
    from torch._dynamo.utils import counters

    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(fx.GraphModule(graph, graph.graph))
        return make_boxed_func(graph.forward)  # type: ignore[no-any-return]

    backend = aot_autograd(fw_compiler=keep, inference_compiler=keep)
    torch._dynamo.reset()
    counters["graph_break"].clear()
    try:
        with torch.no_grad():
            torch.compile(module, backend=backend, fullgraph=fullgraph)(*args, **kwargs)
    except TorchDynamoException as error:
        raise SourceError(f"{name} cannot be traced: {_first_lines(error)}") from error
    finally:
        torch._dynamo.reset()
    if not graphs:
        raise SourceError(
            f"{name}: no graph came out; Dynamo broke at {_breaks(module, args, kwargs)}; "
            "compile a module that traces"
        )
    suffix = "" if len(graphs) == 1 else "#{}"
    found = [SourceGraph(g, name + suffix.format(i)) for i, g in enumerate(graphs)]
    if counters["graph_break"]:
        place = _breaks(module, args, kwargs)
        found[0].notes = (f"Dynamo broke the model apart, first at {place}",)
    return found


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = [line for line in lines if line.startswith('File "')]
    return " ".join([lines[0] if lines else type(error).__name__, *where[-1:]])


def _breaks(module: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """First place where Dynamo broke, with the model's file and line: traced again as one graph."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        with torch.no_grad():
            torch.compile(module, backend="eager", fullgraph=True)(*args, **kwargs)
    except TorchDynamoException as error:
        return _first_lines(error)
    finally:
        torch._dynamo.reset()
    return "an unknown place (see TORCH_LOGS=graph_breaks)"


@contextmanager
def fake_group(size: int) -> Iterator[str]:
    """A fake process group of `size` ranks, so that collectives trace without other processes.

    Yields its name. Raises SourceError where a real group of another size is already there.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        if dist.get_world_size() != size:
            raise SourceError(
                f"the process group has {dist.get_world_size()} ranks, the target needs {size}; "
                "run the command outside of torchrun"
            )
        yield dist.group.WORLD.group_name  # type: ignore[union-attr]
        return
    dist.init_process_group(backend="fake", world_size=size, rank=0, store=FakeStore())
    try:
        yield dist.group.WORLD.group_name  # type: ignore[union-attr]
    finally:
        dist.destroy_process_group()
