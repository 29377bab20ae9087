"""Device code of `qbe::nested_linear`: one launch serves every precision and every mixture of precisions.

A program makes a tile y[BLOCK_N outputs, BLOCK_M rows]. It reads the bits of its rows from device memory, loads only
the slices that the most precise of them needs, and for each precision present multiplies the codes cut at that
precision with the rows that asked for it, the other rows set to zero. A row therefore gets the same sums, bit for
bit, whatever the other rows of the batch ask for.

W is the left operand, so that a few rows of a decoding batch are the narrow side of the matrix product.
- Few rows (decode): the integer codes go to the tensor cores as they are (exact in 16-bit floats), scale and offset
  are applied to each group's sum: y += s * (codes @ x - o * sum(x)). Weights cost a few bit operations each.
- Many rows (prefill): the weight is dequantised to x's dtype in registers, so all rows share the work per weight.

A row of four packed bytes is handled as one int32: shifts and masks then cut four codes at a time.
"""

# Triton's language is not Python's: its arguments carry no types, and a branch on a constant must stand alone.
# mypy: disable-error-code="no-untyped-def, assignment, operator"
# ruff: noqa: SIM102, SIM300

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_code_words(packed_ptr, n_long, N, blocks, block, col, wanted, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """The words of a part that hold the inputs of words `col` of 32 inputs, 8 to a block: int32 [BLOCK_N, len(col)].

    A block has 2*WIDTH words; narrower parts than 4 bits hand the same word to several columns, which the memory
    system serves as one access.
    """
    row = packed_ptr + FIRST * (tl.cast(N, tl.int64) * blocks * 2) + n_long * (blocks * 2 * WIDTH)
    offset = (block + col // 8) * (2 * WIDTH) + col % 8 % (2 * WIDTH)
    mask = wanted[:, None] & (block + col // 8 < blocks)[None, :]
    return tl.load(row[:, None] + offset[None, :], mask=mask, other=0)


@triton.jit
def _unpack_code_words(code_words, col, code0, code1, WIDTH: tl.constexpr):
    """Appends a part's bits to the codes of a block's first and second 32 inputs, four codes to an int32.

    Field j of byte u belongs to input 8*WIDTH*j + u (`qbe.format.layout`); col is the word's place in its 32 inputs.
    """
    FIELD: tl.constexpr = ((1 << WIDTH) - 1) * 0x01010101
    shift = (col // (2 * WIDTH)) * WIDTH
    code0 = (code0 << WIDTH) | ((code_words >> shift[None, :]) & FIELD)
    code1 = (code1 << WIDTH) | ((code_words >> (shift + 4)[None, :]) & FIELD)
    return code0, code1


@triton.jit
def _spread(code0, code1, DTYPE: tl.constexpr, AS_BITS: tl.constexpr):
    """Int32 words of four codes [R, C] each -> one float per code [R, 8C], ordered as `_input_order` says.

    AS_BITS puts the code into the mantissa of a 16-bit float without converting it: in float16 the code is the
    subnormal code * 2**-24, in bfloat16 (codes below 128) it is 128 + code.
    """
    both = tl.join(code0, code1)
    if AS_BITS:
        BASE: tl.constexpr = 0x43004300 if DTYPE == tl.bfloat16 else 0
        even = (both & 0x00FF00FF) | BASE
        odd = ((both >> 8) & 0x00FF00FF) | BASE
        even = tl.join(even.to(tl.int16), (even >> 16).to(tl.int16))
        odd = tl.join(odd.to(tl.int16), (odd >> 16).to(tl.int16))
        out = tl.join(even, odd).to(DTYPE, bitcast=True)
    else:
        even = tl.join(both & 255, (both >> 16) & 255)
        odd = tl.join((both >> 8) & 255, (both >> 24) & 255)
        out = tl.join(even, odd).to(tl.float32).to(DTYPE)
    return tl.reshape(out, (code0.shape[0], 8 * code0.shape[1]))


@triton.jit
def _input_order(i):
    """The input of a block-aligned run that stands at place i of what `_spread` returns."""
    return i // 64 * 64 + (i // 4 % 2) * 32 + (i % 64 // 8) * 4 + i % 4


@triton.jit
def _scale_offset(scale, zero, ratio, offset, exponent, SHIFT: tl.constexpr):
    """Decodes the uint8 meta of a precision SHIFT bits below the widest, as `qbe.format.scales.decode` does."""
    s = ((scale.to(tl.int32) << 19) + (exponent << 23)).to(tl.float32, bitcast=True)
    o = zero.to(tl.float32)
    if SHIFT > 0:
        STEP: tl.constexpr = 1 << SHIFT
        s = s * STEP * (1 + ratio.to(tl.int8, bitcast=True).to(tl.float32) / 256)
        o = (o - (STEP - 1) / 2) / STEP + offset.to(tl.int8, bitcast=True).to(tl.float32) / 64
    return s, o


@triton.jit
def _multiply(acc, code0, code1, s, o, x, BITS: tl.constexpr, DEQUANTISE: tl.constexpr):
    """acc + W @ x for one step of inputs: codes int32 [R, C] twice, s and o float32 [R], x [8C, BLOCK_M]."""
    DTYPE: tl.constexpr = x.dtype
    if DEQUANTISE:
        w = (_spread(code0, code1, tl.float32, False) - o[:, None]) * s[:, None]
        acc = tl.dot(w.to(DTYPE), x, acc, input_precision="ieee")
    else:
        AS_BITS: tl.constexpr = DTYPE == tl.float16 or (DTYPE == tl.bfloat16 and BITS < 8)
        w = _spread(code0, code1, DTYPE, AS_BITS)
        # sum(x) as a product with ones: it comes out in the layout of the other product and needs no reduction.
        ones = tl.full((w.shape[0], w.shape[1]), 1.0, tl.float32).to(DTYPE)
        product = tl.dot(w, x, input_precision="ieee")
        total = tl.dot(ones, x, input_precision="ieee")
        if AS_BITS and DTYPE == tl.float16:
            product *= 16777216.0  # the codes came as code * 2**-24
        elif AS_BITS:
            o += 128.0  # the codes came as 128 + code
        acc += s[:, None] * (product - o[:, None] * total)
    return acc


@triton.jit(do_not_specialize=["M", "exponent"], do_not_specialize_on_alignment=["bits_ptr"])
def nested_linear_kernel(
    x_ptr,  # [M, K]
    packed_ptr,  # int32 view of the packed buffer
    meta_ptr,  # uint8 [2P, N, G]
    bits_ptr,  # int32 [M], words of precision; the rows of 8-bit activations are rounded before
    original_ptr,  # [N, K] or None
    bias_ptr,  # [N] or None
    y_ptr,  # [M, N], or float32 [SPLITS, M, N]
    M,
    N,
    K,
    blocks,  # 64-input blocks of a row of codes
    exponent,
    PRECISIONS: tl.constexpr,  # ascending
    PARTS: tl.constexpr,  # (first bit, width, index of the lowest precision that needs it, whether it completes it)
    GROUP_BLOCKS: tl.constexpr,  # 64-input blocks per group
    STEP_BLOCKS: tl.constexpr,  # 64-input blocks per loop step; they lie in one group
    DEQUANTISE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,  # blocks that one program sums; a constant, like the tile sizes, chosen by the shape
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    P: tl.constexpr = len(PRECISIONS)
    TOTAL: tl.constexpr = PRECISIONS[P - 1]
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    BLOCK_K: tl.constexpr = 64 * STEP_BLOCKS
    # Neighbouring programs share the tile of W, which then comes from cache.
    row_tiles = tl.cdiv(M, BLOCK_M)
    n = tl.program_id(0) // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(0) % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    first_block = tl.program_id(1) * SPLIT_BLOCKS
    n_ok = n < N
    m_ok = m < M
    n_long = n.to(tl.int64)

    # Which precision serves each row: 0..P-1, P for the original, -1 outside the batch.
    bits = tl.load(bits_ptr + m, mask=m_ok, other=0) & 255
    serves = tl.zeros((BLOCK_M,), tl.int32)
    for p in tl.static_range(1, P):
        serves += (bits >= PRECISIONS[p]).to(tl.int32)
    if original_ptr is not None:
        serves = tl.where(bits >= 16, P, serves)
    serves = tl.where(m_ok, serves, -1)
    highest = tl.max(tl.where(serves < P, serves, -1), 0)
    present = 0  # bit p: some row is served by precision p
    for p in tl.static_range(P + 1):
        present |= tl.max((serves == p).to(tl.int32), 0) << p

    x_row = x_ptr + m.to(tl.int64)[None, :] * K
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)

    if highest >= 0:
        col = tl.arange(0, 8 * STEP_BLOCKS)
        nothing = tl.zeros((BLOCK_K, BLOCK_M), tl.float32).to(DTYPE)
        order = _input_order(tl.arange(0, BLOCK_K))
        groups = blocks // GROUP_BLOCKS
        plane = tl.cast(N, tl.int64) * groups
        meta_row = meta_ptr + n_long * groups
        for step in tl.range(0, SPLIT_BLOCKS, STEP_BLOCKS, num_stages=STAGES):
            block = first_block + step
            # Every load stands here, before any branch, so that the compiler can run them steps ahead. A load whose
            # mask is off moves nothing.
            k = block * 64 + order
            x = tl.load(x_row + k[:, None], mask=(k < K)[:, None] & m_ok[None, :], other=0.0)
            code_words = ()
            for i in tl.static_range(len(PARTS)):
                wanted = n_ok & (highest >= PARTS[i][2])
                code_words += (
                    _load_code_words(packed_ptr, n_long, N, blocks, block, col, wanted, PARTS[i][0], PARTS[i][1]),
                )
            meta_at = meta_row + block // GROUP_BLOCKS
            some = n_ok & (block < blocks)
            scale = tl.load(meta_at, mask=some, other=0)
            zero = tl.load(meta_at + plane, mask=some, other=0)
            ratios = ()
            offsets = ()
            for p in tl.static_range(P - 1):
                wanted = some & ((present >> p) & 1 != 0)
                ratios += (tl.load(meta_at + (2 + 2 * p) * plane, mask=wanted, other=0),)
                offsets += (tl.load(meta_at + (3 + 2 * p) * plane, mask=wanted, other=0),)
            ratios += (scale,)  # the widest precision has none; keeps the indices below in range
            offsets += (zero,)

            code0 = tl.zeros((BLOCK_N, 8 * STEP_BLOCKS), tl.int32)
            code1 = tl.zeros((BLOCK_N, 8 * STEP_BLOCKS), tl.int32)
            for i in tl.static_range(len(PARTS)):
                if highest >= PARTS[i][2]:
                    code0, code1 = _unpack_code_words(code_words[i], col % 8, code0, code1, PARTS[i][1])
                if PARTS[i][3]:
                    if (present >> PARTS[i][2]) & 1 != 0:
                        rows = tl.where((serves == PARTS[i][2])[None, :], x, nothing)
                        s, o = _scale_offset(
                            scale, zero, ratios[PARTS[i][2]], offsets[PARTS[i][2]], exponent,
                            TOTAL - PRECISIONS[PARTS[i][2]],
                        )  # fmt: skip
                        acc = _multiply(acc, code0, code1, s, o, rows, PRECISIONS[PARTS[i][2]], DEQUANTISE)

    if original_ptr is not None:
        if (present >> P) & 1 != 0:
            OTHER: tl.constexpr = DTYPE if original_ptr.dtype.element_ty == DTYPE else tl.float32
            original_row = original_ptr + n_long * K
            for step in range(SPLIT_BLOCKS):
                k = (first_block + step) * 64 + tl.arange(0, 64)
                mask = (k < K)[:, None] & (serves == P)[None, :]
                rows = tl.load(x_row + k[:, None], mask=mask, other=0.0).to(OTHER)
                w = tl.load(original_row[:, None] + k[None, :], mask=n_ok[:, None] & (k < K)[None, :], other=0.0)
                acc = tl.dot(w.to(OTHER), rows, acc, input_precision="ieee")

    if bias_ptr is not None and SPLITS == 1:
        acc += tl.load(bias_ptr + n, mask=n_ok, other=0.0).to(tl.float32)[:, None]
    y_at = y_ptr + (tl.program_id(1).to(tl.int64) * M + m)[None, :] * N + n[:, None]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=n_ok[:, None] & m_ok[None, :])


@triton.jit(do_not_specialize=["M"])
def add_splits_kernel(parts_ptr, bias_ptr, y_ptr, M, N, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """y[m] = sum over splits of parts[split, m] + bias, always in the same order."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ok = n < N
    y = tl.zeros((BLOCK_N,), tl.float32)
    for i in tl.static_range(SPLITS):
        y += tl.load(parts_ptr + (i * M + m) * N + n, mask=ok, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=ok, other=0.0).to(tl.float32)
    tl.store(y_ptr + m * N + n, y.to(y_ptr.dtype.element_ty), mask=ok)
