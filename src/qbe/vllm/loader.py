"""vLLM's own weight loader for a folder that `qbe quantize` wrote: without its nested files, and with its folds."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Generator
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from vllm.config import LoadConfig, ModelConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from qbe.store.checkpoint import SMOOTHING, read_manifest
from qbe.store.folding import AGAIN
from qbe.vllm.config import active


class QBELoader(DefaultModelLoader):
    """Load format `qbe`, which QBE chooses by itself for its folders.

    The folds (`qbe.store.folding`) are powers of two between two layers: applied to whole tensors of the checkpoint, as
    they are read, they change no bit of what the model computes, however vLLM merges and shards them.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(dataclasses.replace(load_config, load_format="auto"))

    def _prepare_weights(self, *args: Any, **kwargs: Any) -> Any:
        folder, files, *rest = super()._prepare_weights(*args, **kwargs)
        config = active()
        assert config is not None
        assert config.served.manifest is not None
        ours = config.served.manifest.files
        return (folder, [f for f in files if os.path.basename(f) not in ours], *rest)

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        config = active()
        assert config is not None
        scales = read_scales(config.served.folder)
        for name, tensor in super().get_all_weights(model_config, model):
            yield name, scaled(tensor, *scales.get(name.rpartition(".")[0], (None, None)), name.endswith(".weight"))


Scales = tuple[torch.Tensor | None, torch.Tensor | None]  # exponents of a module's outputs and of its inputs


def read_scales(folder: Any) -> dict[str, Scales]:
    """Module -> exponents int8 by which its output channels are divided and its input channels multiplied.

    Raises:
        ValueError: the file is damaged.
    """
    manifest = read_manifest(folder)
    scales: dict[str, Scales] = {}
    if not manifest.folds:
        return scales
    try:
        with safe_open(folder / SMOOTHING, framework="pt") as stored:
            for source, consumers in manifest.folds.items():
                exponents = stored.get_tensor(source)
                scales[source] = (exponents, scales.get(source, (None, None))[1])
                for name in consumers:
                    scales[name] = (scales.get(name, (None, None))[0], exponents)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{folder / SMOOTHING} is damaged ({error}); {AGAIN}") from error
    return scales


def scaled(
    tensor: torch.Tensor, outputs: torch.Tensor | None, inputs: torch.Tensor | None, weight: bool
) -> torch.Tensor:
    """A module's weight [N] or [N, K], or its bias [N], with its folds."""
    if outputs is not None:
        down = torch.ldexp(torch.ones(len(outputs)), -outputs.to(torch.int32)).to(tensor.dtype)
        tensor = tensor * (down[:, None] if tensor.dim() == 2 else down)
    if inputs is not None and weight:
        tensor = tensor * torch.ldexp(torch.ones(len(inputs)), inputs.to(torch.int32)).to(tensor.dtype)
    return tensor
