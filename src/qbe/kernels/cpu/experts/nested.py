"""`qbe::nested_experts` on the CPU: one call of the compiled kernel for all experts of a layer.

An expert with so many rows that torch's product wins there (`dispatch.many_rows`) is multiplied by itself, as two
linear layers (`qbe.kernels.cpu.linear.nested`). So are all of them without a compiled kernel, and where a row asks for
an original that it cannot read (float16, or another dtype than x's).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from qbe.kernels.cpu import build, dispatch
from qbe.kernels.cpu.geometry import ROW_DTYPES, geometry
from qbe.kernels.cpu.linear.nested import nested_linear, readable, readable_bias
from qbe.kernels.ops.experts.arguments import check_experts
from qbe.kernels.ops.experts.nested import ACTIVATIONS, ExpertMatrices
from qbe.kernels.reference.activations import weight_bits, word_of_byte
from qbe.kernels.reference.experts.nested import gated
from qbe.kernels.reference.experts.nested import nested_experts as reference
from qbe.sites import FULL_BITS

PAIRS = 8192  # of a token and an expert at once: bounds the temporaries of a prompt

_ANY_EXPONENT = 127  # each expert has its own

_threads = torch.get_num_threads


class _Matrices(ctypes.Structure):
    """`Matrices` of experts.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "meta", "precision", "exponents")),
        *((name, ctypes.c_void_p) for name in ("original", "bias", "shape")),
        *((name, ctypes.c_int64) for name in ("packed_bytes", "meta_bytes", "precision_row", "bias_dtype")),
    )


