"""Compiled kernels on disk, addressed by everything that went into them."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from k3fuse.kernels.build import packed
from k3fuse.kernels.build.compile import COMPILER_OPTIONS, Built, compile_variant
from k3fuse.kernels.build.errors import PackedError
from k3fuse.kernels.build.variant import Variant

ENVIRONMENT = "K3FUSE_KERNEL_CACHE"
# The DSL, its compilers (one wheel a CUDA generation; they emit different PTX), torch and k3fuse.
DISTRIBUTIONS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "torch",
    "k3fuse",
)
# Read by the DSL's compiler, so they change what comes out.
DSL_ENVIRONMENT = (
    "CUTE_DSL_COMPILER_OPT",
    "CUTE_DSL_ENABLE_OPTIMIZATION_WARNINGS",
    "CUTE_DSL_LIBS",
)


def default_folder() -> Path:
    """$K3FUSE_KERNEL_CACHE, or k3fuse/kernels in the user's cache folder."""
    if chosen := os.environ.get(ENVIRONMENT):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "k3fuse" / "kernels"


def key_factors(variant: Variant, sources: Path | None = None) -> dict[str, str]:
    """Everything that decides what a variant compiles to, by name, in a fixed order.

    sources: folder of kernel sources, the package's own by default. Every Python file below it
    counts, in one factor a subfolder, so no builder has to declare what it imports.
    """
    factors = {
        "schema": packed.SCHEMA,
        "op": variant.op,
        "name": variant.name,
        "arch": variant.arch,
        "shape": _pairs(variant.shape),
        "config": _pairs(variant.config),
        "options": " ".join(COMPILER_OPTIONS),
    }
    for name in DISTRIBUTIONS:
        factors[f"version:{name}"] = _version(name)
    for name in DSL_ENVIRONMENT:
        factors[f"environment:{name}"] = os.environ.get(name, "")
    for folder, digest in _digests(sources or package_folder()).items():
        factors[f"sources:{folder}"] = digest
    # A builder of one's own: its folder's Python files, those below it not among them.
    if (own := _own_folder(variant.op)) is not None:
        factors["sources:own"] = _digests(own, "*.py")["."]
    # Where the disassembler is missing the histogram is, too; installing it should fill it in.
    factors["disassembler"] = _version("nvidia-cuda-nvdisasm")
    return factors


def key_of(factors: Mapping[str, str]) -> str:
    """SHA-256 of the factors, independent of their order, in hexadecimal."""
    return hashlib.sha256(json.dumps(dict(factors), sort_keys=True).encode()).hexdigest()


def diff_factors(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the factors that differ, each (old, new); "" where one side has none."""
    names = [*new, *(n for n in old if n not in new)]
    pairs = {n: (old.get(n, ""), new.get(n, "")) for n in names}
    return {n: p for n, p in pairs.items() if p[0] != p[1]}


class Cache:
    """Compiled kernels in one folder: KEY[:2]/KEY.k3pack, each a packed file of one kernel.

    Files are written atomically, so processes may share the folder. compiler: what builds a
    missing one. warn: where the one line about a damaged entry goes, standard error by default.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        compiler: Callable[[Variant], Built] = compile_variant,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.folder = folder or default_folder()
        self._compiler = compiler
        self._warn = warn or _to_standard_error

    def path(self, variant: Variant) -> Path:
        """Where a variant is, or would be, kept."""
        key = key_of(key_factors(variant))
        return self.folder / key[:2] / f"{key}.k3pack"

    def peek(self, variant: Variant) -> Built | None:
        """Return the variant where it is in the folder; raises PackedError for a damaged entry."""
        path = self.path(variant)
        if not path.exists():
            return None
        content = packed.load(path)
        if [k.variant for k in content] != [variant]:
            raise PackedError(f"{path}: holds {', '.join(k.variant.label for k in content)}")
        return content[0]

    def get(self, variant: Variant) -> Built:
        """Return the variant from the folder, compiled and kept first where it is not there.

        A damaged entry is built again, with one line of warning. Raises what the compiler raises,
        and PackedError where the folder cannot be written.
        """
        path = self.path(variant)
        try:
            if (found := self.peek(variant)) is not None:
                return found
        except PackedError as error:
            self._warn(f"k3fuse: rebuilding {variant.label}: {error}")
        made = self._compiler(variant)
        factors = tuple(sorted(key_factors(variant).items()))
        kept = Built(variant, made.plan, made.ptx, made.cubin, made.entry, made.resources, factors)
        packed.pack([kept], path)
        return kept


def package_folder() -> Path:
    """Return the folder of `k3fuse.kernels`."""
    spec = find_spec("k3fuse.kernels")
    if spec is None or not spec.submodule_search_locations:
        raise PackedError("k3fuse.kernels is not installed as a package; reinstall k3fuse")
    return Path(next(iter(spec.submodule_search_locations)))


def _to_standard_error(line: str) -> None:
    print(line, file=sys.stderr)


def _pairs(values: tuple[tuple[str, int], ...]) -> str:
    return " ".join(f"{name}={value}" for name, value in values)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _own_folder(op: str) -> Path | None:
    """Folder of the module in "package.module:attribute"; None for the product's ops."""
    if ":" not in op:
        return None
    try:
        spec = find_spec(op.partition(":")[0])
    except (ImportError, ValueError):
        spec = None
    return Path(spec.origin).parent if spec and spec.origin else None


@cache
def _digests(folder: Path, which: str = "**/*.py") -> dict[str, str]:
    """Digest of the Python files of each subfolder; once a process, as its code is loaded once."""
    hashes: dict[str, hashlib._Hash] = {}
    for path in sorted(folder.glob(which)):
        place = path.relative_to(folder)
        group = place.parts[0] if len(place.parts) > 1 else "."
        text = path.read_bytes()
        update = f"{place.as_posix()} {len(text)}\n".encode() + text
        hashes.setdefault(group, hashlib.sha256()).update(update)
    return {group: h.hexdigest()[:16] for group, h in sorted(hashes.items())}
