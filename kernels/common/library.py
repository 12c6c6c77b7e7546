"""The one torch.library registration of the namespace `k3fuse`.

Every op is functional: it returns new tensors and writes into none of its arguments. The ops that
hold a collective are functional too, as `vllm.all_reduce` is. A collective may not be dropped,
duplicated or reordered on one rank alone, and nothing does that: the graph, the site list and the
compiler are the same on every rank, so dead code, common subexpressions and the schedule are
decided alike; the results are always read, since a site is replaced by the op whose outputs take
over its users; and eager execution is in program order. An effect token would serialise the op
against every other effectful op of the graph and forbid overlap with independent work for no gain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

NAMESPACE = "k3fuse"
# One registration for the life of the process: a Library that is collected takes its ops with it.
_LIBRARY: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]

# needs_exact_strides: the kernels and the compositions were chosen for the strides that were
# traced, so Inductor has to hand the inputs over in exactly those.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def register(
    schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]
) -> torch._ops.OpOverload[..., Any]:
    """Define `schema` with one implementation for every device and a fake one."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=_TAGS)
    overload: torch._ops.OpOverload[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
    arguments = overload._schema.arguments
    lists = {a.name: i for i, a in enumerate(arguments) if str(a.type).startswith("List[")}
    _LIBRARY.impl(name, _with_lists(implementation, lists), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return overload


def _with_lists(implementation: Callable[..., Any], lists: Mapping[str, int]) -> Callable[..., Any]:
    """AOTInductor's packages hand over None for an empty list (torch 2.13).

    lists: name -> place of the arguments that are lists.
    """
    if not lists:
        return implementation

    def call(*args: Any, **kwargs: Any) -> Any:
        places = lists.values()
        args = tuple([] if a is None and i in places else a for i, a in enumerate(args))
        kwargs = {n: [] if a is None and n in lists else a for n, a in kwargs.items()}
        return implementation(*args, **kwargs)

    return call
