"""The rotation of quantised pages in Triton (`qbe.kernels.reference.rotation`), as a fast Walsh-Hadamard transform."""

# mypy: disable-error-code="no-untyped-def, assignment, operator, index, attr-defined"

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def steps(dim):
    """Of the transform: the bits of a place in a block."""
    return (dim & -dim).bit_length() - 1


@triton.constexpr_function
def rotation_factor(dim):
    return float(dim & -dim) ** -0.5


@triton.jit
def signs_of(N: tl.constexpr, DIM: tl.constexpr):
    """float32 [N] of 1 and -1, the signs of Rudin and Shapiro"""
    index = tl.arange(0, N) % (DIM & -DIM)
    parity = index & (index >> 1)
    parity = parity ^ (parity >> 8)
    parity = parity ^ (parity >> 4)
    return (1 - 2 * ((0x6996 >> (parity & 15)) & 1)).to(tl.float32)  # the parity of four bits, looked up


@triton.jit
def rotate_columns(x, DIM: tl.constexpr, SIGNS: tl.constexpr = True):
    """`rotate` for the columns of x [N, n]."""
    x = x.to(tl.float32)
    if SIGNS:
        x *= signs_of(x.shape[0], DIM)[:, None]
    for step in tl.static_range(steps(DIM)):
        pairs = tl.reshape(x, (x.shape[0] >> (step + 1), 2, 1 << step, x.shape[1]))
        low, high = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
        x = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 3, 1, 2)), (x.shape[0], x.shape[1]))
    if SIGNS:
        x *= signs_of(x.shape[0], DIM)[:, None]
    return x * rotation_factor(DIM)


@triton.jit
def rotate(x, DIM: tl.constexpr, SIGNS: tl.constexpr = True):
    """x [n, N] in float32, the first DIM <= N numbers of its rows rotated; the others come back as anything."""
    x = x.to(tl.float32)
    if SIGNS:
        x *= signs_of(x.shape[1], DIM)[None, :]
    for step in tl.static_range(steps(DIM)):
        pairs = tl.reshape(x, (x.shape[0], x.shape[1] >> (step + 1), 2, 1 << step))
        low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        x = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2)), (x.shape[0], x.shape[1]))
    if SIGNS:
        x *= signs_of(x.shape[1], DIM)[None, :]
    return x * rotation_factor(DIM)


@triton.jit
def rotate_queries_kernel(
    q_ptr, rotated_ptr, q_row, q_head, q_one, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """rotated[row, head] = the query rotated and, behind that, as the sketches of turbo keys are: once more.

    A launch of its own, because each program of attention would wait for its own rotation.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BK)[None, :]
    q = tl.load(q_ptr + row * q_row + head * q_head + d * q_one, mask=d < KEY_DIM, other=0.0)
    once = rotate(q, KEY_DIM)
    to = rotated_ptr + (row * HEADS + head) * 2 * KEY_DIM + d
    tl.store(to, once.to(rotated_ptr.dtype.element_ty), mask=d < KEY_DIM)
    twice = rotate(tl.where(d < KEY_DIM, once, 0.0), KEY_DIM, SIGNS=False)
    tl.store(to + KEY_DIM, twice.to(rotated_ptr.dtype.element_ty), mask=d < KEY_DIM)
