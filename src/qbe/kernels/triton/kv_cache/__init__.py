"""Pages of the KV cache: written, quantised, read."""
