"""Prints what an extra needs, one requirement a line, from pyproject.toml: its own and the package's.

With it dependencies are installed while the extension compiles, which pip does one after the other.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROJECT: dict[str, Any] = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def requirements(extra: str) -> Iterator[str]:
    """Those of an extra, with those of the extras that it names in place of the package itself."""
    for line in PROJECT["optional-dependencies"][extra]:
        own = re.fullmatch(rf"{PROJECT['name']}\[(.*)\]", line)
        if own is None:
            yield line
            continue
        for other in own[1].split(","):
            yield from requirements(other.strip())


if __name__ == "__main__":
    print("\n".join([*PROJECT["dependencies"], *requirements(sys.argv[1])]))
