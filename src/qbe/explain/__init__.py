"""Explain: why a query gets its blueprint, as JSON, in the terminal and as a page."""

from __future__ import annotations

from qbe.explain.explanation import Explanation

__all__ = ["Explanation"]
