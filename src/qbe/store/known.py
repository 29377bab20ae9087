"""What was measured of known models comes with the package: `measured/`, a folder for each nested store.

A folder is named by a digest of the store's weights, so that a table only ever meets the very codes that it was
measured on; any other store is measured on its owner's machine. To renew a table, delete it here, prepare the model and
copy both files from the model's folder in the cache.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from qbe.files import write_text
from qbe.store import kv_table, sensitivity_table
from qbe.store.checkpoint import Manifest

MEASURED = Path(__file__).with_name("measured")


def bring(folder: Path, manifest: Manifest) -> bool:
    """Puts the tables of the store in `folder` beside it, if they came with the package; whether they did.

    Raises:
        QBEError: the disk refuses.
    """
    known = MEASURED / _digest(manifest)
    if not kv_table.read(known):  # not known, or pages hold other numbers since
        return False
    for name in (kv_table.NAME, sensitivity_table.NAME):  # as `measure_into`: where the last one is, both are
        write_text(folder / name, (known / name).read_text())
    return True


def _digest(manifest: Manifest) -> str:
    weights = sorted(str(about["sha256"]) for name, about in manifest.files.items() if name.startswith("nested-"))
    return hashlib.sha256("".join(weights).encode()).hexdigest()[:16]
