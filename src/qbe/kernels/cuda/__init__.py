"""Kernels in CUDA C++, where Triton's compiler leaves much of a GPU's speed unused."""
