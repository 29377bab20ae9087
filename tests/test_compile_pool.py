"""Compilation in worker processes: for a GPU that need not be there, into the cache that this process then reads."""

from __future__ import annotations

import itertools
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import byte_tokenizer, tiny_llama
from engine_models import NO_SITES, build, prompts, request
from qbe import Engine
from qbe.blueprint import Blueprint
from qbe.engine.core import Core
from qbe.kernels.reference.activations import precision_word
from qbe.kernels.tuning.compiling import Compilation, CompilePool, collecting
from qbe.sites import Role
from qbe.store.nested_linears import nested_linears
from qbe.store.placement import tile

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_tuned_kernels compiles for the GPU that is there"),
]


class Driver:
    """What Triton asks of a GPU before it launches; a launch itself would fail."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A GPU as far as the compiler is concerned, and a cache folder of its own."""
    from triton import knobs
    from triton.runtime import driver

    folder = tmp_path / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    monkeypatch.setattr(driver, "_active", Driver())
    assert knobs.cache.dir == str(folder)
    return folder


def launch(splits: int) -> Any:
    """The smallest kernel there is; None where a hook has kept it from being launched."""
    from qbe.kernels.triton.linear.nested_kernel import add_splits_kernel

    parts, y = torch.zeros(splits, 3, 32), torch.zeros(3, 32)
    return add_splits_kernel[(3, 1)](parts, None, y, 3, 32, SPLITS=splits, BLOCK_N=64, num_warps=4)


def collected(*splits: int) -> list[Compilation]:
    with collecting() as found:
        for s in (*splits, *splits):
            assert launch(s) is None
    assert [c.name for c in found] == ["add_splits_kernel"] * len(splits)
    return found


def test_what_is_compiled_already_does_not_run_either(no_gpu: Path) -> None:
    """It might read addresses that another kernel would have written."""
    from qbe.kernels.triton.linear.nested_kernel import add_splits_kernel

    parts, y = torch.zeros(2, 3, 32), torch.zeros(3, 32)
    add_splits_kernel.warmup(parts, None, y, 3, 32, SPLITS=2, BLOCK_N=64, num_warps=4, grid=(3, 1))
    try:
        with pytest.raises(Exception, match=r"."):  # there is no GPU to run it
            launch(2)
        with collecting() as found:
            launch(2)
        assert found == []
    finally:
        add_splits_kernel.device_caches.clear()


