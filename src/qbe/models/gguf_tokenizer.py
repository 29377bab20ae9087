"""The tokenizer of a GGUF file: byte-level BPE built here, SentencePiece by transformers' converters."""

from __future__ import annotations

import importlib
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qbe.errors import QBEError
from qbe.models.gguf_header import GGUFHeader

_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens that are whole in any text
_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

# How text is cut before merges, by `tokenizer.ggml.pre`: patterns one after the other, each within the pieces of the
# one before, as llama.cpp's table has it.
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_CASED, _CASED_ENDING = (
    rf"{_WORD}{_UPPER}*{_LOWER}+{ending}|{_WORD}{_UPPER}+{_LOWER}*{ending}" for ending in ("", _ENDINGS + "?")
)
_QWEN2 = rf"{_ENDINGS}|{_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_REST}"
_LLAMA3 = rf"{_ENDINGS}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_REST}"
_CUTS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("", "default"): (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    (
        "gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum",
        "modern-bert", "jina-v1-en", "jina-v2-code", "roberta-bpe", "exaone4", "mpt", "olmo", "jais", "trillion",
        "granite-docling",
    ): (_GPT2,),
    ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"): (r"\p{N}", _GPT2),
    (
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
        "dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5",
    ): (_LLAMA3,),
    (
        "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2",
    ): (_QWEN2,),
    ("qwen35",): (
        rf"{_ENDINGS}|{_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_REST}",
    ),
    ("tekken",): (_CASED + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _REST,),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): (
        _CASED_ENDING + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _REST,
    ),
    ("falcon",): (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    ("deepseek-coder",): ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm"): (
        r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*{_REST}",
    ),
    ("bloom", "poro-chat", "gpt3-finnish"): (" ?[^(\\s|.,!?…。，、।۔،)]+",),
}  # fmt: skip
# Vocabularies whose words are tokens before any merge, and those that begin a text unless the file says otherwise.
_WHOLE_WORDS = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "glm4",
    "glm5", "tekken",
}  # fmt: skip
_BEGIN = _WHOLE_WORDS - {"glm4", "glm5"}


def tokenizer_of(header: GGUFHeader, model_type: str) -> PreTrainedTokenizerFast:
    """The tokenizer that the metadata describes, with its chat template.

    Raises:
        QBEError: no vocabulary in the file, or one that cannot be built.
    """
    get = header.metadata.get
    tokens, kind = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.model")
    if not isinstance(tokens, list) or not tokens:
        raise QBEError(f"{header.path} holds no tokenizer; use a GGUF with one or the model's safetensors checkpoint")
    pre = str(get("tokenizer.ggml.pre", ""))
    cuts = next((cuts for names, cuts in _CUTS.items() if pre in names), None)
    if kind == "gpt2" and cuts is None:
        raise QBEError(
            f"{header.path}: tokenizer.ggml.pre is {pre[:60]!r}, and how that cuts text QBE does not know; "
            "use the model's safetensors checkpoint"
        )
    options: dict[str, Any] = {"clean_up_tokenization_spaces": False, "name_or_path": str(header.path)}
    options |= {n: get(f"tokenizer.ggml.{n}") for n in ("add_bos_token", "add_eos_token")}
    options = {k: v for k, v in options.items() if v is not None}
    if kind == "llama" or (kind == "gpt2" and pre in _BEGIN):  # llama.cpp's rule for files that do not say
        options.setdefault("add_bos_token", True)
    if templates := _templates(header):
        options["chat_template"] = templates
    try:
        for name, key in _NAMES.items():
            if (token_id := get(f"tokenizer.ggml.{key}_token_id")) is not None:
                options[name] = tokens[token_id]
        if kind == "gpt2":
            backend = _byte_level(header, tokens, cuts or (), pre in _WHOLE_WORDS)
        else:
            backend = _converted(header, model_type)
        return PreTrainedTokenizerFast(tokenizer_object=backend, **options)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # the tokenizers library panics with a BaseException on bad merges
        line = (str(e).strip().splitlines() or [type(e).__name__])[0][:160]
        raise QBEError(f"{header.path}: its tokenizer cannot be built ({line}); download it again") from e


def _templates(header: GGUFHeader) -> str | dict[str, str] | None:
    """The chat template, or templates by name if there are several."""
    prefix = "tokenizer.chat_template"
    found = {k.removeprefix(prefix + "."): v for k, v in header.metadata.items() if k.startswith(prefix + ".")}
    if prefix in header.metadata:
        found["default"] = header.metadata[prefix]
    found = {k: v for k, v in found.items() if isinstance(v, str)}
    return found["default"] if found.keys() == {"default"} else found or None


def _byte_level(header: GGUFHeader, tokens: list[str], cuts: tuple[str, ...], whole_words: bool) -> Tokenizer:
    """Byte-pair encoding of the 256 bytes' letters."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    kinds = header.metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocabulary: dict[str, int] = {}
    added = []
    for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind in (_CONTROL, _USER_DEFINED):
            added.append(AddedToken(token, normalized=False, special=kind == _CONTROL))
        elif not alphabet.issuperset(token):
            token = "".join(piece for piece, _ in spell.pre_tokenize_str(token))
        vocabulary[token] = i
    merges = header.metadata["tokenizer.ggml.merges"]
    pairs = [(left, right) for left, _, right in (m.partition(" ") for m in merges)]
    backend = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=whole_words))
    split = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in cuts]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, spell])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([t for t in added if not t.special])
    backend.add_special_tokens([t for t in added if t.special])
    return backend


def _converted(header: GGUFHeader, model_type: str) -> Tokenizer:
    """What transformers makes of the other kinds of vocabulary."""
    names = {
        "model": "tokenizer_type", "pre": "pre_tokenizer_type", "unknown_token_id": "unk_token_id",
        "padding_token_id": "pad_token_id", "add_space_prefix": "add_prefix_space",
    }  # fmt: skip
    prefix = "tokenizer.ggml."
    fields = {k.removeprefix(prefix): v for k, v in header.metadata.items() if k.startswith(prefix)}
    fields = {names.get(k, k): v for k, v in fields.items()}
    try:  # moved between transformers 5.17 and 5.23, where converters go by GGUF's name of the architecture
        convert = importlib.import_module("transformers.integrations.gguf").convert_gguf_tokenizer
        backend, _ = convert(header.architecture, fields)
    except (ImportError, AttributeError):
        convert = importlib.import_module("transformers.integrations.ggml").convert_gguf_tokenizer
        backend, _ = convert(model_type, fields)
    if fields["tokenizer_type"] == "llama" and fields.get("add_prefix_space") is False:
        _without_prefix(backend)
    return backend


def _without_prefix(backend: Tokenizer) -> None:
    """Text that begins without a space of its own, and keeps the one that it has."""
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    if isinstance(backend.normalizer, normalizers.Sequence):
        backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
