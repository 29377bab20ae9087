"""`qbe explain --drift`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qbe.cli.console import err
from qbe.errors import QBEError


def draw_drift(model: str, picture: Path, trust: bool) -> dict[str, Any]:
    """Draws the profiled drift of a model's recurrent states, and returns it as JSON. Loads no weights.

    Raises:
        QBEError: no profile, a file that is not as it was written, or a disk that refuses.
    """
    from qbe.explain.drift_picture import draw
    from qbe.models import pull
    from qbe.store import drift_table, provenance

    folder = pull(model, progress=err.is_terminal)
    if trust:
        provenance.check_trusted(folder)
    else:
        provenance.check(folder, progress=err.is_terminal)
    profile = drift_table.read(folder) if folder.is_dir() else None
    if profile is None:
        raise QBEError(
            f"{model} has no profile of its states' drift: 'qbe quantize' writes one with the store of a model that "
            "has recurrent layers (QBE 0.1 did not); leave out --drift"
        )
    draw(profile, model, picture)
    err.print(f"wrote {str(picture).encode('utf-8', 'replace').decode()}", markup=False, highlight=False)
    return drift_table.describe(profile)
