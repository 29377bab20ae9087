"""The part of a model that reads pictures: tower and projector, run once for each picture."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from qbe.errors import QBEError
from qbe.pictures.lru import ByteLRU
from qbe.pictures.picture import Picture
from qbe.pictures.processor import QWEN, PictureProcessor, Prepared, load_processor

# Families whose pictures are rows among the prompt's, with causal attention, and whose answers are tested against
# transformers'.
FAMILIES = QWEN | {"smolvlm", "idefics3", "llava", "llava_next", "mistral3"}
FEATURE_BYTES = 256 << 20  # of rows that are kept, on the device,
INPUT_BYTES = 256 << 20  # of pictures that are prepared and wait for their step, in host memory,
TOKEN_BYTES = 16 << 20  # and of what stands for pictures in prompts


class _Placeholder(NamedTuple):
    token_ids: tuple[int, ...]
    grid: torch.Tensor | None


class PictureTower:
    """Makes rows of pictures.

    Args:
        model: of transformers, of one of `FAMILIES`, on its device.
        processor: its own.

    Attributes:
        processor: likewise.
        rows: by a picture's digest, as `features` gives them.
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
        self._tokens: ByteLRU[bytes, _Placeholder] = ByteLRU(TOKEN_BYTES)
        self._layers: Any = getattr(model.get_decoder(), "layers", ())  # type: ignore[operator]
        self._index: Callable[..., Any] | None = getattr(owner, "get_rope_index", None)

    def token_ids(self, picture: Picture) -> tuple[int, ...]:
        """What stands for a picture in a prompt; its rows take the places of `processor.token_id`. Threads may ask.

        Raises:
            QBEError: it cannot be decoded or prepared.
        """
        return self._placeholder(picture).token_ids

    def positions(self, ids: Sequence[int], pictures: Sequence[Picture]) -> torch.Tensor | None:
        """Rotary positions of a prompt's tokens int64 `[3, tokens]` (M-RoPE); None where they are those in the prompt.

        Text has the same in all three. What follows the prompt goes on from its last one.
        """
        if self._index is None:
            return None
        grids = [self._placeholder(p).grid for p in pictures]
        tokens = torch.tensor([ids])
        about = {
            "image_grid_thw": torch.cat([g for g in grids if g is not None]),
            "mm_token_type_ids": (tokens == self.processor.token_id).int(),  # older ones look at the tokens
        }
        takes = inspect.signature(self._index).parameters
        found: torch.Tensor = self._index(tokens, **{name: value for name, value in about.items() if name in takes})[0]
        return found[:, 0]

    def _placeholder(self, picture: Picture) -> _Placeholder:
        known = self._tokens.get(picture.digest)
        if known is None:
            prepared = self._prepare(picture)
            known = _Placeholder(prepared.token_ids, prepared.grid)
        return known

    def _prepare(self, picture: Picture) -> Prepared:
        prepared = self.processor.prepare(picture)
        self._prepared.put(picture.digest, prepared, prepared.nbytes)
        placeholder = _Placeholder(prepared.token_ids, prepared.grid)
        self._tokens.put(picture.digest, placeholder, 8 * len(prepared.token_ids))
        return prepared

    @torch.inference_mode()
    def features(self, picture: Picture) -> torch.Tensor:
        """A picture's rows `[tokens, hidden]`, on the model's device in its dtype.

        They are `[tokens, (1 + layers) * hidden]` where more is added after the first layers (DeepStack).

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
        made = self._make(**inputs, return_dict=True)
        deeper = [_joined(layer) for layer in getattr(made, "deepstack_features", None) or ()]
        rows = torch.cat([_joined(made.pooler_output), *deeper], -1).to(parameter.device, parameter.dtype)
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
        """Inside, a step whose rows `at` are not embeddings of their tokens, but these, as `features` gives them."""
        embedding: Any = self._model.get_input_embeddings()  # type: ignore[operator]
        index = torch.tensor(at).to(rows.device)
        first, *deeper = rows[None].split(embedding.weight.shape[1], -1)

        def insert(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output.index_copy(1, index, first.to(output.dtype))

        def adding(more: torch.Tensor) -> Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]:
            return lambda module, inputs, output: output.index_add(1, index, more.to(output.dtype))

        handles = [embedding.register_forward_hook(insert)]
        handles += [self._layers[i].register_forward_hook(adding(more)) for i, more in enumerate(deeper)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _joined(made: Any) -> torch.Tensor:
    """Of one tensor or several, `[..., hidden]`, all rows `[n, hidden]`."""
    parts = made if isinstance(made, list | tuple) else [made]
    return torch.cat([part.flatten(0, -2) for part in parts])


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
    line = f"{Path(name).name} reads no pictures here: {why}"
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
