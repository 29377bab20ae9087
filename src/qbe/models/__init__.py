"""Models: from a name to a local path (`pull`) and from a path to a model in memory (`load_model`).

`pull` imports neither torch nor transformers, so the command line stays quick; loading is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qbe.models.resolve import DEFAULT_MODEL, pull

if TYPE_CHECKING:
    from qbe.models.load import LoadedModel, load_config_and_tokenizer, load_model

__all__ = ["DEFAULT_MODEL", "LoadedModel", "load_config_and_tokenizer", "load_model", "pull"]


def __getattr__(name: str) -> Any:
    if name in ("LoadedModel", "load_config_and_tokenizer", "load_model"):
        from qbe.models import load

        return getattr(load, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
