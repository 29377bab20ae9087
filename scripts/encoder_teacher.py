"""The teacher of the sentence encoder: what the default model makes of a text, averaged over its tokens."""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from analysis_pairs import pairs

from qbe.analysis.classifier import Array
from qbe.models import load_model

HEAD_TOKENS, TAIL_TOKENS = 128, 64  # an instruction stands at the beginning or at the end
GROUP = 16


@dataclass(frozen=True)
class Text:
    """A text to learn from; `prompt_class` and `held_out` are those of `analysis_pairs`, None for other texts."""

    text: str
    prompt_class: str | None
    held_out: bool


def texts(data: Path) -> list[Text]:
    """The prompts of the query analysis, then texts of the same kinds that are only learned from; a fixed order.

    Nothing of gsm8k's test file, of the held-out BIG-Bench-Hard tasks or of WikiText's test file is among the latter.
    """
    prompts = [Text(p.prompt, p.prompt_class, p.held_out) for p in pairs(data)]
    known = {t.text for t in prompts}
    rng = random.Random(1)
    rows = (data / "gsm8k_train4000.jsonl").read_text(encoding="utf-8").splitlines()
    more = rng.sample([json.loads(r)["question"] for r in rows], 700)
    for i, path in enumerate(sorted((data / "bbh").glob("*.json"))):
        if i % 4 != 2:
            more += [e["input"] for e in rng.sample(json.loads(path.read_text(encoding="utf-8"))["examples"], 25)]
    for path in sorted((data / "paul_graham_essays").glob("*.txt")):
        parts = [p for p in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")) if 100 < len(p) < 1500]
        more += rng.sample(parts, min(8, len(parts)))
    articles = (data / "wikitext2_valid.txt").read_text(encoding="utf-8").replace("<unk>", "it").split("\n")
    more += [p[:900] for p in rng.sample([p for p in articles if len(p) > 300], 300)]
    return [*prompts, *(Text(t, None, False) for t in dict.fromkeys(more) if t not in known)]


@torch.inference_mode()
def teach(items: list[Text], model_path: Path, layers: int) -> Array:
    """float32 [texts, hidden]: the states after that many decoder layers, each of norm 1, averaged over the tokens.

    The first token is left out: its state is an outlier that is the same for every text.
    """
    loaded = load_model(model_path, dtype="bfloat16")
    model, tokenizer = loaded.model, loaded.tokenizer
    body = model.model
    body.layers = body.layers[:layers]
    body.norm = torch.nn.Identity()
    ids = [tokenizer(t.text, add_special_tokens=False)["input_ids"] for t in items]
    ids = [i if len(i) <= HEAD_TOKENS + TAIL_TOKENS else i[:HEAD_TOKENS] + i[-TAIL_TOKENS:] for i in ids]
    ids = [[tokenizer.bos_token_id, *i] for i in ids]
    out = np.zeros((len(items), model.config.hidden_size), np.float32)
    order = sorted(range(len(items)), key=lambda i: len(ids[i]))
    start = time.perf_counter()
    for at in range(0, len(order), GROUP):
        rows = order[at : at + GROUP]
        width = max(len(ids[i]) for i in rows)
        batch = torch.tensor([ids[i] + [0] * (width - len(ids[i])) for i in rows])
        states = body(batch, use_cache=False).last_hidden_state.float()  # causal: padding behind changes nothing
        states = torch.nn.functional.normalize(states, dim=-1)
        for row, i in enumerate(rows):
            out[i] = states[row, 1 : len(ids[i])].mean(0).nan_to_num(0).numpy()
        if at % (GROUP * 32) == 0:
            print(f"teacher {at + len(rows)}/{len(order)} after {time.perf_counter() - start:.0f} s", flush=True)
    return out
