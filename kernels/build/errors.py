"""What can go wrong between a kernel's description and its launch, each in one line."""

from __future__ import annotations


class BuildError(ValueError):
    """A kernel cannot be described, compiled, read back or launched; the text names the fix."""


class VariantError(BuildError):
    """An unknown op or architecture, or a shape or config outside what the kernel covers."""


class MissingDslError(BuildError):
    """The CuTe DSL is not installed, and something has to be compiled."""

    def __init__(self, wanted_by: str) -> None:
        super().__init__(
            f"compiling {wanted_by} needs the CuTe DSL, which is not installed; "
            "pip install 'k3fuse[kernels]'"
        )


class PackedError(BuildError):
    """A packed file that cannot be used: not one of ours, another schema, damaged, another arch."""


class LaunchError(BuildError):
    """No driver, a device of another architecture, parameters that do not fit, a driver error."""
