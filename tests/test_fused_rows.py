"""Norms and gates that quantise for the linears that read them: the kernels, and what of a graph becomes one."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import silu

from qbe.compile.fuse import FuseRows, fuse
from qbe.kernels.ops import fused as fused_ops
from qbe.kernels.ops import nested_linear as ops
from qbe.kernels.ops.register import OPS
from qbe.kernels.reference.activations import precision_word
from qbe.kernels.triton.linear.tiled.layout import to_device_layout
from test_triton_kernel import CUDA, DEVICE, INTERPRET, Case, on_device, run_in_interpreter

EPS = 1e-5
FUSED = {"norm", "add_norm", "gate", "converted_linears"}


@pytest.mark.skipif(CUDA or INTERPRET, reason="the tests below run here directly")
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.fixture(autouse=True, scope="module")
def _kernels_on_cpu() -> object:
    """In the interpreter the kernels take CPU tensors."""
    library = torch.library.Library("qbe", "IMPL")
    if INTERPRET:
        from qbe.kernels.triton.linear.merged import nested_linears
        from qbe.kernels.triton.linear.nested import nested_linear

        for name in FUSED:
            library.impl(name, OPS[name].cuda, "CPU")
        library.impl("nested_linear", nested_linear, "CPU", allow_override=True)
        library.impl("nested_linears", nested_linears, "CPU", allow_override=True)
    return library


def rms(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As transformers' LlamaRMSNorm."""
    exact = h.to(torch.float32)
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * exact.to(h.dtype)


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within three steps of its dtype: the sum's order and exp's last bit, and that the interpreter cuts off."""
    torch.testing.assert_close(found, expected, rtol=3 * torch.finfo(found.dtype).eps, atol=1e-6)


def bytes_of(x: torch.Tensor, inputs: int, group: int) -> torch.Tensor:
    from qbe.kernels.triton.linear.tiled.launch import quantised

    return quantised(x.reshape(-1, x.shape[-1]).contiguous(), inputs, group)


def same_halves(found: torch.Tensor, x: torch.Tensor, words: list[torch.Tensor], inputs: int, group: int) -> bool:
    """Whether these are the rows for each weight; what fills a part up to 16 bytes is not written."""
    from qbe.kernels.triton.linear.tiled.half import half_bytes
    from qbe.kernels.triton.linear.tiled.launch import half_rows

    rows = x.reshape(-1, x.shape[-1]).contiguous()
    size, used = half_bytes(len(rows), inputs), len(rows) * (2 * inputs + 4)
    both = (t.view(len(words), size)[:, :used] for t in (found, half_rows(rows, words, inputs, group)))
    return torch.equal(*both)


def three_words(m: int) -> list[torch.Tensor]:
    """Of three weights with m rows: 16-bit activations, 8-bit ones, and both in turn."""
    sixteen, eight = precision_word(4, 16), precision_word(6, 8)
    rows = ([sixteen] * m, [eight] * m, [(sixteen, eight)[r % 2] for r in range(m)])
    return [torch.tensor(r, dtype=torch.int32, device=DEVICE) for r in rows]


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("m", "k", "inputs", "group"), [(1, 256, 256, 64), (3, 200, 256, 128), (16, 1100, 1280, 64)])
def test_a_norm_and_its_bytes(m: int, k: int, inputs: int, group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(m)
    x, added, weight = (torch.randn(*s, device=DEVICE).to(dtype) for s in ((1, m, k), (1, m, k), (k,)))
    normed, quantised = fused_ops.norm(x, weight, EPS, inputs, group)
    near(normed, rms(x, weight))
    assert torch.equal(quantised, bytes_of(normed, inputs, group))
    total, normed, quantised = fused_ops.add_norm(x, added, weight, EPS, inputs, group)
    near(total, x + added)
    assert INTERPRET or torch.equal(total, x + added)  # the interpreter cuts where a GPU rounds
    near(normed, rms(total, weight))
    assert torch.equal(quantised, bytes_of(normed, inputs, group))
    for words in (three_words(m), three_words(m)[2:]):
        total, normed, half = fused_ops.add_norm(x, added, weight, EPS, inputs, group, words)
        near(normed, rms(total, weight))
        assert same_halves(half, normed, words, inputs, group)
    normed, half = fused_ops.norm(x, weight, EPS, inputs, group, words)
    assert same_halves(half, normed, words, inputs, group)


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("m", "k", "inputs", "group"), [(1, 256, 256, 64), (3, 200, 256, 128), (16, 1100, 1280, 64)])
def test_a_gate_and_its_bytes(m: int, k: int, inputs: int, group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(m)
    both = 4 * torch.randn(1, m, 2 * k, device=DEVICE).to(dtype)
    gate, up = both[..., :k], both[..., k:]  # the parts of one product
    gated, quantised = fused_ops.gate(gate, up, inputs, group)
    near(gated, silu(gate) * up)
    assert torch.equal(quantised, bytes_of(gated, inputs, group))
    for words in three_words(m):
        again, half = fused_ops.gate(gate, up, inputs, group, [words])
        assert torch.equal(again, gated)
        assert same_halves(half, gated, [words], inputs, group)


@on_device
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30])
def test_what_is_not_finite_stays_in_its_row(value: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 256, device=DEVICE).bfloat16(), torch.ones(256, device=DEVICE).bfloat16()
    before = fused_ops.norm(x, weight, EPS, 256, 64)[0]
    gated = fused_ops.gate(x, x, 256, 64)[0]
    x[1, 7] = value
    others = [0, 2, 3]
    found = fused_ops.norm(x, weight, EPS, 256, 64)[0]
    assert torch.equal(found[others], before[others])
    assert torch.equal(found[1].isnan(), rms(x, weight)[1].isnan())
    half = fused_ops.norm(x, weight, EPS, 256, 64, three_words(4))[1]
    assert same_halves(half, fused_ops.norm(x, weight, EPS, 256, 64)[0], three_words(4), 256, 64)
    found = fused_ops.gate(x, x, 256, 64)[0]
    assert torch.equal(found[others], gated[others])
    assert torch.equal(found[1].isfinite(), (silu(x) * x)[1].isfinite())


class Weight:
    """A linear of a block on the tiled layout."""

    def __init__(self, n: int, k: int, m: int, slices: tuple[int, ...] = (4, 2, 2), bias: bool = False,
                 float32_output: bool = False) -> None:  # fmt: skip
        self.case = Case(m, n, k, slices, bias=bias)
        self.packed = to_device_layout(self.case.packed, self.case.meta, self.case.layout, k, self.case.exponent)
        self.bits, self.float32_output = self.case.mixed(), float32_output

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        c = self.case
        assert self.packed is not None
        return ops.nested_linear(
            x,
            self.packed,
            c.meta,
            self.bits,
            c.original,
            c.bias,
            list(c.layout.slices),
            c.exponent,
            self.float32_output,
        )


class Block:
    """A transformer's block without attention: two norms, the second after a sum, and a gate."""

    def __init__(self, m: int, slices: tuple[int, ...] = (4, 2, 2)) -> None:
        self.q, self.k, self.v = (Weight(n, 192, m, slices) for n in (192, 64, 64))
        self.gate, self.up = Weight(140, 192, m, slices), Weight(140, 192, m, slices)
        self.down = Weight(192, 140, m, slices, bias=True)
        self.first, self.second = (torch.randn(192, device=DEVICE).bfloat16() for _ in range(2))

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed = rms(x, self.first)
        q, k, v = self.q(normed), self.k(normed), self.v(normed)
        h = x + q
        normed = rms(h, self.second)
        return h + self.down(silu(self.gate(normed)) * self.up(normed)), k, v


