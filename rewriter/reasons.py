"""Closed list of reason codes, and the record a failed match or guard returns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Code(StrEnum):
    """Why a site was not rewritten. The strings are stable: scripts and docs rely on them."""

    COMPILE_NOT_REACHED = "COMPILE_NOT_REACHED"
    ANCHOR_ABSENT = "ANCHOR_ABSENT"
    OP_MISMATCH = "OP_MISMATCH"
    OPERAND_ORDER = "OPERAND_ORDER"
    INTERPOSED_OP = "INTERPOSED_OP"
    ATTR_MISMATCH = "ATTR_MISMATCH"
    DTYPE_MISMATCH = "DTYPE_MISMATCH"
    SHAPE_MISMATCH = "SHAPE_MISMATCH"
    STRIDE_OR_ALIGN = "STRIDE_OR_ALIGN"
    M_OUT_OF_RANGE = "M_OUT_OF_RANGE"
    ARCH_UNSUPPORTED = "ARCH_UNSUPPORTED"
    TP_UNSUPPORTED = "TP_UNSUPPORTED"
    GROUP_MISMATCH = "GROUP_MISMATCH"
    USER_ESCAPES = "USER_ESCAPES"
    MUTATION_BETWEEN = "MUTATION_BETWEEN"
    ALIAS_RISK = "ALIAS_RISK"
    META_MISSING = "META_MISSING"
    SHADOWED_BY = "SHADOWED_BY"
    CAPACITY = "CAPACITY"
    NO_FABRIC = "NO_FABRIC"
    KERNEL_UNAVAILABLE = "KERNEL_UNAVAILABLE"
    POLICY_SLOWER = "POLICY_SLOWER"
    DISABLED_BY_USER = "DISABLED_BY_USER"
    RANK_DISAGREES = "RANK_DISAGREES"
    VALUES_DIFFER = "VALUES_DIFFER"
    VALUES_UNCHECKED = "VALUES_UNCHECKED"
    ENGINE_UNSUPPORTED = "ENGINE_UNSUPPORTED"


# What a user can do about it, one sentence a code; a guard may give a better one.
HINTS: dict[Code, str] = {
    Code.COMPILE_NOT_REACHED: "check that the module is compiled with backend='k3fuse' and called",
    Code.ANCHOR_ABSENT: "the graph has no node this pattern starts from; check what was compiled",
    Code.OP_MISMATCH: "compare the named node with the pattern's docs page",
    Code.OPERAND_ORDER: "the operands mean something else in this order; swap them in the model",
    Code.INTERPOSED_OP: "move the named operation out of the site",
    Code.ATTR_MISMATCH: "set the named attribute to the expected value",
    Code.DTYPE_MISMATCH: "cast the named tensor to the expected dtype in the model",
    Code.SHAPE_MISMATCH: "the kernels cover Kimi K3's published shapes only",
    Code.STRIDE_OR_ALIGN: "make the named tensor contiguous and 16-byte aligned",
    Code.M_OUT_OF_RANGE: "the kernels serve 1 to 64 tokens a step; a larger one stays stock",
    Code.ARCH_UNSUPPORTED: "name a target (for example --target gb300:tp8)",
    Code.TP_UNSUPPORTED: "use tensor parallelism of 8 or 16",
    Code.GROUP_MISMATCH: "reduce over the group the target names",
    Code.USER_ESCAPES: "do not read the intermediate value outside the site",
    Code.MUTATION_BETWEEN: "move the in-place write before or after the whole site",
    Code.ALIAS_RISK: "clone the tensor that is aliased",
    Code.META_MISSING: "trace with fake tensors so that every node has meta['val']",
    Code.SHADOWED_BY: "another pattern took these nodes; disable it to prefer this one",
    Code.CAPACITY: "raise the workspace capacity or lower the batch",
    Code.NO_FABRIC: "symmetric memory needs NVLink between all ranks of the group",
    Code.KERNEL_UNAVAILABLE: "use --plan to see the rewrite as if the kernel existed",
    Code.POLICY_SLOWER: "the stock path is faster here by measurement",
    Code.DISABLED_BY_USER: "remove the pattern or layer from the disable option",
    Code.VALUES_DIFFER: "a fault of k3fuse: report the site with its dump, and disable its pattern",
    Code.VALUES_UNCHECKED: "use validate='structure', or a smaller model for the value check",
    Code.ENGINE_UNSUPPORTED: "see docs/vllm.md for the engine settings that are covered",
    Code.RANK_DISAGREES: "start every rank with the same model, options and version",
}


# Codes whose names are kept for checks to come, and what they wait for. No check gives one yet.
RESERVED: dict[Code, str] = {
    Code.CAPACITY: "workspaces are sized by the policy's largest row; M_OUT_OF_RANGE comes first",
    Code.NO_FABRIC: "a group without NVLink is seen when its mailboxes are mapped, at launch",
    Code.POLICY_SLOWER: "policies hold no measured row of the stock path yet",
}


@dataclass(frozen=True)
class Reason:
    """One failed condition. Never a bare False.

    `sentence` reads alone; `nodes` are graph node names; `expected` and `actual` are texts.
    """

    code: Code
    sentence: str
    nodes: tuple[str, ...] = ()
    expected: str = ""
    actual: str = ""
    hint: str = ""

    @property
    def fix(self) -> str:
        """The hint to print: the reason's own, else its code's."""
        return self.hint or HINTS[self.code]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, stable keys."""
        return {
            "code": self.code.value,
            "sentence": self.sentence,
            "nodes": list(self.nodes),
            "expected": self.expected,
            "actual": self.actual,
            "hint": self.fix,
        }

    def __str__(self) -> str:
        return f"{self.code.value}  {self.sentence}"


def without_node(sentence: str, nodes: Sequence[str]) -> str:
    """Return a sentence with its first node's name as "*", so that equal reasons group together."""
    return re.sub(rf"(?<!\w){re.escape(nodes[0])}(?!\w)", "*", sentence) if nodes else sentence


@dataclass
class Refusal(Exception):  # noqa: N818 - a decision, not an error
    """Raised inside a recogniser or a pattern to leave with a reason; caught by the engine."""

    reason: Reason
    progress: int = 0
    extra: Sequence[Reason] = field(default_factory=tuple)

    def __str__(self) -> str:
        return str(self.reason)
