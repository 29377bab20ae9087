"""Tiny random models that read pictures, with processors made offline, and transformers' own answers."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from qbe.pictures.processor import _PixtralProcessor, _QwenProcessor

FAMILIES = (
    "smolvlm",
    "idefics3",
    "llava",
    "llava_next",
    "mistral3",
    "pixtral",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
ROWS = [f"<row_{i}_col_{j}>" for i in range(1, 5) for j in range(1, 5)]
IDEFICS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *ROWS]
PIXTRAL = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
QWEN = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
_SIDE = 28

# As those of the families: content is a list of parts, and a picture is one token.
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}IMAGE{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<e>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer_of(special: Sequence[str]) -> PreTrainedTokenizerFast:
    """Bytes, and these special tokens, the first of which stands for a picture."""
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(["<e>", *ALPHABET])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = _TEMPLATE.replace("IMAGE", special[0])
    return tokenizer


def _text(kind: type[Any], tokenizer: PreTrainedTokenizerFast) -> Any:
    return kind(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, pad_token_id=None, bos_token_id=None,
        eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip


_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": _SIDE, "patch_size": 7,
}  # fmt: skip


def tiny(family: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, Any]:
    """A model, its tokenizer and its processor; `pixtral` is LLaVA with Pixtral's tower, as mistral-community has it.

    Where transformers' processor needs what is not installed, the third is what `qbe.pictures.processor` makes."""
    torch.manual_seed(0)
    makers = {"smolvlm": _idefics, "idefics3": _idefics, "mistral3": _pixtral, "pixtral": _pixtral}
    build = _qwen if family.startswith("qwen") else makers.get(family, _llava)
    model, tokenizer, processor = build(family)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 or "newline" in name:
            nn.init.normal_(parameter, 0, 0.2)
    return model.float().eval().requires_grad_(False), tokenizer, processor


def _idefics(family: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, Any]:
    tokenizer, smol = tokenizer_of(IDEFICS), family == "smolvlm"
    config: Any = (tf.SmolVLMConfig if smol else tf.Idefics3Config)(
        text_config=_text(tf.LlamaConfig, tokenizer).to_dict(), vision_config=_VISION, scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), tie_word_embeddings=False, pad_token_id=None,
    )  # fmt: skip
    kind = tf.SmolVLMForConditionalGeneration if smol else tf.Idefics3ForConditionalGeneration
    images = (SmolVLMImageProcessorPil if smol else Idefics3ImageProcessorPil)(
        size={"longest_edge": 2 * _SIDE}, max_image_size={"longest_edge": _SIDE}
    )
    return kind(config), tokenizer, tf.Idefics3Processor(images, tokenizer, image_seq_len=4)


