"""Precision that moves while an answer is written: routers, the cascade, what attention and activations show."""
