"""GPU kernels in Triton; under TRITON_INTERPRET=1 they run on CPU tensors, and so are tested without a GPU."""
