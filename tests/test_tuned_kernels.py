"""Tuning of the real kernels: every candidate is right, and a request is answered while the tuner is at work.

They run in Triton's interpreter (see `test_triton_kernel`) and, where there is one, on a GPU.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import byte_tokenizer, tiny_llama
from qbe import Budget, Engine, SamplingParams
from qbe.kernels.triton.linear import candidates
from qbe.kernels.tuning import tunable as module
from qbe.kernels.tuning.compiling import CompilePool
from qbe.kernels.tuning.store import TunedStore
from qbe.kernels.tuning.trial import TuningTrial
from qbe.kernels.tuning.tunable import Choice, Config, Problem, Tunable, choices
from qbe.kernels.tuning.tuner import Tuner, _close
from test_triton_kernel import CUDA, DEVICE, INTERPRET, on_device, on_gpu, run_in_interpreter

LIMIT_S = 300.0

if CUDA or INTERPRET:
    from qbe.kernels.triton.linear.nested import PLAIN, nested_linear
    from qbe.kernels.triton.linear.tiled.configs import BATCH, DECODE

    TUNABLES = {"decode": DECODE, "batch": BATCH, "plain": PLAIN}


@pytest.mark.skipif(CUDA or INTERPRET, reason="the tests below run here directly")
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TunedStore:
    """No problem was seen yet, and nothing is kept on disk."""
    store = TunedStore(tmp_path / "tuned.sqlite")
    for one in TUNABLES.values():
        monkeypatch.setattr(one, "_choices", {})
        monkeypatch.setattr(one, "store", store)
    return store


def problem(rows: int, outputs: tuple[int, ...], inputs: int, **changes: Any) -> Problem:
    plain = Problem(rows, outputs, inputs, (4, 2, 2), 64, torch.bfloat16, True, False)
    return plain._replace(**changes)


def choice(name: str, what: Problem) -> Choice:
    device, one = torch.device(DEVICE), TUNABLES[name]
    return Choice(one, device, what, one.generic(what, device), settled=False)


def interpreted(generic: Config, others: list[Config]) -> list[Config]:
    """Those that the interpreter runs in another way: it has neither warps nor a pipeline."""

    def kind(config: Config) -> str:
        return str(sorted((k, v) for k, v in config.items() if k not in ("num_warps", "STAGES")))

    found = {kind(config): config for config in reversed(others)}
    found.pop(kind(generic), None)
    return list(found.values())


SHAPES = [
    ("decode", problem(8, (40,), 512)),
    ("decode", problem(16, (20, 30), 256, bias=True, group_size=128)),
    ("decode", problem(8, (20,), 200, slices=(3, 1, 4), dtype=torch.float16, original=False)),
    ("batch", problem(32, (40,), 512)),
    ("batch", problem(65, (20,), 200, dtype=torch.float16, bias=True)),
    ("plain", problem(8, (20,), 1024)),
    ("plain", problem(64, (70,), 320, group_size=192, dtype=torch.float16, original=False)),
]


@on_device
@pytest.mark.parametrize(("name", "what"), SHAPES if not CUDA else SHAPES[:1], ids=str)
def test_every_candidate_gives_the_generic_results(name: str, what: Problem) -> None:
    torch.manual_seed(0)
    asked = choice(name, what)
    trial = TuningTrial(asked)
    expected = trial.results(asked.config)
    assert len(expected) == len(trial.precisions) + what.original + 1
    assert not torch.equal(expected[0], expected[1])
    assert asked.tunable.valid(what, asked.config)
    others = asked.tunable.candidates(what, asked.config, asked.device)
    assert others
    assert all(config != asked.config and asked.tunable.valid(what, config) for config in others)
    for config in interpreted(asked.config, others) if INTERPRET else others[-2:]:  # each is ten seconds of a compiler
        assert all(_close(y, e) for y, e in zip(trial.results(config), expected, strict=True)), config


@on_device
@pytest.mark.parametrize(("name", "what"), SHAPES, ids=str)
def test_what_does_not_add_up_is_not_valid(name: str, what: Problem) -> None:
    asked = choice(name, what)
    for change in ({"SPLITS": 9}, {"num_warps": 3}, {"STAGES": 0}, {"BN" if name != "plain" else "BLOCK_N": 48}):
        assert not asked.tunable.valid(what, {**asked.config, **change}), change
    parts = {"decode": "SPLIT_UNITS", "batch": "SPLIT_UNITS", "plain": "SPLIT_BLOCKS"}[name]
    assert not asked.tunable.valid(what, {**asked.config, parts: 0})


@on_device
def test_a_split_tile_has_a_counter() -> None:
    """A weight has one for 16 outputs; two tiles of rows share those of a tile of outputs."""
    what = problem(64, (64,), 4096)
    config = {"BM": 32, "BN": 32, "SPLITS": 2, "SPLIT_UNITS": 8, "STAGES": 2, "num_warps": 4}
    assert candidates.valid_batch(what, config)
    assert not candidates.valid_batch(what, {**config, "BM": 16, "BN": 16})


@on_device
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)], ids=str)
def test_there_are_not_too_many(shape: tuple[int, int]) -> None:
    """A dozen for the decode kernel, and no more than a dozen kernels for all shapes; half as many for batches."""
    for rows in (8, 16):
        asked = choice("decode", problem(rows, shape[:1], shape[1]))
        found = [asked.config, *DECODE.candidates(asked.problem, asked.config, asked.device)]
        assert len(found) <= 13
        splits = ("SPLITS", "SPLIT_UNITS")
        kernels = {(*(v for k, v in c.items() if k not in splits), c["SPLITS"] > 1) for c in found}
        assert len(kernels) <= 12
    for rows in (32, 64, 128, 256):
        asked = choice("batch", problem(rows, shape[:1], shape[1]))
        assert len(BATCH.candidates(asked.problem, asked.config, asked.device)) <= 7


@pytest.mark.skipif(not INTERPRET, reason="on a GPU the next test does it on graphs")
def test_an_answer_comes_while_the_tuner_is_blocked(fresh: TunedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is empty. The engine's linears run in the interpreter, as they do on a GPU."""
    monkeypatch.setattr("qbe.kernels.ops.nested_linear.nested_linear", nested_linear)
    monkeypatch.setattr(PLAIN, "candidates", lambda problem, generic, device: [{**generic, "STAGES": 2}])
    model = tiny_llama(hidden_size=64, intermediate_size=64, num_hidden_layers=1).half()
    launches = 8 * 2  # linears, of two steps
    engine = Engine(model, tokenizer=byte_tokenizer(), device="cpu", policy="uniform", records=False, max_sequences=2)
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)

    def answer() -> list[int]:
        return engine.generate("text", params, budget=Budget(bits=6)).token_ids

    untuned = answer()
    assert choices(torch.device("cpu"))
    measuring, release = threading.Event(), threading.Event()

    def measure(trial: TuningTrial, config: Config) -> float:
        measuring.set()
        assert release.wait(LIMIT_S)
        return 1.0 if config["STAGES"] == 2 else 2.0

    tuner = Tuner(torch.device("cpu"), engine._host, measure=measure)
    assert measuring.wait(LIMIT_S)
    before = engine.kernel_cache
    assert (before.hits, before.tuned) == (0, 0)
    assert answer() == untuned
    blocked = engine.kernel_cache
    assert blocked.misses >= before.misses + launches
    assert (blocked.hits, blocked.tuned, blocked.hit_rate) == (0, 0, 0.0)
    release.set()
    assert tuner.wait(LIMIT_S)
    tuner.close()
    assert {c.config["STAGES"] for c in choices(torch.device("cpu"))} == {2}
    assert answer() == untuned
    after = engine.kernel_cache
    assert (after.queued, after.misses) == (0, blocked.misses)
    assert after.hits >= launches
    assert fresh.summary("cpu")["tuned"] == after.tuned > 0