@pytest.mark.parametrize("hashed", [None, "0" * 64])
def test_what_workers_compile_is_found_here(no_gpu: Path, hashed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this process has hashed the kernel to: with Triton that depends on what it hashed before."""
    from triton import knobs

    from qbe.kernels.triton.linear.nested_kernel import add_splits_kernel

    if hashed is not None:
        monkeypatch.setattr(add_splits_kernel, "hash", hashed)
    pool, done, before = CompilePool(workers=2), [], CompilePool.total_seconds
    outcomes = pool.compile(collected(2, 3), lambda: done.append(1))
    pool.close()
    assert [o.error for o in outcomes.values()] == [None, None]
    assert len(done) == 2
    assert pool.seconds == pytest.approx(sum(o.seconds for o in outcomes.values()))
    assert CompilePool.total_seconds == pytest.approx(before + pool.seconds)
    hits: list[bool] = []
    knobs.compilation.listener = lambda **about: hits.append(about["cache_hit"])
    try:
        parts, y = torch.zeros(2, 3, 32), torch.zeros(3, 32)
        add_splits_kernel.warmup(parts, None, y, 3, 32, SPLITS=2, BLOCK_N=64, num_warps=4, grid=(3, 1))
    finally:
        knobs.compilation.listener = None
        add_splits_kernel.device_caches.clear()
    assert hits == [True]


def test_a_compilation_that_fails_says_why_and_fails_alone(no_gpu: Path) -> None:
    good, bad = collected(4, 5)
    bad = replace(bad, constants={**bad.constants, **{k: 48 for k, v in bad.constants.items() if v == 64}})
    pool = CompilePool(workers=1)
    outcomes = pool.compile([bad, good])
    pool.close()
    error = outcomes[bad.key].error
    assert error is not None
    assert "\n" not in error
    assert outcomes[good.key].error is None


def test_a_worker_that_takes_too_long_is_ended(no_gpu: Path) -> None:
    (slow,) = collected(6)
    pool = CompilePool(workers=1, limit=0.01)
    outcome = pool.compile([slow])[slow.key]
    assert outcome.error is not None
    assert "the compiling process failed" in outcome.error
    pool.limit = 100.0
    assert pool.compile([slow])[slow.key].error is None  # by a new one
    pool.close()
    assert pool.compile([slow]) == {}


def test_other_threads_compile_as_ever_while_one_collects(no_gpu: Path) -> None:
    from triton import knobs

    seen: list[str] = []
    knobs.runtime.jit_cache_hook = lambda **call: bool(seen.append(call["fn"].name)) or True
    try:
        with collecting() as found:
            other = threading.Thread(target=launch, args=(7,))
            other.start()
            other.join()
        assert launch(7) is None
    finally:
        knobs.runtime.jit_cache_hook = None
    assert found == []
    assert seen == ["add_splits_kernel"] * 2


def test_what_an_engine_compiles_at_its_start_is_all_that_its_steps_launch(
    no_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any number of rows, and for the dequantisation of a prompt that is alone."""
    from qbe.engine.execution.warmup import linear_launches
    from qbe.kernels.triton.linear.nested import nested_linear

    engine = Engine(tiny_llama().bfloat16(), tokenizer=byte_tokenizer(), device="cpu", policy="uniform", records=False)
    model, table = engine.model, engine.table
    weights = [weight for _, _, weight in nested_linears(model)]
    for weight in weights[::2]:  # the others keep the canonical layout, as some matrices do on a GPU
        tiled = tile(weight.packed, weight.meta, weight.layout, weight.in_features, weight.exponent)
        assert tiled is not None
        weight.packed = tiled
    weights[0].native = torch.float8_e4m3fn
    monkeypatch.setattr("qbe.kernels.ops.nested_linear.nested_linear", nested_linear)
    with torch.inference_mode(), collecting() as found:
        for launch in linear_launches(model, table, 300, 4):
            launch()
    names = {c.name for c in found}
    assert names >= {"decode_kernel", "batch_kernel", "dequantise_kernel", "dense_kernel", "nested_linear_kernel"}
    with torch.inference_mode(), collecting() as later:
        for m in (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 100, 128, 129, 200, 255, 256, 257, 299, 300):
            for site in table.nested:
                if m <= 4 or site.role is not Role.OUTPUT_HEAD:
                    layer = model.get_submodule(site.name)
                    layer(torch.zeros(m, layer.weight.in_features, dtype=torch.bfloat16))
        for weight in weights[::2]:
            for width, activations in itertools.product((4, 6, 8), (8, 16)):
                weight.uniform = precision_word(width, activations)
                torch.nn.functional.linear(torch.zeros(300, weight.in_features, dtype=torch.bfloat16), weight)
    assert {c.key for c in later} <= {c.key for c in found}
    assert len(found) < 50


def test_so_are_the_kernels_of_the_kv_cache(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For prompts cut anywhere, beside any number of sequences that write, and for any number of pages to seal; bounded
    ones, too."""
    from qbe.engine.execution.warmup import attention_launches
    from qbe.kernels.cuda.dispatch import paged_attention
    from qbe.kernels.triton.attention.bounded import bounded_attention
    from qbe.kernels.triton.kv_cache import pages as kv_pages
    from qbe.kernels.triton.kv_cache.write_rows import write_rows

    core = Core(build("gemma2-softcap"), NO_SITES, max_batch_tokens=512, kv_tokens=4096)
    core.runner.decode = None  # on a GPU its graphs are captured before the engine serves
    monkeypatch.setattr("qbe.kernels.ops.paged_attention.paged_attention", paged_attention)
    monkeypatch.setattr("qbe.kernels.ops.bounded_attention.bounded_attention", bounded_attention)
    monkeypatch.setattr("qbe.kvcache.prompt.has_kernel", lambda query: True)
    for name in ("quantise_pages", "read_pages"):
        monkeypatch.setattr(f"qbe.kvcache.pages.{name}", getattr(kv_pages, name))
    monkeypatch.setattr("qbe.kvcache.cache.write_rows", write_rows)
    with torch.inference_mode(), collecting() as found:
        for call in attention_launches(core.runner.cache, 4):
            call()
    kernels = {
        "rotate_queries_kernel", "decode_attention_kernel", "combine_kernel", "prompt_attention_kernel",
        "quantise_kernel", "read_kernel", "raise_pages_kernel", "write_rows_kernel",
    }  # fmt: skip
    assert {c.name for c in found} == kernels
    with collecting() as later:
        for step in range(60):
            if step % 5 == 0 and step < 30:
                length = (200, 64, 65, 130, 191, 3)[step // 5]
                blueprint = Blueprint("kv", (), (), ((4, 16, 2, 8), (16,) * 4, (2,) * 4)[step // 5 % 3])
                blueprint = replace(blueprint, kv_error=0.1 if step % 2 else None)
                core.add(request(str(step), prompts(length)[0], blueprint, max_tokens=100))
            work = core.scheduler.schedule()
            core.runner.step(work)
            core.scheduler.complete(work)
            for w in work:
                if w.samples:
                    w.sequence.token_ids.append(0)
    assert {c.name for c in later} == kernels
    assert {c.key for c in later} <= {c.key for c in found}
    assert len(found) < 30
