"""Build CuTe DSL kernels ahead of time, keep and ship them, and launch them through cuda-python.

Importing this package loads neither CUDA nor the DSL; each is asked for by the call that needs it.
"""

from k3fuse.kernels.build.errors import BuildError
from k3fuse.kernels.build.variant import ARCHITECTURES, Parameter, Plan, Variant, builder

__all__ = ["ARCHITECTURES", "BuildError", "Parameter", "Plan", "Variant", "builder"]
