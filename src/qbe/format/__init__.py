"""The nested format: how codes, scales and KV pages lie in memory. Pure arithmetic, below kernels and store."""
