"""GGUF files: what is loaded is what was stored, and damage is refused in one line."""

from __future__ import annotations

import contextlib
import struct
import time
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS

from models_tiny import HIDDEN, TEMPLATE, one_line, tiny_model, write_gguf
from qbe.errors import QBEError
from qbe.models import load_config_and_tokenizer, load_model
from qbe.models.gguf_header import read_header
from qbe.models.gguf_tensors import sources


@pytest.mark.parametrize("tie", [True, False])
def test_gguf_f32_gives_back_the_model(tmp_path: Path, tie: bool) -> None:
    original = tiny_model(tie)
    loaded = load_model(write_gguf(tmp_path / "m.gguf", original), dtype="float32", progress=False)
    state = loaded.model.state_dict()
    assert state.keys() == original.state_dict().keys()
    for name, tensor in original.state_dict().items():
        assert torch.equal(state[name], tensor), name
    shared = loaded.model.lm_head.weight.data_ptr() == loaded.model.model.embed_tokens.weight.data_ptr()
    assert shared is tie
    ids = torch.arange(10)[None]
    assert torch.allclose(loaded.model(ids).logits, original(ids).logits, atol=1e-5)


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_1, Q.F16, Q.BF16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gguf_equals_transformers_loading(tmp_path: Path, kind: Q, dtype: torch.dtype) -> None:
    path = write_gguf(tmp_path / "m.gguf", kind=kind)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    ours = load_model(path, dtype=dtype, progress=False)
    assert ours.dtype is dtype
    state = ours.model.state_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(state[name], tensor.to(dtype)), name


def test_gguf_details(tiny_gguf: Path, tmp_path: Path) -> None:
    loaded = load_model(tiny_gguf, progress=False)
    assert (loaded.dtype, loaded.name, loaded.path) == (torch.bfloat16, "tiny", tiny_gguf)
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.model.generation_config.eos_token_id == [0, 1]
    assert loaded.tokenizer.chat_template == TEMPLATE
    assert (loaded.tokenizer.eos_token, loaded.tokenizer.bos_token) == ("<|end|>", "<|start|>")
    text = "  he has a dog, 12 + 7\n"
    ids = loaded.tokenizer(text)["input_ids"]
    assert loaded.tokenizer.decode(ids) == text
    assert ids == AutoTokenizer.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name)(text)["input_ids"]
    config, tokenizer = load_config_and_tokenizer(tiny_gguf)
    assert config.hidden_size == HIDDEN
    assert tokenizer(text)["input_ids"] == ids

    loaded.model.save_pretrained(tmp_path)  # "quantized with gguf" no more
    loaded.tokenizer.save_pretrained(tmp_path)
    again = load_model(tmp_path, progress=False)
    assert again.dtype is torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), loaded.model.parameters(), strict=True))


def test_nothing_on_stdout(tiny_gguf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(tiny_gguf)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("cut", "word"),
    [(0, "is empty"), (2, "not a GGUF"), (4, "cut off"), (20, "cut off"), (200, "cut off"), (-64, "cut off")],
)
def test_truncated_gguf(tiny_gguf: Path, tmp_path: Path, cut: int, word: str) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_gguf.read_bytes()[:cut])
    with pytest.raises(QBEError) as e:
        read_header(path)
    one_line(e, word, "cut.gguf")


def test_corrupt_gguf(tiny_gguf: Path, tmp_path: Path) -> None:
    raw = bytearray(tiny_gguf.read_bytes())
    header = read_header(tiny_gguf)
    cases = {
        "not a GGUF": (0, b"XXXX"),
        "version 9": (4, struct.pack("<I", 9)),
        "bad offset": (header.table[1] - 8, struct.pack("<Q", 3)),
        "cut off": (header.table[1] - 8, struct.pack("<Q", 1 << 40)),
        "corrupt": (header.table[1] - 12, struct.pack("<I", 999)),
    }
    for word, (at, new) in cases.items():
        bad = tmp_path / "bad.gguf"
        bad.write_bytes(raw[:at] + new + raw[at + len(new) :])
        with pytest.raises(QBEError) as e:
            load_model(bad, progress=False)
        one_line(e, word)


def test_gguf_that_contradicts_itself(tmp_path: Path) -> None:
    cases = {
        "architecture 'warp'": {"architecture": "warp"},
        "block_count": {"block_count": 1 << 30},
        "is missing": {"block_count": 3},
        "no tokenizer": {"tokenizer": False},
    }
    for word, options in cases.items():
        with pytest.raises(QBEError) as e:
            load_model(write_gguf(tmp_path / "m.gguf", **options), progress=False)
        one_line(e, word)


@pytest.fixture(scope="module")
def fuzz_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("fuzz") / "fuzz.gguf", kind=Q.Q8_0)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzzed_gguf_loads_or_is_refused(fuzz_file: Path, tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(fuzz_file.read_bytes())
    end = read_header(fuzz_file).table[1]
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, end - 1) | st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(raw)
    start = time.monotonic()
    with contextlib.suppress(QBEError):
        load_model(bad, progress=False)
    assert time.monotonic() - start < 20


@pytest.mark.model
def test_default_gguf_answers(default_gguf: Path) -> None:
    loaded = load_model(default_gguf, progress=False)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = loaded.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = loaded.model.generate(**ids, max_new_tokens=8, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(out[0, ids["input_ids"].shape[1] :])


@pytest.mark.model
def test_default_gguf_equals_the_library_reading(default_gguf: Path) -> None:
    """Against `gguf` and transformers' processor on whole tensors; transformers' own loader takes far longer."""
    reader = gguf.GGUFReader(default_gguf)
    assert len(reader.tensors) == len(read_header(default_gguf).tensors)
    model = load_model(default_gguf, progress=False).model
    processor = TENSOR_PROCESSORS["llama"](config=model.config.to_dict())
    names = {s.tensors[0].name: name for name, s in sources(read_header(default_gguf), model).items()}
    state = model.state_dict()
    for tensor in reader.tensors[:30]:
        whole = processor.process(gguf.dequantize(tensor.data, tensor.tensor_type), tensor.name).weights
        assert torch.equal(state[names[tensor.name]], torch.from_numpy(whole.copy()).bfloat16()), tensor.name
