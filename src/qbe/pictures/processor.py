"""What the model's own processor makes of a picture: the tokens that stand for it, and the tower's inputs."""

from __future__ import annotations

import copy
import json
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoImageProcessor, AutoProcessor, Idefics3Processor, PreTrainedConfig

from qbe.errors import QBEError
from qbe.models.load import quiet
from qbe.pictures.decode import decode
from qbe.pictures.picture import Picture

# Their rows have positions of three dimensions (M-RoPE).
QWEN = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})
_FILES = ("preprocessor_config.json", "processor_config.json")
_TEMPLATE = "chat_template.json"  # of older folders, for their processor alone


@dataclass(frozen=True)
class Prepared:
    """A picture as a model takes it.

    Attributes:
        token_ids: that stand for it in a prompt.
        inputs: of the tower: pixels float32, and what says how they lie.
    """

    token_ids: tuple[int, ...]
    inputs: Mapping[str, torch.Tensor]

    @property
    def grid(self) -> torch.Tensor | None:
        """int64 `[1, 3]`, its patches in time, height and width, where the model says positions by them."""
        return self.inputs.get("image_grid_thw")

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return 8 * len(self.token_ids) + sum(t.numel() * t.element_size() for t in self.inputs.values())


class PictureProcessor:
    """Prepares pictures. Threads may share it.

    Args:
        processor: of transformers: takes a text with `image_token` in it, and images.
        config: the model's, which says by which token a picture's rows are known.

    Attributes:
        image_token: that the chat template writes where a picture is.
        token_id: of each row of a picture, and of `image_token`.
        chat_template: of the processor's own files; None where these have none.

    Raises:
        QBEError: the processor and the model are not of one kind.
    """

    def __init__(self, processor: Any, config: PreTrainedConfig) -> None:
        self._processor = processor
        self._lock = threading.Lock()  # tokenizers are not made for several threads
        self.image_token: str = str(processor.image_token)
        self.chat_template: str | None = getattr(processor, "chat_template", None)
        told = getattr(config, "image_token_id", None)
        self.token_id: int = getattr(config, "image_token_index", -1) if told is None else told
        if processor.tokenizer.convert_tokens_to_ids(self.image_token) != self.token_id:
            raise QBEError(f"the token '{self.image_token}' of its processor is not the model's, {self.token_id}")

    def prepare(self, picture: Picture) -> Prepared:
        """Decodes a picture and prepares it.

        Raises:
            QBEError: a picture that cannot be decoded (`qbe.pictures.decode`) or that the processor refuses.
        """
        image = decode(picture)
        try:
            with self._lock:
                made = self._processor(
                    images=[image], text=[self.image_token], return_tensors="pt", add_special_tokens=False
                )
        except Exception as error:  # a processor of any author, on a picture of any size
            said = " ".join(str(error).split())[:100] or type(error).__name__
            raise QBEError(
                f"{picture.name} ({image.width} x {image.height} pixels) cannot be prepared for this model ({said}): "
                "give another size", field="prompt",
            ) from error  # fmt: skip
        inputs = {name: value for name, value in made.items() if name not in ("input_ids", "attention_mask")}
        ids = tuple(made["input_ids"][0].tolist())
        if self.token_id not in ids:
            raise QBEError(f"{picture.name} is too small for this model, which makes no row of it", field="prompt")
        return Prepared(ids, inputs)


class _PixtralProcessor:
    """transformers' `PixtralProcessor`, whose module imports torchvision.

    Args:
        image_processor: of Pixtral, on Pillow.
        settings: of `processor_config.json`.
    """

    def __init__(self, image_processor: Any, tokenizer: Any, settings: Mapping[str, Any]) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.image_token = settings.get("image_token", "[IMG]")
        self._break = settings.get("image_break_token", "[IMG_BREAK]")
        self._end = settings.get("image_end_token", "[IMG_END]")
        self._patch = settings.get("patch_size", 16) * settings.get("spatial_merge_size", 1)
        self.chat_template: str | None = None

    def __call__(self, images: Any, text: Any, **_: Any) -> dict[str, Any]:
        inputs = dict(self.image_processor(images, patch_size=self._patch, return_tensors="pt"))
        height, width = (int(side) // self._patch for side in inputs["image_sizes"][0])
        row = self.image_token * width
        rows = self._break.join([row] * height) + self._end
        ids = self.tokenizer(rows, add_special_tokens=False, return_tensors="pt")["input_ids"]
        return {"input_ids": ids, **inputs}


class _QwenProcessor:
    """transformers' `Qwen2VLProcessor` and those after it, which need torchvision for videos.

    Args:
        image_processor: of Qwen2-VL, on Pillow.
        token_id: of the token that the chat template writes for a picture, and that stands for each of its rows.
    """

    def __init__(self, image_processor: Any, tokenizer: Any, token_id: int) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.image_token = tokenizer.convert_ids_to_tokens(token_id)
        self._token_id = token_id
        self.chat_template: str | None = None

    def __call__(self, images: Any, text: Any, **_: Any) -> dict[str, Any]:
        inputs = dict(self.image_processor(images, return_tensors="pt"))
        rows = int(inputs["image_grid_thw"][0].prod()) // self.image_processor.merge_size**2
        return {"input_ids": torch.full((1, rows), self._token_id), **inputs}


def load_processor(folder: Path, tokenizer: Any, config: PreTrainedConfig) -> Any:
    """The processor of a model folder, on Pillow.

    Raises:
        QBEError: there is none, or it cannot be loaded.
    """
    if not any((folder / name).is_file() for name in _FILES):
        raise QBEError(f"{folder} has no processor for them ({' or '.join(_FILES)})")
    try:
        with quiet():
            found = _loaded(folder, tokenizer, config)
        if not found.chat_template and (file := folder / _TEMPLATE).is_file():
            found.chat_template = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
        return found
    except Exception as error:
        said = " ".join(str(error).split())[:160]
        raise QBEError(f"the processor in {folder} cannot be loaded ({said})") from error


def copy_files(model: Path, to: Path) -> None:
    """Take a model folder's processor along into another folder of it; does nothing where there is none."""
    for name in (*_FILES, _TEMPLATE):
        if (model / name).is_file():
            shutil.copyfile(model / name, to / name)


def _loaded(folder: Path, tokenizer: Any, config: PreTrainedConfig) -> Any:
    # Some processors need torchvision, and more, for videos alone. Their image processors do not.
    vision, qwen = getattr(getattr(config, "vision_config", None), "model_type", ""), config.model_type in QWEN
    if config.model_type != "smolvlm" and vision != "pixtral" and not qwen:
        return AutoProcessor.from_pretrained(folder, local_files_only=True)
    images, file = AutoImageProcessor.from_pretrained(folder, local_files_only=True), folder / _FILES[1]
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if qwen:
        return _QwenProcessor(images, tokenizer, config.image_token_id)
    if vision == "pixtral":
        return _PixtralProcessor(images, tokenizer, settings)
    return Idefics3Processor(images, copy.deepcopy(tokenizer), settings.get("image_seq_len", 169))
