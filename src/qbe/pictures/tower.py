"""The part of a model that reads pictures: tower and projector, run once for each picture."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qbe.errors import QBEError
from qbe.pictures.lru import ByteLRU
from qbe.pictures.picture import Picture
from qbe.pictures.processor import PictureProcessor, Prepared, load_processor

# Families whose pictures are rows among the prompt's, with positions of one dimension and causal attention, and whose
# answers are tested against transformers'.
FAMILIES = frozenset({"smolvlm", "idefics3", "llava", "llava_next", "mistral3"})
FEATURE_BYTES = 256 << 20  # of rows that are kept, on the device,
INPUT_BYTES = 256 << 20  # of pictures that are prepared and wait for their step, in host memory,
TOKEN_BYTES = 16 << 20  # and of what stands for pictures in prompts


class PictureTower:
    """Makes rows of pictures.

    Args:
        model: of transformers, of one of `FAMILIES`, on its device.
        processor: its own.

    Attributes:
        processor: likewise.
        rows: by a picture's digest, `[tokens, hidden]`.
        runs: how often the tower has run.
    """

    def __init__(self, model: nn.Module, processor: PictureProcessor) -> None:
        self.processor, self.runs = processor, 0
        self._model = model
        inner: Any = getattr(model, "model", None)
        owner: Any = inner if hasattr(inner, "get_image_features") else model
        self._make: Callable[..., Any] = owner.get_image_features
        self._takes = inspect.signature(self._make).parameters
        self.rows: ByteLRU[bytes, torch.Tensor] = ByteLRU(FEATURE_BYTES)
        self._prepared: ByteLRU[bytes, Prepared] = ByteLRU(INPUT_BYTES)
        self._tokens: ByteLRU[bytes, tuple[int, ...]] = ByteLRU(TOKEN_BYTES)

    def token_ids(self, picture: Picture) -> tuple[int, ...]:
        """What stands for a picture in a prompt; its rows take the places of `processor.token_id`. Threads may ask.

        Raises:
            QBEError: it cannot be decoded or prepared.
        """
        known = self._tokens.get(picture.digest)
        if known is None:
            known = self._prepare(picture).token_ids
        return known

    def _prepare(self, picture: Picture) -> Prepared:
        prepared = self.processor.prepare(picture)
        self._prepared.put(picture.digest, prepared, prepared.nbytes)
        self._tokens.put(picture.digest, prepared.token_ids, 8 * len(prepared.token_ids))
        return prepared

    @torch.inference_mode()
    def features(self, picture: Picture) -> torch.Tensor:
        """A picture's rows `[tokens, hidden]`, on the model's device in its dtype.

        Raises:
            QBEError: the tower makes another number of rows than the prompt has places for.
        """
        found = self.rows.get(picture.digest)
        if found is not None:
            return found
        prepared = self._prepared.get(picture.digest) or self._prepare(picture)
        parameter = self._model.get_input_embeddings().weight  # type: ignore[operator]
        inputs = {
            name: value.to(parameter.device, parameter.dtype if value.is_floating_point() else None)
            for name, value in prepared.inputs.items()
            if name in self._takes
        }
        self.runs += 1
        pooled = self._make(**inputs, return_dict=True).pooler_output
        parts = pooled if isinstance(pooled, list | tuple) else [pooled]
        rows = torch.cat([part.flatten(0, -2) for part in parts]).to(parameter.device, parameter.dtype)
        places = prepared.token_ids.count(self.processor.token_id)
        if len(rows) != places:
            raise QBEError(
                f"{picture.name} has {places} places in the prompt, but the model makes {len(rows)} rows of it"
            )
        self._prepared.drop(picture.digest)
        self.rows.put(picture.digest, rows, rows.numel() * rows.element_size())
        return rows

    @contextmanager
    def inserted(self, at: Sequence[int], rows: torch.Tensor) -> Iterator[None]:
        """Inside, a step whose rows `at` are not embeddings of their tokens, but these `[n, hidden]`."""
        embedding: Any = self._model.get_input_embeddings()  # type: ignore[operator]
        index = torch.tensor(at).to(rows.device)

        def insert(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output.index_copy(1, index, rows[None].to(output.dtype))

        handle = embedding.register_forward_hook(insert)
        try:
            yield
        finally:
            handle.remove()


def tower_of(model: nn.Module, name: str, tokenizer: Any, processor: Any = None) -> PictureTower | str:
    """What reads the pictures of a model, or one line that says why it reads none.

    Args:
        name: of the model, for that line.
        tokenizer: gets the chat template of the processor's files where it has none.
        processor: of transformers, for a model given in memory; None: that of the folder it came from.

    Raises:
        QBEError: a processor was given, and the model cannot do with it.
    """
    why = _why_none(model)
    if why is None:
        try:
            config: Any = model.config
            folder = Path(str(getattr(config, "name_or_path", "") or "."))
            loaded = load_processor(folder, tokenizer, config) if processor is None else processor
            tower = PictureTower(model, PictureProcessor(loaded, config))
        except QBEError as error:
            why = str(error)
        else:
            if not getattr(tokenizer, "chat_template", None) and tower.processor.chat_template:
                tokenizer.chat_template = tower.processor.chat_template
            return tower
    line = f"{name} reads no pictures here: {why}"
    if processor is not None:
        raise QBEError(line)
    return line


def _why_none(model: nn.Module) -> str | None:
    if not hasattr(model, "get_image_features"):
        return "it is a model of text"
    kind = str(getattr(getattr(model, "config", None), "model_type", "?"))
    if kind not in FAMILIES:
        return f"QBE reads those of {', '.join(sorted(FAMILIES))}, and its model type is '{kind}'"
    return None
