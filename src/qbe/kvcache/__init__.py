"""The paged KV cache and the attention that reads it."""
