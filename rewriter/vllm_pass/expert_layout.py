"""How each of vLLM's MoE backends keeps the experts' weights after loading.

Found by reading vLLM 0.32 and 0.33, fused_moe/oracle/{unquantized,mxfp4}.py: they convert the rows
of the checkpoint for the backend that the engine chose. A backend that is not listed is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layout:
    """Order of one layer's expert weights.

    name: stable, for guards and reports. rows: how the rows of w13 [experts, 2 * width, latent] and
    the tiles of w2 [experts, latent, width] are ordered; scales: the same of their scales. backend:
    vLLM's name of it. activations: what it rounds an expert's rows to, "" where that is not known.
    """

    name: str
    rows: str
    scales: str = ""
    backend: str = ""
    activations: str = ""


# The two orders that kernels of ours read, named as in kernels/experts/layouts.py. "rows": as in
# the checkpoint, gate rows, then up rows; one scale byte per 32 values beside each row.
ROWS, TRTLLM = "rows", "trtllm"

_KINDS: dict[str, tuple[str, str]] = {
    ROWS: ("gate rows, then up rows, as in the checkpoint", "one byte per 32 values, row by row"),
    "up_first": ("up rows, then gate rows", "interleaved in blocks for CUTLASS"),
    "up_first_plain": ("up rows, then gate rows", ""),
    "rows_blocked_scales": (
        "gate rows, then up rows, as in the checkpoint",
        "packed in blocks for the tensor core",
    ),
    TRTLLM: (
        "up and gate rows in turn, permuted within 128 rows for the epilogue",
        "permuted with the rows, interleaved in blocks",
    ),
    "trtllm_blocks": ("blocks of 128 columns, rows permuted within 128", ""),
    "marlin": ("repacked in tiles for Marlin", "permuted for Marlin"),
    "cpu_tiles": ("repacked in tiles for the CPU's matrix instructions", "repacked with them"),
    "freed": ("held by the kernel alone; the layer's own tensors are freed", "held by the kernel"),
    "unknown": ("not known", "not known"),
}

# (unquantised?, backend's name in vLLM) -> layout.
_BACKENDS: dict[tuple[bool, str], str] = {
    (True, "TRITON"): ROWS,
    (True, "BATCHED_TRITON"): ROWS,
    (True, "FLASHINFER_CUTLASS"): "up_first_plain",
    (True, "FLASHINFER_TRTLLM"): "trtllm_blocks",
    (True, "CPU"): "cpu_tiles",
    (False, "B12X_MXFP4_MXFP8"): ROWS,
    (False, "B12X_MXFP4_BF16"): ROWS,
    (False, "EMULATION"): ROWS,
    (False, "XPU"): ROWS,
    (False, "CUTLASS_MXFP4_MXFP4"): "rows_blocked_scales",
    (False, "DEEPGEMM_MXFP4"): "rows_blocked_scales",
    (False, "FLASHINFER_TRTLLM_MXFP4_MXFP8"): TRTLLM,
    (False, "FLASHINFER_TRTLLM_MXFP4_BF16"): TRTLLM,
    (False, "FLASHINFER_CUTLASS_MXFP4_MXFP8"): "up_first",
    (False, "FLASHINFER_CUTLASS_MXFP4_BF16"): "up_first",
    (False, "MARLIN"): "marlin",
    (False, "BATCHED_MARLIN"): "marlin",
    (False, "TRITON"): "freed",
    (False, "TRITON_UNFUSED"): "freed",
    (False, "CPU"): "cpu_tiles",
}


def of_method(method: Any) -> Layout:
    """Return the layout that a layer's `quant_method` leaves; "unknown" for every other method.

    The classes are vLLM's UnquantizedFusedMoEMethod and Mxfp4MoEMethod, whose backends are chosen
    when the layer is built.
    """
    plain = getattr(method, "unquantized_backend", None)
    packed = getattr(method, "mxfp4_backend", None)
    backend = plain if plain is not None else packed
    if backend is None:
        return _layout("unknown", type(method).__name__)
    label = str(getattr(backend, "name", backend))
    kind = _BACKENDS.get((plain is not None, label), "unknown")
    # On the CPU the packing differs by instruction set, and one of them leaves the rows alone.
    return _layout(kind, f"{type(method).__name__} {label}", _activations(label))


def _activations(backend: str) -> str:
    """What follows the weights' format in the backend's name, as in "..._MXFP4_MXFP8"."""
    _, found, last = backend.rpartition("MXFP4_")
    return last.lower() if found else ""


def _layout(kind: str, backend: str, activations: str = "") -> Layout:
    rows, scales = _KINDS[kind]
    return Layout(kind, rows, scales, backend, activations)