def traced(run: object, x: torch.Tensor) -> torch.fx.GraphModule:
    """As Inductor sees it: with its decompositions."""
    from torch._inductor.decomposition import decompositions

    with torch.no_grad():
        return make_fx(run, decompositions, tracing_mode="fake", _allow_non_fake_inputs=True)(x)


def called(graph: torch.fx.Graph) -> dict[str, int]:
    names = [str(n.target).split(".")[1] for n in graph.nodes if str(n.target).startswith("qbe.")]
    return {name: names.count(name) for name in names}


@on_device
@pytest.mark.parametrize(("m", "slices"), [(1, (4, 2, 2)), (5, (3, 1, 1, 1, 2)), (16, (8,)), (17, (4, 2, 2))])
def test_a_block_with_what_was_fused(m: int, slices: tuple[int, ...]) -> None:
    torch.manual_seed(m)
    block, x = Block(m, slices), torch.randn(1, m, 192, device=DEVICE).bfloat16()
    graph = traced(block, x)
    FuseRows()(graph.graph)
    fuse(graph.graph, DEVICE)
    graph.graph.lint()
    graph.recompile()
    assert called(graph.graph) == {"norm": 1, "add_norm": 1, "gate": 1, "converted_linears": 3}
    for found, expected in zip(graph(x), block(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03 * float(expected.float().abs().max()))


@on_device
def test_logits_stay_float32() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(1, 3, 192, device=DEVICE).bfloat16(), torch.randn(192, device=DEVICE).bfloat16()
    head, other = Weight(64, 192, 3, float32_output=True), Weight(64, 192, 3)
    graph = traced(lambda x: (head(rms(x, w)), other(rms(x, w))), x)
    FuseRows()(graph.graph)
    fuse(graph.graph, DEVICE)
    graph.graph.lint()
    graph.recompile()
    assert called(graph.graph)["converted_linears"] == 2
    logits, rounded = graph(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, head(rms(x, w)), rtol=0.01, atol=0.02)
    assert not torch.equal(logits, logits.bfloat16().float())
    assert rounded.dtype == torch.bfloat16


class FuseHere(FuseRows):
    """Fuses on this device, and notes what is in the graph then."""

    seen: dict[str, int]

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        fuse(graph, DEVICE)
        self.seen = called(graph)

    def uuid(self) -> None:
        """Nothing of this is cached."""


@on_device
def test_inductor_runs_what_was_fused() -> None:
    """In its own graphs, where weights are inputs and views lie between."""
    torch.manual_seed(0)
    block, x, here = Block(2), torch.randn(1, 2, 192, device=DEVICE).bfloat16(), FuseHere()
    compiled = torch.compile(block.__call__, fullgraph=True, options={"post_grad_custom_pre_pass": here})
    with torch.no_grad():
        for found, expected in zip(compiled(x), block(x), strict=True):
            torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03 * float(expected.float().abs().max()))
    assert here.seen == {"norm": 1, "add_norm": 1, "gate": 1, "converted_linears": 3}


