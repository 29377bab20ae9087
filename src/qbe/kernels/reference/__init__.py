"""Slow, obvious implementations: the oracles of the kernel tests."""
