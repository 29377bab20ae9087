"""What the compiled kernel is made of. Only the standard library: `setup.py` runs this file before qbe is installed."""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "nested.c"
INCLUDED = sorted(set(FOLDER.rglob("*.c")) - {SOURCE})
# -ffp-contract=off: sums round the same way on every path and with every compiler.
FLAGS = ("-std=c11", "-O3", "-pthread", "-ffp-contract=off")


def source_hash() -> str:
    """Hash of sources and flags: compiled into the library, so that a stale one is noticed."""
    text = b"".join(path.read_bytes() for path in (SOURCE, *INCLUDED))
    return hashlib.sha256(text + " ".join(FLAGS).encode()).hexdigest()[:16]
