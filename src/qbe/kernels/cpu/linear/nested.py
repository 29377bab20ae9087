"""`qbe::nested_linear` on the CPU.

The compiled kernel multiplies straight from the packed slices, or from the 16-bit original, and each row reads only its
own. Many rows (prefill): those at 16 bits go to torch; without AVX-512 VNNI so do the others, by a weight that is
dequantised once per precision in the call.

A decode step makes some two hundred calls, so whatever depends on shapes alone is checked and laid out once
(`geometry`), and a call with few rows hands C seven pointers and a table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch.nn.functional import linear

from qbe.kernels.cpu import build, dispatch
from qbe.kernels.cpu.geometry import DTYPES, ROW_DTYPES, Geometry, geometry
from qbe.kernels.reference.activations import eight_bits, has_eight, weight_bits
from qbe.kernels.reference.nested_linear import dequantise
from qbe.sites import FULL_BITS

CHUNK = 1 << 22  # weights dequantised at once in prefill: bounds the temporary, keeps it near the caches

_threads = torch.get_num_threads


def nested_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    meta: torch.Tensor,
    bits: torch.Tensor,
    original: torch.Tensor | None,
    bias: torch.Tensor | None,
    slices: Sequence[int],
    exponent: int,
    float32_output: bool = False,
    batch_invariant: bool = True,
) -> torch.Tensor:
    """y[r] = x[r] @ W(bits[r]).T + bias. Arguments and result as those of `qbe.kernels.ops.nested_linear`.

    The compiled kernel's result for a row does not depend, bit for bit, on the rows beside it. It serves fewer than
    `dispatch.MANY_ROWS` rows (AVX-512: of those at 16 bits; any number of others, and of `float32_output` ones) and
    multiplies the exact weight with x, which AVX-512 reads as 16-bit fixed point with a scale for each group, in
    float32, too; sums are float32. With AMX 96 rows of bfloat16 at one precision (40 without `batch_invariant`) are
    multiplied in tiles of it, with the weight rounded to bfloat16. Elsewhere with more rows the weight is first rounded
    to x's dtype (bfloat16 or float32), as a checkpoint's is, and rows at 16 bits are exactly those of the unquantised
    layer.

    Raises:
        RuntimeError: shapes or dtypes that do not belong together, or a row at 16 bits without an original; before
            anything is computed.
        QBEError: $QBE_CPU_KERNEL asks for a path that this machine lacks.
    """
    shape, dtype = x.shape, x.dtype
    float32_output = float32_output and dtype is not torch.float32
    if not dispatch.multiplies(dtype):
        y = nested_linear(x.float(), packed, meta, bits, original, bias, slices, exponent)
        return y if float32_output else y.to(dtype)
    form = geometry(packed.shape, meta.shape, shape[-1], tuple(slices), exponent)
    rows = x if len(shape) == 2 else x.reshape(-1, form.k)
    check(rows, packed, meta, bits, original, bias, form)
    if rows.shape[0] == 0 or form.n == 0:
        y = x.new_empty(rows.shape[0], form.n, dtype=torch.float32 if float32_output else None)
    elif dispatch.few_enough(bits, dtype) or (float32_output and dispatch.any_rows_in_float32()):
        y = _few(rows, packed, meta, bits, original, bias, form, float32_output, batch_invariant)
    elif float32_output:  # torch rounds what it multiplies in bfloat16
        y = nested_linear(rows.float(), packed, meta, bits, original, bias, slices, exponent)
    else:
        y = _many(rows, packed, meta, bits, original, bias, form, batch_invariant)
    return y if len(shape) == 2 else y.view(*shape[:-1], form.n)


def check(
    rows: torch.Tensor,
    packed: torch.Tensor,
    meta: torch.Tensor,
    bits: torch.Tensor,
    original: torch.Tensor | None,
    bias: torch.Tensor | None,
    form: Geometry,
) -> None:
    """With `geometry`, everything that C will touch: it trusts its pointers."""
    if packed.dtype is not torch.uint8 or meta.dtype is not torch.uint8:
        raise RuntimeError(f"packed and meta must be uint8, not {packed.dtype} and {meta.dtype}")
    if not (packed.is_contiguous() and meta.is_contiguous()):
        raise RuntimeError("packed and meta must be contiguous")
    if bits.dtype is not torch.int32 or bits.shape != rows.shape[:1]:
        raise RuntimeError(
            f"bits must be int32 [{rows.shape[0]}], one per row of x, not {bits.dtype} {list(bits.shape)}"
        )
    if original is not None and original.shape != (form.n, form.k):
        raise RuntimeError(
            f"the 16-bit original is {list(original.shape)}, but x has {form.k} inputs a row and the nested weight "
            f"{form.n} outputs"
        )
    if bias is not None and bias.shape != (form.n,):
        raise RuntimeError(f"the bias is {list(bias.shape)}, but the weight has {form.n} outputs")


def _few(
    rows: torch.Tensor,
    packed: torch.Tensor,
    meta: torch.Tensor,
    bits: torch.Tensor,
    original: torch.Tensor | None,
    bias: torch.Tensor | None,
    form: Geometry,
    float32_output: bool = False,
    batch_invariant: bool = True,
) -> torch.Tensor:
    """The compiled kernel; rows at 16 bits go to torch where the original has another dtype than x."""
    rows, bits = rows.contiguous(), bits.contiguous()
    y = torch.empty(rows.shape[0], form.n, dtype=torch.float32 if float32_output else rows.dtype)
    kernel_bias = None if bias is None else readable_bias(bias, rows)
    failed = build.loaded().qbe_multiply(
        rows.data_ptr(),
        packed.data_ptr(),
        meta.data_ptr(),
        bits.data_ptr(),
        original.data_ptr() if original is not None and readable(original, rows) else None,
        None if kernel_bias is None else kernel_bias.data_ptr(),
        y.data_ptr(),
        form.address,
        rows.shape[0],
        ROW_DTYPES[rows.dtype],
        ROW_DTYPES[y.dtype],
        0 if kernel_bias is None else ROW_DTYPES[kernel_bias.dtype],
        batch_invariant,
        _threads(),
        build.number(),
    )
    if failed == 0:
        return y
    if failed != -1:
        raise MemoryError("the CPU kernel found no memory for its working buffers")
    if original is None:
        raise missing_original()
    full = weight_bits(bits) >= FULL_BITS
    exact = rounded(rows[full], bits[full], form)
    y[full] = full_rows(exact.float() if float32_output else exact, original, bias)
    if not full.all():
        y[~full] = _few(rows[~full], packed, meta, bits[~full], None, bias, form, float32_output, batch_invariant)
    return y


def readable(original: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether the compiled kernel can multiply these rows with the original."""
    return original.dtype is rows.dtype and rows.dtype in DTYPES and original.is_contiguous()


