"""Kernels behind `torch.library` custom ops; a plain PyTorch reference beside each is its oracle."""