class _Call(ctypes.Structure):
    """`Call` of experts.c, its gate at the end."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "ids", "weights", "rows", "skip", "each", "out")),
        ("gate_up", _Matrices),
        ("down", _Matrices),
        *((name, ctypes.c_int64) for name in ("tokens", "top", "experts", "plan_rows", "dtype")),
        ("activation", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
    )


def nested_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    rows: torch.Tensor,
    gate_up_packed: torch.Tensor,
    gate_up_meta: torch.Tensor,
    gate_up_exponents: torch.Tensor,
    gate_up_precision: torch.Tensor,
    gate_up_original: torch.Tensor | None,
    gate_up_bias: torch.Tensor | None,
    gate_up_addresses: torch.Tensor | None,
    down_packed: torch.Tensor,
    down_meta: torch.Tensor,
    down_exponents: torch.Tensor,
    down_precision: torch.Tensor,
    down_original: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    down_addresses: torch.Tensor | None,
    slices: Sequence[int],
    activation: str,
    interleaved: bool,
    alpha: float,
    limit: float,
    page_bytes: int,
) -> torch.Tensor:
    """Arguments and result as those of `qbe.kernels.ops.experts.nested`, its matrices one by one.

    A row's result does not depend, bit for bit, on the rows beside it as long as each expert has fewer than
    `dispatch.many_rows` of them (AVX-512: any number, fewer than `many_full` of those at 16 bits).

    Raises:
        RuntimeError: shapes or dtypes that do not belong together, a row that lies outside of the plan, or one at 16
            bits without an original.
        QBEError: $QBE_CPU_KERNEL asks for a path that this machine lacks.
    """
    gate_up = ExpertMatrices(
        gate_up_packed, gate_up_meta, gate_up_exponents, gate_up_precision, gate_up_original, gate_up_bias,
        gate_up_addresses,
    )  # fmt: skip
    down = ExpertMatrices(
        down_packed, down_meta, down_exponents, down_precision, down_original, down_bias, down_addresses
    )
    check_experts(x, topk_ids, topk_weights, rows, gate_up, down)
    if gate_up.addresses is not None or down.addresses is not None:  # main memory keeps its codes in one place
        gate = (activation, interleaved, alpha, limit)
        return reference(x, topk_ids, topk_weights, rows, gate_up, down, slices, *gate, page_bytes)
    layer = _Layer(gate_up, down, tuple(slices), (activation, interleaved, alpha, limit))
    out = torch.empty(x.shape, dtype=x.dtype)
    if out.numel() == 0 or topk_ids.shape[1] == 0:
        return out.zero_()
    x, topk_ids = x.contiguous(), topk_ids.to(torch.int64).contiguous()
    topk_weights, rows = topk_weights.float().contiguous(), rows.contiguous()
    tokens, step = x.shape[0], max(1, PAIRS // topk_ids.shape[1])
    if tokens <= step:
        layer.run(x, topk_ids, topk_weights, rows, out)
        return out
    for t in range(0, tokens, step):
        part = slice(t, t + step)
        layer.run(x[part], topk_ids[part], topk_weights[part], rows[part], out[part])
    return out


class _Layer:
    """The experts of one call.

    Args:
        gate: activation, interleaved, alpha and limit, as the op has them.
    """

    def __init__(
        self,
        gate_up: ExpertMatrices,
        down: ExpertMatrices,
        slices: tuple[int, ...],
        gate: tuple[str, bool, float, float],
    ) -> None:
        self.gate_up, self.down, self.slices, self.gate = gate_up, down, slices, gate
        self.experts = gate_up.packed.shape[0]
        self.hidden, self.inner = down.meta.shape[2], gate_up.meta.shape[2] // 2

    def run(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        rows: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Writes what some tokens get to `out`."""
        dtype = x.dtype
        if build.backend() == "torch" or not dispatch.multiplies(dtype):
            out.copy_(self._one_by_one(x, topk_ids, topk_weights, rows))
            return
        ids = topk_ids.flatten()
        alone = self._multiplied_alone(topk_ids, rows, dtype)
        each = torch.empty(ids.shape[0], self.hidden)
        call, kept = self._call(x, topk_ids, topk_weights, rows, each, out, alone)
        failed = build.loaded().qbe_experts(ctypes.addressof(call), _threads(), build.number())
        if failed == -3:
            raise self._outside_of_the_plan()
        if failed == -1:  # rows at 16 bits that the compiled kernel cannot read, or nobody: this says which
            out.copy_(self._one_by_one(x, topk_ids, topk_weights, rows))
            return
        if not failed and alone is not None:
            order = ids.argsort(stable=True)[int((ids < 0).sum()) :]  # as C counts pairs: nobody's have no place
            for expert in alone.nonzero().flatten().tolist():
                at = (ids[order] == expert).nonzero().flatten()
                each[at] = self._expert(x, expert, order[at] // topk_ids.shape[1], rows)
        failed = failed or build.loaded().qbe_sum_experts(ctypes.addressof(call), _threads(), build.number())
        if failed:
            raise MemoryError("the CPU kernel found no memory for its working buffers")
        del kept

    def _multiplied_alone(self, topk_ids: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """uint8 [experts], those with so many rows that they are multiplied by themselves; None if there are none."""
        most, most_full = dispatch.many_rows(dtype), dispatch.many_full(dtype)
        if topk_ids.numel() < min(most, most_full):
            return None
        ids = topk_ids.flatten()
        chosen = (ids >= 0) & (ids < self.experts)
        many = ids[chosen].bincount(minlength=self.experts) >= most
        of_pair = rows.long().repeat_interleave(topk_ids.shape[1])[chosen]
        for one in (self.gate_up, self.down):
            if one.original is not None:
                full = weight_bits(word_of_byte(one.precision[of_pair, ids[chosen]])) >= FULL_BITS
                many |= ids[chosen][full].bincount(minlength=self.experts) >= most_full
        return many.to(torch.uint8) if many.any() else None

    def _call(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        rows: torch.Tensor,
        each: torch.Tensor,
        out: torch.Tensor,
        alone: torch.Tensor | None,
    ) -> tuple[_Call, object]:
        """What C is told, and what it reads from."""
        gate_up, kept = _matrices(self.gate_up, self.hidden, self.slices, x)
        down, also = _matrices(self.down, self.inner, self.slices, x)
        activation, interleaved, alpha, limit = self.gate
        call = _Call(
            x.data_ptr(), topk_ids.data_ptr(), topk_weights.data_ptr(), rows.data_ptr(),
            None if alone is None else alone.data_ptr(), each.data_ptr(), out.data_ptr(), gate_up, down,
            x.shape[0], topk_ids.shape[1], self.experts, self.gate_up.precision.shape[0], ROW_DTYPES[x.dtype],
            ACTIVATIONS.index(activation), interleaved, alpha, limit,
        )  # fmt: skip
        return call, (kept, also)

    def _expert(self, x: torch.Tensor, expert: int, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """What one expert gives for some tokens, float32."""
        own = x[tokens]
        both = self._linear(own, self.gate_up, expert, rows[tokens])
        return self._linear(gated(both, *self.gate).to(x.dtype), self.down, expert, rows[tokens])

    def _linear(self, x: torch.Tensor, one: ExpertMatrices, expert: int, rows: torch.Tensor) -> torch.Tensor:
        words = word_of_byte(one.precision[rows.long(), expert])
        return nested_linear(
            x, one.packed[expert], one.meta[expert], words, None if one.original is None else one.original[expert],
            None if one.bias is None else one.bias[expert], self.slices, int(one.exponents[expert]), True,
        )  # fmt: skip

    def _one_by_one(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Every expert by itself: what the op means."""
        if int(rows.min()) < 0 or int(rows.max()) >= len(self.gate_up.precision):
            raise self._outside_of_the_plan()
        each = x.new_zeros(*topk_ids.shape, x.shape[1], dtype=torch.float32)
        for expert in topk_ids.unique().tolist():
            if 0 <= expert < self.experts:
                tokens, slots = (topk_ids == expert).nonzero(as_tuple=True)
                each[tokens, slots] = self._expert(x, expert, tokens, rows).float()
        total = torch.zeros_like(each[:, 0])
        for slot in range(topk_ids.shape[1]):
            total += topk_weights[:, slot, None] * each[:, slot]
        return total.to(x.dtype)

    def _outside_of_the_plan(self) -> RuntimeError:
        return RuntimeError(f"a token's row is not among the {len(self.gate_up.precision)} of the plan")


def _matrices(
    one: ExpertMatrices, inputs: int, slices: tuple[int, ...], x: torch.Tensor
) -> tuple[_Matrices, torch.Tensor | None]:
    """What C is told of one matrix of every expert, and a tensor that it reads from."""
    form = geometry(one.packed.shape[1:], one.meta.shape[1:], inputs, slices, _ANY_EXPONENT)
    bias, experts = None if one.bias is None else readable_bias(one.bias, x), one.packed.shape[0]
    found = _Matrices(
        one.packed.data_ptr(), one.meta.data_ptr(), one.precision.data_ptr(), one.exponents.data_ptr(),
        one.original.data_ptr() if one.original is not None and readable(one.original, x) else None,
        None if bias is None else bias.data_ptr(), form.address, one.packed.numel() // experts,
        one.meta.numel() // experts, one.precision.stride(0), 0 if bias is None else ROW_DTYPES[bias.dtype],
    )  # fmt: skip
    return found, bias
