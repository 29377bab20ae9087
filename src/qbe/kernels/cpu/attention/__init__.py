"""Attention to pages of the KV cache: decode steps, prompts, and with a bound."""
