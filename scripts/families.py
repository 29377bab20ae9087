"""Makes a tiny random model of every causal family of transformers, runs it, and writes what came of it as a page.

    python scripts/families.py docs/families.md [FAMILY ...]

Each model is made offline from its configuration, with random weights in float32. Greedy answers of 32 tokens to three
prompts, one after the other and two in a batch, must be those of transformers; then its weights are nested and it has
to run at 4, 6 and 8 bits, and with 4-bit KV pages. It takes a few seconds a family.
"""

from __future__ import annotations

import argparse
import gc
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qbe.blueprint import Blueprint
from qbe.engine.core import Core
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.engine.scheduling.sequence import Sequence as Running
from qbe.errors import QBEError
from qbe.progress import bar
from qbe.sites import SiteTable
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.nesting import nest_model

TOKENS, VOCABULARY = 32, 96
PROMPTS = (5, 1, 40)  # tokens; the first and the last also run as a batch
KV_PROMPT = 150  # tokens: so many that some see a quantised page
BITS = (4, 6, 8)
SECONDS = 180  # of one family, at most

# What transformers' configurations call the sizes of a model, made small. A configuration takes those it has.
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": False,
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "word_embed_proj_dim": 64, "num_hidden_layers": 4, "n_layer": 4,
    "num_layers": 4, "n_layers": 4, "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96, "ffn_hidden_size": 96,
    "d_ff": 96, "dff": 96, "intermediate_size_mlp": 96, "shared_intermediate_size": 64,
    "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "n_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "global_head_dim": 16, "num_global_key_value_heads": 2, "rotary_dim": 8, "d_kv": 16, "multi_query": False,
    "max_position_embeddings": 256, "n_positions": 256, "max_seq_len": 256, "sliding_window": 8,
    "attention_window_size": 16, "max_window_layers": 0, "window_size": 8,
    # experts
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "top_k_experts": 2, "moe_intermediate_size": 32, "expert_ffn_hidden_size": 32, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "first_k_dense_replace": 1,
    "n_group": 2, "topk_group": 1, "decoder_sparse_step": 1, "num_dense_layers": 1,
    # latents
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8,
    # recurrent state
    "state_size": 8, "ssm_state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_num_heads": 8,
    "mamba_d_head": 16, "mamba_head_dim": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16, "mamba_d_ssm": 128,
    "n_groups": 1, "chunk_size": 16, "block_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "lru_width": 64,
    # embeddings of each layer, and layers that share their keys
    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2,
}  # fmt: skip
NEEDED = {"head_dim", "num_key_value_heads", "n_routed_experts"}  # also where a default is None: the checkpoint has it
_SSM = {"num_heads": 8, "head_dim": 16}
# What a family needs besides; None leaves a size out.
ALSO: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1,
                    "num_experts_per_tok": 2},
    "dots1": {"n_shared_experts": 1, "n_group": 2, "topk_group": 1,
                    "num_experts_per_tok": 2},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "position_embedding_type": "nope"},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "longcat_flash": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": _SSM,
    "moshi": {"sliding_window": 256},  # it is the context
    "nemotron_h": {"hybrid_override_pattern": "M*-E", "num_hidden_layers": None},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "intermediate_size": [96] * 4,
                     "activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 8, "altup_num_inputs": 2},
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 16},
    "recurrent_gemma": {"block_types": ["recurrent", "recurrent", "attention"], "lru_width": 64},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1, "n_mamba_heads": 8,
               "mamba_headdim": 16, "use_shared_attention_adapter": False},
}  # fmt: skip
# Encoders and decoders of one, and models of something else than text, which transformers calls causal, too.
OTHERS = {
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small", "blt",
    "camembert", "cpmant", "data2vec-text", "electra", "ernie", "git", "marian", "mbart", "megatron-bert", "musicgen",
    "musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "reformer", "rembert", "roberta",
    "roberta-prelayernorm", "roc_bert", "roformer", "trocr", "whisper", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet",
    "xmod", "moss_transcribe_diarize", "gemma4_assistant", "gemma4_unified_assistant", "dots3_note", "mllama", "emu3",
    "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "got_ocr2", "llama4", "phi4_multimodal", "qwen3_5",
    "qwen3_5_moe", "qwen4_exp",
}  # fmt: skip


class TooLong(BaseException):
    """A family has had its time. No Exception: what the engine catches becomes a refusal."""


@dataclass(frozen=True)
class Outcome:
    """What came of a family. status: works, 16 bits, wrong, refused or not made; why: what is to be said of it."""

    family: str
    model: str
    status: str
    why: str = ""


def config_of(family: str) -> Any:
    """Its configuration with small sizes."""
    kind = CONFIG_MAPPING[family]
    default = kind()
    sizes = {name: value for name, value in TINY.items() if _takes(kind, name) and _has(default, name)}
    sizes |= {"eos_token_id": None, "pad_token_id": 0}
    if "kv_lora_rank" in sizes:  # a key for each query head; the heads' own sizes are told by their parts
        sizes["num_key_value_heads"] = sizes.get("num_attention_heads", 4)
        sizes.pop("head_dim", None)
    kinds = getattr(default, "layer_types", None)
    if kinds and _takes(kind, "layer_types"):
        kinds = list(dict.fromkeys(kinds))
        sizes["layer_types"] = [kinds[i % len(kinds)] for i in range(4)]
    sizes |= ALSO.get(family, {})
    return kind(**{name: value for name, value in sizes.items() if value is not None or name == "eos_token_id"})


