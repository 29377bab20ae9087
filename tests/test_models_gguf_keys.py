"""Keys and tensors of a GGUF file: read, known to mean nothing, or refused by name before any work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as tf

import gguf_writer
from cli_process import qbe as run
from gguf_families import BASE, FAMILIES, LLAMA3
from gguf_writer import Writer, tiny, write
from models_tiny import TOKENS, one_line, tiny_tokenizer
from qbe.errors import QBEError
from qbe.models import load_config_and_tokenizer, load_model

IDS = torch.randint(3, 200, (1, 40), generator=torch.Generator().manual_seed(2))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def same(path: Path, original: Any) -> None:
    want = logits(original)
    got = logits(load_model(path, dtype="float32", progress=False).model)
    assert (want - got).abs().max() <= 2e-4 * want.abs().max()


def changed(
    path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Writer], None], family: str = "llama", **extra: Any
) -> Path:
    """A family's file after a change, made just before it is closed."""
    close = Writer.close
    monkeypatch.setattr(Writer, "close", lambda w: (change(w), close(w))[1])
    architecture, config = FAMILIES[family]
    return write(path, architecture, tiny(config()), **extra)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "attention.clamp_kqv", 8.0),
        ("llama", "attention.scale", 0.5),
        ("llama", "attention.causal", False),
        ("llama", "attention.value_length", 16),
        ("llama", "rope.dimension_count", 8),
        ("llama", "rope.scaling.alpha", 2.0),
        ("llama", "rope.scaling.attn_factor", 1.2),
        ("llama", "rope.scaling.yarn_attn_factor", 0.7),
        ("llama-yarn", "rope.scaling.yarn_ext_factor", 0.5),
        ("llama-yarn", "rope.scaling.yarn_log_multiplier", 0.1),
        ("llama", "rope.scaling.type", "wavy"),
        ("llama", "rope.scaling.type", "longrope"),
        ("llama", "logit_scale", 0.25),
        ("llama", "residual_scale", 0.25),
        ("llama", "attention.head_count_kv", [1, 2, 2]),
        ("llama", "feed_forward_length", [96, 48, 96]),
        ("llama", "something.new", 1),
        ("qwen2", "attention.sliding_window", 8),
        ("qwen2", "expert_count", 4),
        ("qwen2", "pooling_type", 1),
        ("qwen3_moe", "expert_gating_func", 2),
        ("qwen3_moe", "expert_weights_scale", 2.5),
        ("qwen2_moe", "leading_dense_block_count", 1),
        ("gpt2", "attention.head_count_kv", 2),
        ("bloom", "attention.max_alibi_bias", 4.0),
        ("gemma2", "rope.freq_base_swa", 7.0),
        ("gemma3", "attn_logit_softcapping", 5.0),
        ("gemma2", "attention.scale", 0.3),
        ("gemma3", "attention.scale", 0.3),
        ("minimax-m2", "expert_gating_func", 1),
        ("phi3", "rope.scaling.yarn_log_multiplier", 0.5),
        ("phi3-longrope", "rope.scaling.factor", 4.0),
        ("starcoder2", "attention.key_length", 32),
    ],
)
def test_a_key_that_is_not_computed_with_is_refused_by_name(family: str, key: str, value: Any, tmp_path: Path) -> None:
    architecture, config = FAMILIES[family]
    path = write(tmp_path / "m.gguf", architecture, tiny(config()), **{key.replace(".", "__"): value})
    for load in (load_config_and_tokenizer, load_model):  # both before any work
        with pytest.raises(QBEError) as e:
            load(path)
        one_line(e, f"{architecture}.{key}", "m.gguf")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("acme.extra", "x"),
        ("general.type", "adapter"),
        ("adapter.lora.alpha", "1"),
        ("tokenizer.ggml.something", "x"),
        ("tokenizer.ggml.pre", "never-heard-of"),
        ("gemma.logit_scale", "2"),
    ],
)
def test_keys_of_other_namespaces(key: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = changed(tmp_path / "m.gguf", monkeypatch, lambda w: w.file.add_string(key, value))
    with pytest.raises(QBEError) as e:
        load_model(path, progress=False)
    one_line(e, key, value)


def test_flags_of_the_tokenizer_that_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = changed(tmp_path / "m.gguf", monkeypatch, lambda w: w.file.add_bool("tokenizer.ggml.add_sep_token", True))
    with pytest.raises(QBEError) as e:
        load_model(path, progress=False)
    one_line(e, "tokenizer.ggml.add_sep_token is True")


def test_keys_without_meaning_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(w: Writer) -> None:
        w.file.add_string("general.base_model.0.name", "Base")
        w.file.add_string("quantize.imatrix.file", "x.dat")
        w.file.add_float32("general.sampling.temp", 0.6)
        w.file.add_uint32("tokenizer.ggml.seperator_token_id", 3)
        w.file.add_uint32("tokenizer.ggml.fim_pre_token_id", 3)
        w.file.add_uint32("tokenizer.ggml.padding_token_id", 0)
        w.file.add_bool("tokenizer.ggml.add_sep_token", False)
        w.file.add_bool("tokenizer.ggml.add_space_prefix", True)  # this is byte-pair encoding

    neutral = {
        "expert_count": 0, "expert_used_count": 0, "attention__causal": True, "logit_scale": 1.0,
        "attention__sliding_window": 0, "rope__scaling__type": "none", "rope__scaling__factor": 1.0,
        "rope__scaling__finetuned": False, "attention__scale": 24**-0.5, "attention__head_count_kv": [2, 2, 2],
        "rope__scaling__original_context_length": 64, "rope__scaling__attn_factor": 1.0,
    }  # fmt: skip
    path = changed(tmp_path / "m.gguf", monkeypatch, add, **neutral)
    same(path, tiny(FAMILIES["llama"][1]()))
    _, tokenizer = load_config_and_tokenizer(path)
    assert tokenizer.encode("abc") == tiny_tokenizer().encode("abc")


@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [
        ("llama", "blk.0.attn_sub_norm.weight", (64,)),
        ("llama", "blk.1.ffn_norm.bias", (64,)),
        ("llama", "blk.3.attn_q.weight", (64, 64)),
        ("llama", "rope_freqs.weight", (5,)),
        ("llama", "rope_factors_long.weight", (12,)),
        ("qwen2", "blk.0.attn_output.bias", (64,)),
        ("qwen3_moe", "blk.0.ffn_gate_shexp.weight", (48, 64)),
        ("mistral", "blk.0.attn_sinks.weight", (4,)),
        ("gemma3", "dense_2.weight", (64, 64)),
    ],
)
def test_a_tensor_without_a_place_is_refused_by_name(
    family: str, name: str, shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = changed(tmp_path / "m.gguf", monkeypatch, lambda w: w.tensor(name, np.ones(shape)), family)
    with pytest.raises(QBEError) as e:
        load_model(path, progress=False)
    one_line(e, name)


@pytest.mark.parametrize("kind", ["I32", "F64", "Q8_K"])
def test_types_that_cannot_be_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[stored]
    raw = np.zeros((1, size * 256 // block), dtype=np.uint8)
    path = changed(
        tmp_path / "m.gguf", monkeypatch, lambda w: w.file.add_tensor("blk.0.odd.weight", raw, raw_dtype=stored)
    )
    with pytest.raises(QBEError) as e:
        load_model(path, progress=False)
    one_line(e, "blk.0.odd.weight", kind)


def test_a_type_that_the_package_does_not_know(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", tiny(FAMILIES["llama"][1]()))
    raw, name = bytearray(path.read_bytes()), b"output_norm.weight"
    at = raw.index(name) + len(name) + 4 + 8  # after the number of dimensions and the one size
    raw[at : at + 4] = (45).to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(QBEError) as e:
        load_model(path, progress=False)
    one_line(e, "output_norm.weight", "type 45")


def test_architectures_that_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for architecture in ("t5", "deci", "rwkv6", "gemma4"):
        with pytest.raises(QBEError) as e:
            load_model(Writer(tmp_path / "m.gguf", architecture).close(), progress=False)
        one_line(e, f"'{architecture}'", "safetensors")


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_by_the_hidden_size(family: str, layers: int, tmp_path: Path) -> None:
    config = FAMILIES[family][1]()
    fields = config.to_dict() | {"num_hidden_layers": layers, "layer_types": None, "query_pre_attn_scalar": 16}
    original = tiny(type(config)(**fields))
    path = write(tmp_path / "m.gguf", FAMILIES[family][0], original)
    loaded = load_config_and_tokenizer(path)[0]
    assert loaded.query_pre_attn_scalar == 64 // 4
    assert loaded.layer_types == original.config.layer_types


def test_an_attention_scale_of_its_own(tmp_path: Path) -> None:
    config = FAMILIES["gemma2"][1]()
    config.query_pre_attn_scalar = 50
    original = tiny(config)
    same(write(tmp_path / "m.gguf", "gemma2", original, attention__scale=50**-0.5), original)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_caps_of_whole_numbers(family: str, tmp_path: Path) -> None:
    architecture, config = FAMILIES[family]
    capped = config()
    capped.final_logit_softcapping = 3.0
    same(write(tmp_path / "m.gguf", architecture, tiny(capped), final_logit_softcapping=3), tiny(capped))


def test_windows_of_single_layers(tmp_path: Path) -> None:
    config = FAMILIES["gemma3"][1]()
    fields = config.to_dict() | {"layer_types": ["full_attention", *["sliding_attention"] * 5, "full_attention"]}
    original = tiny(tf.Gemma3TextConfig(**fields))
    flags = [t == "sliding_attention" for t in original.config.layer_types]
    same(write(tmp_path / "m.gguf", "gemma3", original, attention__sliding_window_pattern=flags), original)


def test_a_window_in_a_llama_file(tmp_path: Path) -> None:
    original = tiny(tf.MistralConfig(**BASE, sliding_window=8, head_dim=16))
    same(write(tmp_path / "m.gguf", "llama", original, attention__sliding_window=8), original)


def test_biases_of_some_projections_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = tiny(tf.LlamaConfig(**BASE, attention_bias=True))
    for layer in original.model.layers:
        layer.self_attn.o_proj.bias.zero_()
    tensor = Writer.tensor
    monkeypatch.setattr(
        Writer, "tensor", lambda w, name, data: None if name.endswith("output.bias") else tensor(w, name, data)
    )
    same(write(tmp_path / "m.gguf", "llama", original), original)


def test_factors_of_no_known_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factors = np.array([1.0, 1.5, 1.2, 3.0, 2.0, 7.0, 1.0, 9.0])
    monkeypatch.setattr(gguf_writer, "_rotary", lambda model: iter([("rope_freqs.weight", factors)]))
    original = tiny(tf.LlamaConfig(**BASE, head_dim=16))
    rotary = original.model.rotary_emb
    rotary.inv_freq.div_(torch.tensor(factors))
    same(write(tmp_path / "m.gguf", "llama", original), original)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_parameters_of_llama_3_are_found_again(factor: float, tmp_path: Path) -> None:
    rope = LLAMA3 | {"rope_theta": 500000.0, "factor": factor, "original_max_position_embeddings": 8192}
    original = tiny(tf.LlamaConfig(**BASE | {"num_hidden_layers": 1}, head_dim=128, rope_parameters=rope))
    found = load_config_and_tokenizer(write(tmp_path / "m.gguf", "llama", original))[0].rope_parameters
    assert found == rope


def test_a_model_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, writer = tiny(FAMILIES["llama"][1]()), gguf.GGUFWriter
    monkeypatch.setattr(gguf, "GGUFWriter", lambda path, arch: writer(path, arch, split_max_tensors=12))
    write(tmp_path / "m.gguf", "llama", original)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [p.name for p in parts] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    same(parts[0], original)
    with pytest.raises(QBEError) as e:
        load_model(parts[1], progress=False)
    one_line(e, "part 2 of 3", "m-00001-of-00003.gguf")
    other = parts[0].rename(tmp_path / "model.gguf")
    with pytest.raises(QBEError) as e:
        load_model(other, progress=False)
    one_line(e, "first of 3 parts", "-00001-of-00003.gguf")
    other.rename(parts[0])
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(QBEError) as e:
        load_model(parts[0], progress=False)
    one_line(e, parts[2].name, "is no part 3")
    parts[2].unlink()
    with pytest.raises(QBEError) as e:
        load_model(parts[0], progress=False)
    one_line(e, parts[2].name, "is missing")


def test_more_tokens_than_a_thousand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [*TOKENS, *(f"t{i}" for i in range(1100 - len(TOKENS)))]
    monkeypatch.setattr(gguf_writer, "TOKENS", tokens)
    config = FAMILIES["lfm2"][1]()
    config.vocab_size = len(tokens)
    original = tiny(config)
    same(write(tmp_path / "m.gguf", "lfm2", original), original)


def test_tokens_that_end_and_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(w: Writer) -> None:
        w.file.add_uint32("tokenizer.ggml.eot_token_id", 5)
        w.file.kv_data[0]["tokenizer.ggml.add_bos_token"].value = True
        w.file.add_string("tokenizer.chat_template.tool_use", "tools: {{ tools }}")

    loaded = load_model(changed(tmp_path / "m.gguf", monkeypatch, add), progress=False)
    assert loaded.model.generation_config.eos_token_id == [0, 5]
    assert loaded.model.config.eos_token_id == [0, 5]
    assert loaded.tokenizer("dog")["input_ids"][0] == 1
    assert loaded.tokenizer("dog", add_special_tokens=False)["input_ids"][0] != 1
    assert loaded.tokenizer.get_chat_template(tools=[{"type": "function"}]).startswith("tools: ")


def test_control_tokens_in_other_letters_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(w: Writer) -> None:
        w.file.kv_data[0]["tokenizer.ggml.tokens"].value = ["<｜end｜>", *TOKENS[1:]]

    tokenizer = load_model(changed(tmp_path / "m.gguf", monkeypatch, add), progress=False).tokenizer
    ids = tokenizer("a<｜end｜>a")["input_ids"]
    assert (ids.count(0), len(ids)) == (1, 3)
    assert tokenizer.decode(ids) == "a<｜end｜>a"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "aa"
    assert len(tokenizer) == len(TOKENS)


def test_the_command_answers_as_with_the_folder(tmp_path: Path, home: Path) -> None:
    original = tiny(FAMILIES["llama-3.1"][1]())
    original.save_pretrained(tmp_path / "folder")
    tiny_tokenizer().save_pretrained(tmp_path / "folder")
    file = write(tmp_path / "m.gguf", "llama", original)
    prompt, answers = "he has a dog, he has a cat, and 12 + 7 is what he has a lot of", []
    for model in (tmp_path / "folder", file):
        done = run(
            "generate", "--model", str(model), "--dtype", "float32", "--policy", "uniform", "--bits", "16",
            "--max-tokens", "12", "--greedy", "--json", prompt, home=home,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode()
        answers.append(json.loads(done.stdout)["text"])
    assert answers[0] == answers[1]


def test_the_command_names_the_key(tmp_path: Path, home: Path) -> None:
    file = write(tmp_path / "m.gguf", "llama", tiny(FAMILIES["llama"][1]()), attention__clamp_kqv=8.0)
    done = run("generate", "--model", str(file), "hello", home=home)
    assert done.returncode == 2
    error = done.stderr.decode().strip()
    assert "llama.attention.clamp_kqv is 8.0" in error
    assert "Traceback" not in error