def _llava(family: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, Any]:
    tokenizer, following = tokenizer_of(["<image>"]), family == "llava_next"
    common: dict[str, Any] = {
        "text_config": _text(tf.MistralConfig, tokenizer), "vision_config": tf.CLIPVisionConfig(**_VISION),
        "image_token_index": tokenizer.convert_tokens_to_ids("<image>"), "tie_word_embeddings": False,
    }  # fmt: skip
    pinpoints = [[_SIDE, 2 * _SIDE], [2 * _SIDE, _SIDE], [2 * _SIDE, 2 * _SIDE]]
    sizes: dict[str, Any] = {
        "size": {"shortest_edge": _SIDE}, "crop_size": {"height": _SIDE, "width": _SIDE},
    }  # fmt: skip
    about: dict[str, Any] = {
        "patch_size": 7,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    if following:
        images = LlavaNextImageProcessorPil(**sizes, image_grid_pinpoints=pinpoints)
        config = tf.LlavaNextConfig(**common, image_grid_pinpoints=pinpoints)
        return (
            tf.LlavaNextForConditionalGeneration(config),
            tokenizer,
            tf.LlavaNextProcessor(images, tokenizer, **about),
        )
    model = tf.LlavaForConditionalGeneration(tf.LlavaConfig(**common))
    return model, tokenizer, tf.LlavaProcessor(CLIPImageProcessorPil(**sizes), tokenizer, **about)


def _pixtral(family: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, Any]:
    tokenizer, mistral3 = tokenizer_of(PIXTRAL), family == "mistral3"
    vision = {k: v for k, v in _VISION.items() if k != "image_size"} | {"image_size": 4 * _SIDE, "head_dim": 16}
    common: dict[str, Any] = {
        "text_config": _text(tf.MistralConfig, tokenizer), "vision_config": tf.PixtralVisionConfig(**vision),
        "image_token_index": tokenizer.convert_tokens_to_ids("[IMG]"), "tie_word_embeddings": False,
        "vision_feature_layer": -1,
    }  # fmt: skip
    merge = 2 if mistral3 else 1
    images = PixtralImageProcessorPil(size={"longest_edge": 2 * _SIDE}, patch_size={"height": 7, "width": 7})
    processor = _PixtralProcessor(images, tokenizer, {"patch_size": 7, "spatial_merge_size": merge})
    if mistral3:
        config: Any = tf.Mistral3Config(**common, spatial_merge_size=merge)
        return tf.Mistral3ForConditionalGeneration(config), tokenizer, processor
    config = tf.LlavaConfig(**common, vision_feature_select_strategy="full")
    return tf.LlavaForConditionalGeneration(config), tokenizer, processor


_QWEN_NAMES = {
    "qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_vl_moe": "Qwen3VLMoe",
    "qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe",
}  # fmt: skip


def _qwen(family: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, Any]:
    tokenizer, name = tokenizer_of(QWEN), _QWEN_NAMES[family]
    text = _text(getattr(tf, f"{'Qwen2_5_VL' if family == 'qwen2_vl' else name}TextConfig"), tokenizer).to_dict()
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3],
            "mrope_interleaved": family.startswith("qwen3")}  # fmt: skip
    text |= {"rope_parameters": rope, "rope_scaling": rope}
    if "moe" in family:
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                 "shared_expert_intermediate_size": 32}  # fmt: skip
    if "3_5" in family:
        text |= {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16,
                 "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                 "rope_parameters": {**rope, "partial_rotary_factor": 1.0}}  # fmt: skip
    vision: dict[str, Any] = {
        "depth": 3, "num_heads": 2, "hidden_size": 32, "embed_dim": 32, "intermediate_size": 48, "mlp_ratio": 2,
        "patch_size": 7, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 28,
        "fullatt_block_indexes": [1], "out_hidden_size": 64, "deepstack_visual_indexes": [0, 1],
        "num_position_embeddings": 64,
    }  # fmt: skip
    if family == "qwen2_vl":  # which projects to it by its own width
        vision |= {"hidden_size": 64}
    config = getattr(tf, f"{name}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=False,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
    )  # fmt: skip
    images = Qwen2VLImageProcessorPil(
        patch_size=7, temporal_patch_size=2, merge_size=2, size={"shortest_edge": 28 * 28, "longest_edge": 84 * 84}
    )
    tokenizer.chat_template = _TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    model = getattr(tf, f"{name}ForConditionalGeneration")(config)
    return model, tokenizer, _QwenProcessor(images, tokenizer, config.image_token_id)


def save(family: str, folder: Path) -> Path:
    """A folder as hubs have them: model, tokenizer, the processor's files."""
    model, tokenizer, processor = tiny(family)
    for part in (model, tokenizer, processor if hasattr(processor, "save_pretrained") else processor.image_processor):
        part.save_pretrained(folder)
    if isinstance(processor, _PixtralProcessor):
        settings = {"processor_class": "PixtralProcessor", "patch_size": 7, "spatial_merge_size": processor._patch // 7}
        (folder / "processor_config.json").write_text(json.dumps(settings))
    if family == "smolvlm":  # which transformers' own would load only where torchvision and num2words are
        file = folder / "processor_config.json"
        file.write_text(file.read_text().replace("Idefics3Processor", "SmolVLMProcessor"))
    return folder


def drawn(seed: int, size: tuple[int, int] = (60, 40)) -> Image.Image:
    """A picture of a few shapes, which differs from those of other seeds everywhere."""
    chance = random.Random(seed)
    image = Image.new("RGB", size, tuple(chance.randrange(256) for _ in range(3)))
    draw = ImageDraw.Draw(image)
    for _ in range(12):
        x, y = chance.randrange(size[0]), chance.randrange(size[1])
        draw.ellipse((x, y, x + size[0] // 3, y + size[1] // 3), tuple(chance.randrange(256) for _ in range(3)))
    return image


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    """A file of it."""
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def greedy(model: Any, processor: Any, text: str, images: Sequence[Image.Image], tokens: int) -> list[int]:
    """What transformers writes after a rendered prompt with these pictures, by its own processing."""
    if hasattr(processor, "validate_inputs"):
        given = processor(images=list(images) or None, text=[text], return_tensors="pt", add_special_tokens=False)
    else:
        given = (_qwen_inputs if processor.image_token in QWEN else _pixtral_inputs)(processor, text, images)
    length = given["input_ids"].shape[1]
    given = {k: v for k, v in given.items() if k != "attention_mask"}
    out = model.generate(
        **given, attention_mask=torch.ones(1, length, dtype=torch.long), max_new_tokens=tokens, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out[0, length:].tolist()


def _qwen_inputs(processor: Any, text: str, images: Sequence[Image.Image]) -> dict[str, Any]:
    """What transformers' `Qwen2VLProcessor` would give, which needs torchvision."""
    inputs = dict(processor.image_processor(list(images), return_tensors="pt")) if images else {}
    for grid in inputs.get("image_grid_thw", ()):
        text = text.replace("<|image_pad|>", "[PLACE]" * (int(grid.prod()) // 4), 1)
    text = text.replace("[PLACE]", "<|image_pad|>")
    ids = processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return {"input_ids": ids, "mm_token_type_ids": (ids == processor._token_id).int(), **inputs}


def _pixtral_inputs(processor: Any, text: str, images: Sequence[Image.Image]) -> dict[str, Any]:
    """What transformers' `PixtralProcessor` would give, which needs torchvision: the whole text, expanded at once."""
    patch = processor._patch
    inputs = dict(processor.image_processor(list(images), patch_size=patch, return_tensors="pt")) if images else {}
    for height, width in inputs.get("image_sizes", ()):
        tokens = [["[IMG]"] * (int(width) // patch) + ["[IMG_BREAK]"]] * (int(height) // patch)
        flat = [t for row in tokens for t in row]
        flat[-1] = "[IMG_END]"
        text = text.replace("[IMG]", "".join(flat).replace("[IMG]", "[PLACE]"), 1)
    text = text.replace("[PLACE]", "[IMG]")
    return {
        "input_ids": processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"],
        **inputs,
    }