def _takes(kind: Any, name: str) -> bool:
    """Whether a configuration of this kind can be given this size; some compute theirs."""
    own = [getattr(kind, n, None) for n in (name, kind.attribute_map.get(name, name))]
    return not any(isinstance(o, property) and o.fset is None for o in own)


def _has(config: Any, name: str) -> bool:
    """Whether it is something there, and not left out by default."""
    try:
        left_out = getattr(config, name, None) in (None, 0)
    except RuntimeError:  # it differs between layers
        return True
    return not left_out or (name in NEEDED and hasattr(config, name))


def made(family: str) -> nn.Module:
    """A model in which what a token says depends on those before it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family), attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and "A_log" not in name:
            nn.init.normal_(parameter, 0, 0.2)
        elif "sink" in name:
            nn.init.normal_(parameter)
    return model.float().eval().requires_grad_(False)


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Random ones."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """What transformers writes."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def run(core: Core, texts: Sequence[list[int]], blueprint: Blueprint, tokens: int) -> list[list[int]]:
    """The answers of requests that are served together."""
    requests = [Running(str(i), text, SamplingParams(max_tokens=tokens), blueprint) for i, text in enumerate(texts)]
    for request in requests:
        core.add(request)
    while core.has_work():
        core.step()
    for request in requests:
        if request.finish_reason != "length":
            raise QBEError(f"a request ended with {request.finish_reason}")
    return [request.output_ids for request in requests]


def tried(family: str) -> Outcome:
    """Makes the family's model and runs it."""
    try:
        model = made(family)
        texts = prompts(PROMPTS)
        expected = [greedy(model, text) for text in texts]
    except Exception as e:  # whatever a family's own code raises
        return Outcome(family, "", "not made", _line(e))
    name = type(model).__name__
    try:
        core = Core(model, SiteTable(()), max_batch_tokens=16, max_sequences=3, kv_tokens=1024)
    except QBEError as e:
        return Outcome(family, name, "refused", _line(e))
    plain = Blueprint("none", (), (), ())
    alone = [run(core, [text], plain, TOKENS)[0] for text in texts]
    if alone != expected or run(core, [texts[0], texts[-1]], plain, TOKENS) != [expected[0], expected[-1]]:
        return Outcome(family, name, "wrong", "its answers are not those of transformers")
    try:
        model = made(family)
        table = nest_model(model, family, NestedWeightConfig(), progress=False)
        core = Core(model, table, max_batch_tokens=64, max_sequences=3, kv_tokens=1024)
        for bits in BITS:
            run(core, texts, Blueprint.of("families", table, (bits,) * len(table.nested)), 8)
        lowest = Blueprint.of("families", table, (4,) * len(table.nested), kv_bits=(4,) * len(core.pool.shapes))
        run(core, prompts([KV_PROMPT]), lowest, 8)
    except QBEError as e:
        return Outcome(family, name, "16 bits", _line(e))
    said = [] if core.runner.packed else ["one sequence a step"]
    said += ["no KV cache"] * (not any(core.pool.shapes)) + ["latents"] * core.pool.latent
    return Outcome(family, name, "works", ", ".join(said))


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()).replace("|", "/").replace("<", "(").replace(">", ")")
    return text[:160] if isinstance(error, QBEError) else f"{type(error).__name__}: {text}"[:160]


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises TooLong when the block takes longer."""

    def stop(*_: object) -> None:
        raise TooLong(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def families() -> list[str]:
    """All that are tried."""
    return [family for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if family not in OTHERS]


def page(outcomes: Sequence[Outcome]) -> str:
    """As Markdown."""
    order = ["works", "16 bits", "wrong", "refused", "not made"]
    counts = {status: sum(o.status == status for o in outcomes) for status in order}
    rows = [
        f"| `{o.family}` | {o.model} | {o.status} | {o.why} |"
        for o in sorted(outcomes, key=lambda o: (order.index(o.status), o.family))
    ]
    return "\n".join([
        "<!-- Made by scripts/families.py. -->",
        "# Model families\n",
        f"What became of a tiny random model of every causal family of transformers {transformers.__version__}, in "
        f"float32 on a CPU: {', '.join(f'{n} *{status}*' for status, n in counts.items() if n)}.\n",
        f"- *works*: the greedy answers to three prompts ({TOKENS} tokens each), alone and two in a batch, are those "
        "of transformers; it runs with weights of 4, 6 and 8 bits, and with KV pages of 4 bits.",
        "- *16 bits*: the answers are right, and fewer bits are refused.",
        "- *refused*: in this line, before any work is done.",
        "- *not made*: transformers itself makes no model of it from small sizes, or it does not run there.\n",
        "| family | model | what became of it | note |",
        "|---|---|---|---|",
        *rows,
        "",
        "The page is made by `python scripts/families.py docs/families.md`. Encoders, and models whose input is not "
        "text, are left out.\n",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("family", nargs="*", help="these alone, instead of all")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    outcomes = []
    wanted = given.family or families()
    with bar("families", len(wanted), True) as advance:
        for family in wanted:
            try:
                with limited(SECONDS):
                    outcomes.append(tried(family))
            except TooLong as e:
                outcomes.append(Outcome(family, "", "not made", str(e)))
            gc.collect()
            advance()
    given.page.write_text(page(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main()