def readable_bias(bias: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The bias as the compiled kernel can add it to products of these rows: float16 to those of float16 alone."""
    return (bias if bias.dtype in DTYPES or bias.dtype is rows.dtype else bias.float()).contiguous()


def rounded(rows: torch.Tensor, bits: torch.Tensor, form: Geometry) -> torch.Tensor:
    """The rows with those of 8-bit activations rounded to them, then to x's dtype."""
    eight = has_eight(bits)
    if not eight.any():
        return rows
    if build.backend() == "torch":
        rounded_rows = eight_bits(rows, form.group).to(rows.dtype)
    else:
        rows = rows.contiguous()
        rounded_rows = torch.empty_like(rows)
        dtype = ROW_DTYPES[rows.dtype]
        failed = build.loaded().qbe_round_rows(
            rows.data_ptr(), rounded_rows.data_ptr(), form.address, len(rows), dtype, _threads(), build.number()
        )
        if failed:
            raise MemoryError("the CPU kernel found no memory for its working buffers")
    return rounded_rows if eight.all() else torch.where(eight[:, None], rounded_rows, rows)


def _many(
    rows: torch.Tensor,
    packed: torch.Tensor,
    meta: torch.Tensor,
    bits: torch.Tensor,
    original: torch.Tensor | None,
    bias: torch.Tensor | None,
    form: Geometry,
    batch_invariant: bool,
) -> torch.Tensor:
    """Precision by precision: rows that do not pay for torch's product take the compiled kernel together."""
    layout, precision_words = form.layout, weight_bits(bits)
    # A prompt's rows are nearly always alike, and a step asks some two hundred times.
    alike = bool((precision_words == precision_words[0]).all())
    values, counts = (
        (precision_words[:1], torch.tensor([len(precision_words)]))
        if alike
        else precision_words.unique(return_counts=True)
    )
    count = Counter[int]()
    asked: dict[int, list[int]] = {}  # precision -> the words that ask for it
    for value, rows_of in zip(values.tolist(), counts.tolist(), strict=True):
        precision = FULL_BITS if value >= FULL_BITS else layout.precisions[layout.index(value)]
        count[precision] += rows_of
        asked.setdefault(precision, []).append(value)
    if FULL_BITS in count and original is None:
        raise missing_original()
    limit = dispatch.many_rows(rows.dtype)
    few = {b for b in count if b != FULL_BITS and count[b] < limit}

    y = torch.empty(rows.shape[0], form.n, dtype=rows.dtype)
    for group in [{b} for b in sorted(count) if b not in few] + ([few] if few else []):
        if len(group) == len(count):
            indices, group_rows, group_bits = None, rows, bits
        else:
            indices = (
                torch.isin(precision_words, torch.tensor([v for b in group for v in asked[b]])).nonzero().squeeze(-1)
            )
            group_rows, group_bits = rows[indices], bits[indices]
        if group is few:
            part = _few(group_rows, packed, meta, group_bits, None, bias, form, batch_invariant=batch_invariant)
        elif FULL_BITS in group:
            assert original is not None
            exact = rounded(group_rows, group_bits, form)
            if exact.dtype is torch.float16:
                exact = exact.float()  # sums are float32
            part = full_rows(exact, original, bias).to(rows.dtype)
        else:
            part = _dequantised(rounded(group_rows, group_bits, form), packed, meta, min(group), bias, form)
        if indices is None:
            return part
        y[indices] = part
    return y


def _dequantised(
    rows: torch.Tensor, packed: torch.Tensor, meta: torch.Tensor, bits: int, bias: torch.Tensor | None, form: Geometry
) -> torch.Tensor:
    """rows @ W(bits).T + bias through a dequantised weight, some rows of the weight at a time."""
    if build.backend() == "torch":
        weight = dequantise(packed, meta, form.exponent, form.slices, form.k, bits)
        return linear(rows.float(), weight, None if bias is None else bias.float()).to(rows.dtype)
    rows = rows.contiguous()  # torch's tiles read a little past the rows of a view
    bias = None if bias is None else bias.to(rows.dtype)
    step = max(64, CHUNK // form.k)
    weight = torch.empty(min(step, form.n), form.k, dtype=rows.dtype)
    y = torch.empty(rows.shape[0], form.n, dtype=rows.dtype)
    for n0 in range(0, form.n, step):
        n1 = min(form.n, n0 + step)
        _write_out(packed, meta, bits, form, n0, n1, weight)
        part = linear(rows, weight[: n1 - n0], None if bias is None else bias[n0:n1])
        if n1 - n0 == form.n:
            return part
        y[:, n0:n1] = part
    return y


def dequantised(
    packed: torch.Tensor, meta: torch.Tensor, bits: int, slices: Sequence[int], exponent: int, inputs: int,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """The whole weight [N, inputs] at these bits, below 16, in `dtype`, where `dispatch.dequantises` says so."""
    form = geometry(packed.shape, meta.shape, inputs, tuple(slices), exponent)
    weight = torch.empty(form.n, form.k, dtype=dtype)
    _write_out(packed, meta, bits, form, 0, form.n, weight)
    return weight


def _write_out(
    packed: torch.Tensor, meta: torch.Tensor, bits: int, form: Geometry, n0: int, n1: int, weight: torch.Tensor
) -> None:
    """The rows [n0, n1) of a weight at these bits, to the beginning of `weight`, in its dtype."""
    failed = build.loaded().qbe_dequantise(
        packed.data_ptr(),
        meta.data_ptr(),
        weight.data_ptr(),
        form.address,
        n0,
        n1,
        form.layout.precisions.index(bits),
        ROW_DTYPES[weight.dtype],
        _threads(),
        build.number(),
    )
    if failed:
        raise MemoryError("the CPU kernel found no memory for its working buffers")


def full_rows(rows: torch.Tensor, original: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """rows @ original.T + bias, exactly as the unquantised layer computes it when x has the model's dtype."""
    dtype = torch.promote_types(rows.dtype, original.dtype)
    return linear(rows.to(dtype), original.to(dtype), None if bias is None else bias.to(dtype)).to(rows.dtype)


def missing_original() -> RuntimeError:
    return RuntimeError("a row asks for 16 bits, but this weight was stored without its 16-bit original")
