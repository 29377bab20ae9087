"""A GGUF file's weights as transformers reads them: lazily, one tensor in memory at a time.

transformers' loader holds every weight in fp32 at once. Here a matrix that is stored as the model has it goes in
chunks of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from qbe.errors import QBEError
from qbe.models.gguf_data import read_rows, read_whole, steps
from qbe.models.gguf_header import GGUFHeader, GGUFTensor
from qbe.models.gguf_tensors import Source, sources


class LazyGGUFTensor:
    """One parameter of the model, read when transformers asks for it with `[...]` and `.to(device, dtype)`."""

    def __init__(self, name: str, shape: tuple[int, ...], source: Source, loader: WeightLoader) -> None:
        self.name, self.shape, self.source, self.loader = name, shape, source, loader

    def __getitem__(self, _: Any) -> LazyGGUFTensor:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.loader.read(self, torch.device(device or "cpu"), dtype or torch.float32)


class WeightLoader:
    """Maps a file's tensors to a model's parameters and reads them.

    Args:
        header: of the file.
        skeleton: the model on the meta device.

    Raises:
        QBEError: the file's tensors are not those of the model.
    """

    def __init__(self, header: GGUFHeader, skeleton: PreTrainedModel) -> None:
        self.header, self.config = header, skeleton.config.get_text_config()
        self.sources = sources(header, skeleton)
        self.shapes = {k: tuple(v.shape) for k, v in skeleton.state_dict().items()}

    def state_dict(self) -> dict[str, LazyGGUFTensor]:
        """Parameter name -> lazy tensor. Every parameter has its tensors, and their sizes agree."""
        return {name: LazyGGUFTensor(name, self.shapes[name], source, self) for name, source in self.sources.items()}

    def read(self, lazy: LazyGGUFTensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """A parameter, dequantised through fp32 and cast."""
        source = lazy.source
        if not source.tensors:
            return torch.zeros(lazy.shape, dtype=dtype, device=device)
        if source.convert is None and source.tensors[0].shape == lazy.shape and len(lazy.shape) == 2:
            return _read_rows(source.tensors[0], device, dtype)
        whole = [read_whole(t) for t in source.tensors]
        try:
            weights = whole[0] if source.convert is None else source.convert(whole, self.config)
        except (ValueError, IndexError) as e:  # shapes that the conversion cannot have
            raise self._misfit(lazy, whole[0].shape) from e
        if tuple(weights.shape) != lazy.shape:
            raise self._misfit(lazy, weights.shape)
        return torch.from_numpy(np.ascontiguousarray(weights)).to(device=device, dtype=dtype)

    def _misfit(self, lazy: LazyGGUFTensor, shape: tuple[int, ...]) -> QBEError:
        return QBEError(f"{self.header.path}: {lazy.name} has shape {tuple(shape)}, not {lazy.shape}")


def _read_rows(source: GGUFTensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(source.shape, dtype=dtype, device=device)
    for start, end in steps(source):
        out[start:end] = torch.from_numpy(read_rows(source, start, end))
    return out
