"""Device code shared by the kernels, in CuTe DSL: imported only while a kernel is traced."""
