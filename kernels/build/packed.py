"""One file of compiled kernels that a host without the DSL can load and launch.

A packed file is a zip archive: `k3fuse.json` with the schema, the kernels' descriptions and a
checksum of them, and one cubin (and PTX, where kept) a kernel, each with its own checksum in the
descriptions. The bytes depend on the kernels alone, not on time or place.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.errors import PackedError
from k3fuse.kernels.build.resources import Resources
from k3fuse.kernels.build.variant import Plan, Variant

SCHEMA = "k3fuse.kernels/1"
MANIFEST = "k3fuse.json"
# Larger is no packed file: kernels take some 100 KB, and all variants of all ops below 100 MB.
MOST_MEMBER = 64 << 20  # bytes of one member, unpacked
MOST = 1 << 30  # bytes of all members
_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest a zip can hold


def pack(kernels: Iterable[Built], path: Path, *, ptx: bool = True) -> None:
    """Write kernels to one file, atomically. ptx: keep the PTX (the simulator and `show` need it).

    Raises PackedError where there is nothing to write, two kernels are the same variant, what is
    written is larger than `load` reads, or the file cannot be written.
    """
    content = sorted(kernels, key=lambda k: k.variant)
    labels = [k.variant.label for k in content]
    if not content:
        raise PackedError("there is no kernel to pack")
    for label in labels:
        if labels.count(label) > 1:
            raise PackedError(f"kernel {label} is given twice; pack each variant once")
    files: dict[str, bytes] = {}
    entries = []
    for number, kernel in enumerate(content):
        files[f"{number}.cubin"] = kernel.cubin
        if ptx and kernel.ptx:
            files[f"{number}.ptx"] = kernel.ptx.encode()
        entries.append(
            _describe(kernel, {n: files[n] for n in files if n.startswith(f"{number}.")})
        )
    manifest = {"schema": SCHEMA, "sha256": _digest(_canonical(entries)), "kernels": entries}
    files = {MANIFEST: json.dumps(manifest, indent=1, sort_keys=True).encode(), **files}
    if why := _too_large({name: len(data) for name, data in files.items()}):
        raise PackedError(f"{path}: cannot be written: {why}; pack fewer kernels to a file")
    try:
        _write(files, path)
    except OSError as error:
        raise PackedError(f"{path}: cannot be written: {error.strerror or error}") from None


def load(path: Path) -> tuple[Built, ...]:
    """Read a packed file, with every checksum checked. Needs neither the DSL nor a GPU.

    Raises PackedError, in one line, for a file that is missing, no packed file, of another schema,
    damaged, or that claims more bytes than any packed file has (before they are read).
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if why := _too_large({m.filename: m.file_size for m in archive.infolist()}):
                raise PackedError(f"{path}: no packed file: {why}; pack it again")
            files = {name: archive.read(name) for name in archive.namelist()}
    except FileNotFoundError:
        raise PackedError(f"{path}: no such file; write one with `k3fuse kernels pack`") from None
    except OSError as error:
        raise PackedError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, RuntimeError) as error:
        raise PackedError(f"{path}: damaged or no packed file ({error}); pack it again") from None
    return tuple(_kernel(path, entry, files) for entry in _entries(path, files))


def select(
    kernels: Iterable[Built], arch: str, op: str, shape: Mapping[str, int] | None = None
) -> Built:
    """Return the one kernel of an op for a device's architecture and a shape (given sizes only).

    Raises PackedError naming what is there where none or several fit.
    """
    have = list(kernels)
    mine = [k for k in have if k.variant.op == op]
    if not mine:
        ops = ", ".join(sorted({k.variant.op for k in have})) or "nothing"
        raise PackedError(f"no kernel of op {op!r} is packed; the file holds {ops}")
    fits = [k for k in mine if k.variant.arch == arch]
    if not fits:
        archs = ", ".join(sorted({k.variant.arch for k in mine}))
        raise PackedError(
            f"the kernels of {op!r} are for {archs}, not for {arch}; "
            f"build and pack with --arch {arch}"
        )
    wanted = set((shape or {}).items())
    exact = [k for k in fits if wanted <= set(k.variant.shape)]
    if len(exact) != 1:
        names = ", ".join(k.variant.name for k in exact or fits)
        what = "none" if not exact else str(len(exact))
        raise PackedError(
            f"{what} of the kernels of {op!r} for {arch} fit shape {dict(wanted)}; "
            f"there are {names}"
        )
    return exact[0]


def _too_large(sizes: Mapping[str, int]) -> str:
    """What of these sizes in bytes, by member, is above the limits; "" for none."""
    for name, size in sizes.items():
        if size > MOST_MEMBER:
            return f"{name} has {size} bytes, the limit is {MOST_MEMBER}"
    total = sum(sizes.values())
    return f"its members have {total} bytes, the limit is {MOST}" if total > MOST else ""


def _describe(kernel: Built, files: dict[str, bytes]) -> dict[str, Any]:
    return {
        "variant": kernel.variant.to_json(),
        "plan": kernel.plan.to_json(kernel.variant.arch),
        "entry": kernel.entry,
        "resources": kernel.resources.to_json(),
        "factors": dict(kernel.factors),
        "files": {name: _digest(data) for name, data in files.items()},
    }


def _entries(path: Path, files: dict[str, bytes]) -> list[Any]:
    if MANIFEST not in files:
        raise PackedError(f"{path}: no packed file: it has no {MANIFEST}; pack it again")
    try:
        manifest = json.loads(files[MANIFEST])
        schema, entries = manifest["schema"], manifest["kernels"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise PackedError(f"{path}: its {MANIFEST} is damaged; pack it again") from None
    if schema != SCHEMA:
        raise PackedError(
            f"{path}: schema {schema!r}, this version reads {SCHEMA!r}; pack it again with this "
            "version of k3fuse"
        )
    if manifest.get("sha256") != _digest(_canonical(entries)):
        raise PackedError(f"{path}: the checksum of its {MANIFEST} is wrong; pack it again")
    if not isinstance(entries, list):
        raise PackedError(f"{path}: its {MANIFEST} lists no kernels; pack it again")
    return list(entries)


def _kernel(path: Path, entry: Any, files: dict[str, bytes]) -> Built:
    try:
        variant = Variant.from_json(entry["variant"])
        payload = {}
        for name, digest in entry["files"].items():
            if name not in files or _digest(files[name]) != digest:
                raise PackedError(
                    f"{path}: the checksum of {name} ({variant.label}) is wrong; pack it again"
                )
            payload[name.rpartition(".")[2]] = files[name]
        return Built(
            variant=variant,
            plan=Plan.from_json(entry["plan"]),
            ptx=payload.get("ptx", b"").decode(),
            cubin=payload["cubin"],
            entry=str(entry["entry"]),
            resources=Resources.from_json(entry["resources"]),
            factors=tuple(sorted(entry["factors"].items())),
        )
    except PackedError:
        raise
    except Exception as error:  # whatever else a wrong description leads to
        text = " ".join(str(error).split()) or type(error).__name__
        raise PackedError(f"{path}: not understood ({text}); pack it again") from None


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write(files: dict[str, bytes], path: Path) -> None:
    """Write beside the goal and rename, so that a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                for member, data in files.items():
                    info = zipfile.ZipInfo(member, _DATE)
                    info.compress_type = zipfile.ZIP_DEFLATED
                    info.external_attr = 0o644 << 16
                    archive.writestr(info, data)
            file.flush()
            os.fsync(file.fileno())
        # A temporary file is private; a packed file is as readable as the user's other files.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
