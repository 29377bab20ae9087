"""torch.compile with the backend "qbe": what it merges, that precision recompiles nothing, and what its caches find."""

from __future__ import annotations

import os
import random
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

import forked
from conftest import byte_tokenizer, tiny_llama
from qbe import Budget, Engine, Request, SamplingParams
from qbe.compile.merge import MergeLinears
from qbe.store.nested_linears import NestedWeightConfig, nest
from qbe.store.nested_tensor import NestedTensor

ROOT = Path(__file__).parents[1]
PATH = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
ONE, MERGED = torch.ops.qbe.nested_linear.default, torch.ops.qbe.nested_linears.default


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def linear(inputs: int, outputs: int, bias: bool = False, bits: int = 4, **config: object) -> torch.nn.Linear:
    layer = torch.nn.Sequential(torch.nn.Linear(inputs, outputs, bias=bias).requires_grad_(False))
    nest(layer, ["0"], NestedWeightConfig(**config))
    layer[0].weight.bits = torch.tensor([bits], dtype=torch.int32)
    return layer[0]


class Block(torch.nn.Module):
    """Readers of one input that can be merged and others that cannot, then a reader of another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (linear(128, n, bits=bits) for n, bits in ((64, 4), (32, 8), (96, 16)))
        self.with_bias, self.also = linear(128, 40, bias=True, bits=6), linear(128, 24, bias=True)
        self.other_slices = linear(128, 16, slices=(3, 1, 1, 1, 2), bits=5)
        self.dropped = linear(128, 8, keep_original=False)
        self.end = linear(96, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # `b` needs the result of `a` before it is called: its arguments have to be brought forward
        a = torch.relu(self.a(x))
        b = self.b(x) * a.mean()
        c = self.end(self.c(x))
        rest = [self.with_bias(x), self.also(x), self.other_slices(x), self.dropped(x)]
        return torch.cat([a, b, c, *rest], dim=-1)

    def layers(self) -> list[torch.nn.Linear]:
        return [m for m in self.modules() if isinstance(m, torch.nn.Linear)]


def called(graph: torch.fx.Graph, target: object) -> list[torch.fx.Node]:
    return [n for n in graph.nodes if n.target is target]


def test_what_is_merged() -> None:
    block, x = Block(), torch.randn(2, 3, 128)
    traced = make_fx(block, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    assert len(called(traced.graph, ONE)) == 8
    MergeLinears()(traced.graph)
    traced.graph.lint()
    merged = called(traced.graph, MERGED)
    assert sorted(len(n.args[1]) for n in merged) == [2, 3]
    assert len(called(traced.graph, ONE)) == 3  # other slices, no original, another input
    traced.recompile()
    torch.testing.assert_close(traced(x), block(x), rtol=1e-6, atol=1e-6)


def test_a_linear_whose_input_comes_late_stays_alone() -> None:
    """Its bits depend on the result of the first: it cannot be called together with it."""
    block, x = Block(), torch.randn(1, 128)

    def forward(x: torch.Tensor) -> torch.Tensor:
        a, w = block.a(x), block.b.weight
        bits = a.argmax(-1).to(torch.int32)
        return torch.ops.qbe.nested_linear(x, w.packed, w.meta, bits, w.original, None, w.slices, w.exponent)

    traced = make_fx(forward, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    MergeLinears()(traced.graph)
    assert len(called(traced.graph, ONE)) == 2


def test_results_are_the_eager_ones_and_precision_recompiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    merged: list[int] = []
    plain = MergeLinears.__call__

    def counted(self: MergeLinears, graph: torch.fx.Graph) -> None:
        plain(self, graph)
        merged.append(len(called(graph, MERGED)))

    monkeypatch.setattr(MergeLinears, "__call__", counted)
    block, x = Block(), torch.randn(3, 128)
    number = 1 + random.SystemRandom().random()  # no cache has such a graph; headers are compiled already
    compiled = torch.compile(lambda x: block(x) * number, backend="qbe", fullgraph=True)
    with torch.inference_mode():
        for bits in (4, 6, 8, 16, 4):
            for layer in block.layers():
                layer.weight.bits.fill_(min(bits, layer.weight.gears[-1]))
            torch.testing.assert_close(compiled(x), block(x) * number, rtol=1e-5, atol=1e-5)
    assert merged == [2]
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["recompiles"]


@pytest.mark.parametrize("speculate", [False, True])
def test_an_engine_with_compiled_steps_writes_what_one_without_writes(speculate: bool) -> None:
    """Whatever the blueprints, from a graph for each size; three answers take that of four rows."""
    options = dict(tokenizer=byte_tokenizer(), device="cpu", policy="uniform", records=False,
                   max_sequences=2 if speculate else 4, speculate=speculate)  # fmt: skip
    layers = 1 if speculate else 2
    plain = Engine(tiny_llama(num_hidden_layers=layers), **options)
    compiled = Engine(tiny_llama(num_hidden_layers=layers), **options, compile=True)
    if compiled.core.runner.decode is None:
        pytest.skip("no compiled CPU kernel")
    assert list(compiled.core.runner.decode._compiled) == ([1, 2, 4, 8] if speculate else [1, 2, 4])
    graphs = counters["stats"]["unique_graphs"]
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)
    for bits in ((4,), (6,), (8,), (16,), (4, 8), (4, 16, 8), (6, 8, 16, 4)):
        requests = [Request(f"some text, {b}", params, Budget(bits=b)) for b in bits]
        found, expected = compiled.generate_batch(requests), plain.generate_batch(requests)
        assert [r.token_ids for r in found] == [r.token_ids for r in expected]
        assert [r.error for r in found] == [None] * len(bits)
    assert counters["stats"]["unique_graphs"] == graphs


def test_a_model_that_does_not_compile_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    from qbe.engine.execution import decode

    def refuse(run: object) -> None:
        raise RuntimeError("no graph\nmore lines")

    monkeypatch.setattr(decode, "compile_step", refuse)
    engine = Engine(tiny_llama(), tokenizer=byte_tokenizer(), device="cpu", policy="uniform", records=False,
                    compile=True)  # fmt: skip
    assert len(engine.generate("text", SamplingParams(max_tokens=4, ignore_eos=True)).token_ids) == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU compiles steps of float16")
def test_who_asks_for_compiled_steps_in_vain_is_told() -> None:
    model, tokenizer = tiny_llama().half(), byte_tokenizer()
    with pytest.warns(RuntimeWarning, match="compile does nothing here, because its decode steps have no fixed shapes"):
        Engine(model, tokenizer=tokenizer, device="cpu", policy="uniform", records=False, compile=True)


def test_without_a_cpp_compiler_the_step_runs_as_it_is(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_compile import Engine, SamplingParams, byte_tokenizer, tiny_llama
engine = Engine(tiny_llama(), tokenizer=byte_tokenizer(), device="cpu", policy="uniform", records=False, compile=True,
                max_sequences=1)
answer = engine.generate("text", SamplingParams(max_tokens=4, ignore_eos=True))
decode = engine.core.runner.decode
print(len(answer.token_ids), len(decode._compiled if decode else []))
"""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": PATH, "PATH": str(tmp_path)}
    done = forked.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "4 0"
    assert "there is no C++ compiler" in done.stderr


