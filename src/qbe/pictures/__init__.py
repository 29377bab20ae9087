"""Pictures in prompts: from bytes that anybody may have sent to rows that stand among those of the prompt's tokens.

`picture.py` what came, `decode.py` its pixels within bounds, `processor.py` what the model's own processor makes of
them, `tower.py` the rows, made once for each picture.
"""

from __future__ import annotations

from qbe.pictures.picture import Picture

__all__ = ["Picture"]
