"""`qbe::nested_linears` on the CPU: one job of the compiled kernel for all weights of a call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from qbe.kernels.cpu import build, dispatch
from qbe.kernels.cpu.geometry import ROW_DTYPES, geometry
from qbe.kernels.cpu.linear.nested import check, nested_linear, readable, readable_bias

_threads = torch.get_num_threads


class _Matrix(ctypes.Structure):
    """`Matrix` of nested.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "meta", "bits", "original", "bias", "y", "shape")),
        ("y_stride", ctypes.c_int64),
        ("bias_dtype", ctypes.c_int32),
        ("y_dtype", ctypes.c_int32),
    )


def nested_linears(
    x: torch.Tensor,
    packed: Sequence[torch.Tensor],
    meta: Sequence[torch.Tensor],
    bits: Sequence[torch.Tensor],
    originals: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    slices: Sequence[int],
    exponents: Sequence[int],
    batch_invariant: bool = True,
) -> torch.Tensor:
    """Arguments and result as those of `qbe.kernels.ops.merged_linear.nested_linears`.

    Each part of the result is, bit for bit, that of `qbe.kernels.cpu.linear.nested`.

    Raises:
        RuntimeError: shapes or dtypes that do not belong together, or a row at 16 bits without an original; before
            anything is computed.
        QBEError: $QBE_CPU_KERNEL asks for a path that this machine lacks.
    """
    k, dtype = x.shape[-1], x.dtype
    rows = x.reshape(-1, k).contiguous()
    count = rows.shape[0]
    if count == 0 or not all(dispatch.few_enough(b, dtype) for b in bits):
        return _one_by_one(x, packed, meta, bits, originals, biases, slices, exponents, batch_invariant)
    if not len(packed) == len(meta) == len(bits) == len(exponents) or any(
        len(some) not in (0, len(packed)) for some in (originals, biases)
    ):
        raise RuntimeError("give as many meta, bits and exponents as packed, and as many originals and biases or none")
    widths = tuple(slices)
    forms = [geometry(p.shape, m.shape, k, widths, e) for p, m, e in zip(packed, meta, exponents, strict=True)]
    y = torch.empty(count, sum(f.n for f in forms), dtype=dtype)
    matrices = (_Matrix * len(forms))()
    kept = []  # C reads from these
    column = 0
    for i, form in enumerate(forms):
        bias, original = biases[i] if biases else None, originals[i] if originals else None
        check(rows, packed[i], meta[i], bits[i], original, bias, form)
        matrix_bits = bits[i].contiguous()
        if bias is not None:
            bias = readable_bias(bias, rows)
        kept.append((matrix_bits, bias))
        matrices[i] = _Matrix(
            packed[i].data_ptr(), meta[i].data_ptr(), matrix_bits.data_ptr(),
            original.data_ptr() if original is not None and readable(original, rows) else None,
            None if bias is None else bias.data_ptr(), y.data_ptr() + column * y.element_size(), form.address,
            y.shape[1], 0 if bias is None else ROW_DTYPES[bias.dtype], ROW_DTYPES[dtype],
        )  # fmt: skip
        column += form.n
    failed = build.loaded().qbe_multiply_many(
        rows.data_ptr(), ctypes.addressof(matrices), len(forms), count, ROW_DTYPES[dtype], batch_invariant, _threads(),
        build.number(),
    )  # fmt: skip
    if failed == -1:  # rows at 16 bits that the compiled kernel cannot read, or nobody: this says which
        return _one_by_one(x, packed, meta, bits, originals, biases, slices, exponents, batch_invariant)
    if failed:
        raise MemoryError("the CPU kernel found no memory for its working buffers")
    return y.view(*x.shape[:-1], -1)


def _one_by_one(
    x: torch.Tensor,
    packed: Sequence[torch.Tensor],
    meta: Sequence[torch.Tensor],
    bits: Sequence[torch.Tensor],
    originals: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    slices: Sequence[int],
    exponents: Sequence[int],
    batch_invariant: bool,
) -> torch.Tensor:
    """A call for each weight: what the op means."""
    parts = [
        nested_linear(
            x,
            p,
            m,
            b,
            originals[i] if originals else None,
            biases[i] if biases else None,
            slices,
            exponents[i],
            batch_invariant=batch_invariant,
        )
        for i, (p, m, b) in enumerate(zip(packed, meta, bits, strict=True))
    ]
    return torch.cat(parts, dim=-1)