def test_a_process_without_a_nested_model_can_use_the_backend() -> None:
    code = "import qbe, torch; print(torch.compile(lambda x: x + 1, backend='qbe')(torch.ones(2)).tolist())"
    env = {**os.environ, "PYTHONPATH": PATH}
    done = forked.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "[2.0, 2.0]"


CACHED = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from torch._dynamo.utils import counters
from test_compile import Block
block, x, number = Block(), torch.ones(1, 128), float(sys.argv[1])
with torch.inference_mode():
    compiled = torch.compile(lambda x: block(x) * number, backend="qbe", fullgraph=True)
    torch.testing.assert_close(compiled(x), block(x) * number, rtol=1e-5, atol=1e-5)
print(counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_a_second_process_finds_the_graph() -> None:
    """In Inductor's own cache, where headers are compiled already: the graph has a number that no other had."""
    env, number = {**os.environ, "PYTHONPATH": PATH}, str(1 + random.SystemRandom().random())

    def run() -> str:
        done = forked.run([sys.executable, "-c", CACHED, number], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "_stable_hash_for_caching" not in done.stderr
        return done.stdout.splitlines()[-1]

    assert run() == "0 0"
    assert run() in ("1 0", "0 1", "1 1")  # in one of the two caches


def test_what_the_cache_knows_a_weight_by() -> None:
    torch.manual_seed(0)
    weight = torch.randn(32, 128)
    one = NestedTensor.from_weight(weight)
    same = NestedTensor.from_weight(weight + 0)
    same.bits = torch.tensor([6], dtype=torch.int32)  # a number that kernels read
    assert one._stable_hash_for_caching() == same._stable_hash_for_caching()
    for other in (
        NestedTensor.from_weight(weight * 1e3),  # another exponent, which is a constant of the graph
        NestedTensor.from_weight(weight, slices=(3, 5)),
        NestedTensor.from_weight(weight, keep_original=False),
        NestedTensor.from_weight(weight.bfloat16()),
        NestedTensor.from_weight(weight[:16]),
    ):
        assert other._stable_hash_for_caching() != one._stable_hash_for_caching()


def test_the_backend_has_its_name() -> None:
    assert "qbe" in torch._dynamo.list_backends(exclude_tags=())
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch_dynamo_backends"]
    module, name = points["qbe"].split(":")
    assert callable(getattr(__import__(module, fromlist=[name]), name))
