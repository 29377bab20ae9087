"""Other ways to multiply by the same weights: 16 bits through torch, torch's int4 tinygemm, torchao's int8 and FP8, and
Humming's kernels of 4, 6 and 8 bits, which vLLM 0.33 uses, where they are installed (`pip install humming-kernels`)."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from qbe.bench.measure import Failed, Sample, attempt
from qbe.bench.passes import check, one_pass
from qbe.bench.weights import Weights

Prepared = Callable[[torch.Tensor, int], torch.Tensor]
"""(x [M, K], number of the copy) -> [M, N]."""


@dataclass(frozen=True)
class LinearPeer:
    """One peer.

    Attributes:
        name: as the rows show it.
        against: our precisions that it is set beside.
        prepare: makes its form of dense bfloat16 weights [n, k].
        note: what its rows must say.
        dtype: of the inputs it takes.
    """

    name: str
    against: tuple[int, ...]
    prepare: Callable[[list[torch.Tensor]], Prepared]
    note: str = ""
    dtype: torch.dtype = torch.bfloat16


TINYGEMM_GROUP = HUMMING_GROUP = 128


def _dense(dtype: torch.dtype) -> Callable[[list[torch.Tensor]], Prepared]:
    def prepare(weights: list[torch.Tensor]) -> Prepared:
        converted = [w.to(dtype) for w in weights]
        return lambda x, i: linear(x, converted[i])

    return prepare


def _tinygemm(weights: list[torch.Tensor]) -> Prepared:
    """torch's weight-only int4 product for GPUs: asymmetric, a bfloat16 scale and zero per group of 128."""
    packed = []
    for weight in weights:
        n, k = weight.shape
        grouped = weight.float().view(n, k // TINYGEMM_GROUP, TINYGEMM_GROUP)
        low, high = grouped.amin(2), grouped.amax(2)
        scale = ((high - low) / 15).clamp(min=1e-8)
        codes = ((grouped - low[..., None]) / scale[..., None]).round().clamp(0, 15).to(torch.uint8).view(n, k)
        pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous()
        # The kernel computes (code - 8) * scale + zero.
        scales = torch.stack((scale, low + 8 * scale), dim=2).bfloat16().transpose(0, 1).contiguous()
        packed.append((torch.ops.aten._convert_weight_to_int4pack(pairs, 8), scales))
    return lambda x, i: torch.ops.aten._weight_int4pack_mm(x, packed[i][0], TINYGEMM_GROUP, packed[i][1])


def _torchao(name: str, **options: Any) -> Callable[[list[torch.Tensor]], Prepared]:
    def prepare(weights: list[torch.Tensor]) -> Prepared:
        import torchao.quantization as ao

        if name.startswith("Float8") and torch.cuda.get_device_capability() < (8, 9):
            raise RuntimeError("this GPU has no FP8 tensor cores")
        converted = []
        for weight in weights:
            holder = nn.Sequential(nn.Linear(1, 1, bias=False))
            holder[0].weight = nn.Parameter(weight, requires_grad=False)
            made = {key: getattr(ao, value)() for key, value in options.items()}
            ao.quantize_(holder, getattr(ao, name)(**made))
            converted.append(holder[0].weight.detach())

        # As gpt-fast compiles it; eager, torchao would first write a bfloat16 copy of the weight. Only the int8 product
        # is Inductor's own kernel, worth its minutes of tuning: FP8's is cuBLAS's.
        tuned: dict[str, Any] = {"coordinate_descent_tuning": name.startswith("Int8")}
        compiled = torch.compile(lambda x, w: linear(x, w), dynamic=False, options=tuned)

        def run(x: torch.Tensor, i: int) -> torch.Tensor:
            with torch._dynamo.config.patch(recompile_limit=64), warnings.catch_warnings():  # a compilation per shape
                warnings.simplefilter("ignore")  # torchao's and Inductor's advice to their authors
                return compiled(x, converted[i])

        return run

    return prepare


def _humming(bits: int) -> Callable[[list[torch.Tensor]], Prepared]:
    def prepare(weights: list[torch.Tensor]) -> Prepared:
        from humming.layer import HummingLayer

        layers = []
        for weight in weights:
            n, k = weight.shape
            scheme = {"dtype": f"int{bits}", "group_size": HUMMING_GROUP}
            layer = HummingLayer(shape_n=n, shape_k=k, weight_config=scheme, torch_dtype=weight.dtype)
            layer = layer.to(weight.device)
            layer.load_from_unquantized(weight)
            layer.transform()
            layers.append(layer)
        return lambda x, i: layers[i](x)

    return prepare


CUBLAS = LinearPeer("cuBLAS bf16", (4, 6, 8, 16), _dense(torch.bfloat16))
TINYGEMM = LinearPeer("tinygemm int4", (4,), _tinygemm, f"torch's weight-only int4, group {TINYGEMM_GROUP}")
INT8 = LinearPeer("torchao int8", (8,), _torchao("Int8WeightOnlyConfig"), "weight only, compiled by Inductor")
FP8 = LinearPeer(
    "torchao FP8",
    (8,),
    _torchao("Float8DynamicActivationFloat8WeightConfig", granularity="PerRow"),
    "weights and activations FP8 with a scale per row, compiled by Inductor",
)
HUMMING = tuple(
    LinearPeer(f"Humming int{b}", (b,), _humming(b), f"weight only, group {HUMMING_GROUP}, its own choice of tiles")
    for b in (4, 6, 8)
)
BF16 = LinearPeer("F.linear bf16", (4, 6, 8, 16), _dense(torch.bfloat16))
FP32 = LinearPeer("F.linear fp32", (4, 6, 8, 16), _dense(torch.float32), dtype=torch.float32)


def peers_for(device: torch.device) -> tuple[LinearPeer, ...]:
    if device.type != "cuda":
        return BF16, FP32
    humming = HUMMING if importlib.util.find_spec("humming") is not None else ()
    return (CUBLAS, TINYGEMM, INT8, FP8, *humming)


class PreparedPeers:
    """Every peer's form of the weights, made once and used for every number of rows."""

    def __init__(self, peers: tuple[LinearPeer, ...], weights: Weights) -> None:
        self.peers, self.weights = peers, weights
        self._prepared: dict[str, dict[str, Prepared] | Failed] = {}
        for peer in peers:
            try:
                self._prepared[peer.name] = {n: peer.prepare(w) for n, w in weights.dense.items()}
            except Exception as error:
                self._prepared[peer.name] = Failed.because(error)

    def samples(self, x: dict[int, torch.Tensor]) -> dict[str, Sample | Failed]:
        """A pass of every peer over inputs x[k] (bfloat16 [M, k]), or why there is none."""
        return {peer.name: self._sample(peer, x) for peer in self.peers}

    def _sample(self, peer: LinearPeer, x: dict[int, torch.Tensor]) -> Sample | Failed:
        prepared = self._prepared[peer.name]
        return prepared if isinstance(prepared, Failed) else attempt(lambda: self._pass(peer, prepared, x))

    def _pass(self, peer: LinearPeer, prepared: dict[str, Prepared], x: dict[int, torch.Tensor]) -> Sample:
        token, inputs = self.weights.token, {k: v.to(peer.dtype) for k, v in x.items()}
        with torch.inference_mode():
            for part in token.all_parts:
                check(prepared[part.name](inputs[part.k], 0), linear(x[part.k], self.weights.dense[part.name][0]))
        return one_pass(token, lambda p, i: prepared[p.name](inputs[p.k], i), self.weights.device)
