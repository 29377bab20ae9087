"""Files and functions stay short enough to be read in one sitting."""

from __future__ import annotations

import ast
from pathlib import Path

import qbe

FILE_LINES, FUNCTION_LINES = 350, 80


def test_files_and_functions_stay_short() -> None:
    """But kernels, whose unrolled parts belong together."""
    source = Path(qbe.__file__).parent
    for path in source.rglob("*.py"):
        if path.relative_to(source).parts[0] == "kernels":
            continue
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= FILE_LINES, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= FUNCTION_LINES, f"{path}: {node.name} has {lines}"
