"""Which tokens end an answer, and which are special: known by the metadata, or by their names where it is silent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# What models of many families were trained to write at the end of a turn. Checkpoints and converted files often name
# another token as their end of sequence, the one of the base model for example; llama.cpp goes by such names, too.
_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|return|>",
    "<|call|>", "<|calls|>", "<|flush|>", "<|endoftext|>", "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "<|eot|>",
    "<|eom|>", "<|EOT|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<|endofturn|>", "[|endofturn|]", "<|stop|>",
    "<|assistant_end|>", "<|role_end|>", "<|tool_response>", "<seed:eos>", "[e~[", "[EOT]", "[EOS]", "<EOT>", "_<EOT>",
    "▁<EOT>", "<eos>", "</s>", "<|user|>", "<|observation|>",
)  # fmt: skip
# Where a tokenizer has all of the names on the right, the one on the left is no end: answers of these families have
# several messages (gpt-oss, Solar), or it is text to them (Gemma 4).
_NO_END = (
    ("<|end|>", {"<|return|>", "<|call|>"}), ("<|end|>", {"<|calls|>", "<|flush|>"}), ("</s>", {"<|tool_response>"}),
)  # fmt: skip
_ROLES = {"<|user|>", "<|observation|>"}  # GLM ends a turn with the role of the next; of other families one is missing


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: those of the generation config, the config and the tokenizer, and those with a name
    that says so.
    """
    stops: set[int] = set()
    configs = getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer
    for ids in (getattr(config, "eos_token_id", None) for config in configs):
        stops |= {ids} if isinstance(ids, int) else set(ids or ())
    stops |= set(_named(tokenizer))
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    rows = getattr(embedding, "num_embeddings", None)
    return frozenset(i for i in stops if isinstance(i, int) and i >= 0 and (rows is None or i < rows))


def _named(tokenizer: Any) -> Iterator[int]:
    added = {str(token): i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    not_here = {name for name, others in _NO_END if vocabulary.keys() >= others}
    if not vocabulary.keys() >= _ROLES:
        not_here |= _ROLES
    for name in _ENDS:
        # A name that may be ordinary text, such as HTML's, counts only where it is one of the added tokens.
        i = added.get(name, vocabulary.get(name) if name.startswith(("<|", "<｜", "<end_")) else None)
        if i is not None and name not in not_here:
            yield i


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Tokens that `decode` leaves out, and their names."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    special = {int(i): str(token) for i, token in added if getattr(token, "special", False)}
    names = getattr(tokenizer, "all_special_tokens", ())
    return special | dict(zip(getattr(tokenizer, "all_special_ids", ()), map(str, names), strict=False))