@pytest.mark.cuda
@on_gpu
def test_a_tuned_kernel_reaches_the_graphs_of_an_engine(fresh: TunedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from qbe.kernels.tuning.timing import seconds_per_launch

    plain_candidates = DECODE.candidates
    monkeypatch.setattr(DECODE, "candidates", lambda *about: plain_candidates(*about)[-1:])  # each costs a compilation
    engine = Engine(tiny_llama().bfloat16(), tokenizer=byte_tokenizer(), device="cuda",
                    policy="uniform", records=False, max_sequences=2, max_batch_tokens=8)  # fmt: skip
    decode = engine.core.runner.decode
    assert decode is not None
    captures, device = decode.captures, choices(engine.core.device)[0].device
    assert {c.tunable.name for c in choices(device)} == {"decode"}
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)

    def answer() -> list[int]:
        return engine.generate("some text", params, budget=Budget(bits=6)).token_ids

    untuned = answer()
    before = engine.kernel_cache
    assert before.hits == 0
    assert before.misses >= 20 * 15  # replays count
    times: list[float] = []

    def measure(trial: TuningTrial, config: Config) -> float:
        times.append(seconds_per_launch(trial, config))
        return times[-1] if len(times) % 2 else times[-1] / 1e3  # of each problem the second, the candidate, wins

    tuner = Tuner(engine.core.device, engine._host, measure=measure, pool=CompilePool(workers=4))
    assert tuner.wait(LIMIT_S)
    numbers = tuner.numbers()
    tuner.close()
    assert all(1e-7 < t < 1e-2 for t in times)
    assert (numbers.queued, numbers.tuned) == (0, len(choices(device)))
    assert numbers.compile_seconds > 0
    assert numbers.tuning_seconds > 0
    assert (decode.captures, decode.renewals) == (captures, 2)
    misses = engine.kernel_cache.misses
    assert answer() == untuned
    after = engine.kernel_cache
    assert after.misses == misses
    assert after.hits >= 20 * 15
    engine.close()


@on_device
def test_the_key_on_disk_names_the_kernel(fresh: TunedStore) -> None:
    assert isinstance(DECODE, Tunable)
    keys = {name: choice(name, problem(8, (64,), 256)).key for name in TUNABLES}
    assert len(set(keys.values())) == 3
    assert module._software()[1] in keys["decode"]
