"""What a model's own code raises, as one line that names its family."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from qbe.errors import QBEError


@contextmanager
def one_line(model: nn.Module) -> Iterator[None]:
    """What a model's own code raises in the block becomes a refusal of its family, except for a lack of memory."""
    try:
        yield
    except (QBEError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as e:
        line = (str(e).strip().splitlines() or [""])[0][:160]
        raise QBEError(f"{name(model)}: QBE cannot run this family ({type(e).__name__}: {line})") from e


def name(model: nn.Module) -> str:
    """The model's class and what transformers calls its family."""
    config = getattr(model, "config", None)
    return f"{type(model).__name__} (model type '{getattr(config, 'model_type', '?')}')"