@on_device
def test_what_stays_as_it_is() -> None:
    """Too many rows, float32, a norm or a gate of another form, one that nobody of ours reads, another device."""

    def left(run: object, x: torch.Tensor, device: str = DEVICE) -> bool:
        graph = traced(run, x)
        fuse(graph.graph, device)
        graph.graph.lint()
        return not FUSED & set(called(graph.graph))

    x = torch.randn(1, 3, 192, device=DEVICE).bfloat16()
    w, linear = torch.randn(192, device=DEVICE).bfloat16(), Weight(64, 192, 3)
    assert not left(lambda x: linear(rms(x, w)), x)
    assert not left(lambda x: linear(silu(x) * x), x)
    assert left(lambda x: linear(rms(x, w)), x, "meta")
    assert left(lambda x: rms(x, w), x)
    assert left(lambda x: linear(x), x)
    assert left(lambda x: linear(rms(x, w) + 1), x)
    assert left(lambda x: linear(rms(x, 1 + w.float()).bfloat16()), x)
    assert left(lambda x: linear(rms(x, 1 + w)), x), "a weight that the graph makes"
    assert left(lambda x: linear(torch.nn.functional.layer_norm(x, (192,), w)), x)
    assert left(lambda x: linear(torch.nn.functional.gelu(x) * x), x)
    assert left(lambda x: linear(rms(x.mT, w)), torch.randn(1, 192, 3, device=DEVICE).bfloat16())
    assert left(lambda x: linear((x.float() * torch.rsqrt(x.float().pow(2).mean(-2, True) + EPS)).bfloat16() * w), x)
    assert left(lambda x: linear((x.float() * torch.rsqrt(x.float().pow(3).mean(-1, True) + EPS)).bfloat16() * w), x)
    many = Weight(64, 192, 256)
    assert left(lambda x: many(rms(x, w)), torch.randn(1, 256, 192, device=DEVICE).bfloat16())
    assert left(lambda x: linear(rms(x, w.float())), x.float())
