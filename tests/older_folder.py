"""A checkpoint folder as versions before 0.2 wrote it: nothing but its own checks finds what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

from qbe.store import provenance
from qbe.store.checkpoint import MANIFEST


def without_provenance(folder: Path) -> Path:
    """The folder, changed in place."""
    (folder / provenance.NAME).unlink()
    described = json.loads((folder / MANIFEST).read_text())
    del described["provenance"]
    (folder / MANIFEST).write_text(json.dumps(described))
    return folder
