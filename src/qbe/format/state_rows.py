"""Where the numbers of a recurrent state lie in memory, at each precision. Pure arithmetic; kernels and pool share it.

A state [..., size] is rows of `size` numbers. At 32 bits they lie one after the other as the model's code has them, in
its dtype. Below that a row is integers times a scale of its own, and `size` is padded to a multiple of 16:

    16     codes int16 [rows, size], scales bfloat16 [rows]
    8      codes int8 [rows, size], scales bfloat16 [rows]
    10     codes int8 [rows, size], feedback uint8 [rows, F], scales bfloat16 [rows]

The largest code a gear has goes to the row's largest number, which the scale, rounded up, never cuts off.

*Feedback* is the slice in which error feedback keeps what the rounding to 8 bits would lose: the code of 10 bits is the
first 8 of it and these 2. A state is read and written in every step, and rounding to the nearest errs the same way in
each: a number that decays by less than half a code stands still. So codes below 16 bits are rounded stochastically, by
a hash of the place and the token's position: a sequence's states do not depend on those beside it. Of 16 numbers that
lie beside each other byte i of 16 holds the bits of the i-th; four such runs of 16 share the 16 bytes, the first one in
the lowest bits.
"""

from __future__ import annotations

from qbe.sites import STATE_FULL_BITS

LANES = 16
CODE_BITS = 8


def padded_size(size: int) -> int:
    """Codes of a row."""
    return -(-size // LANES) * LANES


def feedback_bits(bits: int) -> int:
    """Bits of a number beside the 8 of its code."""
    return bits - CODE_BITS if CODE_BITS < bits < 16 else 0


def feedback_bytes(size: int, bits: int) -> int:
    """Of a row."""
    return -(-(padded_size(size) // LANES) * feedback_bits(bits) // 8) * LANES


def state_bytes(rows: int, size: int, bits: int, full_bytes: int) -> int:
    """Bytes of a state of so many rows.

    Args:
        full_bytes: of a number at 32 bits, in the dtype of the model's code.
    """
    if bits == STATE_FULL_BITS:
        return rows * size * full_bytes
    return rows * (padded_size(size) * (2 if bits == 16 else 1) + feedback_bytes(size, bits) + 2)
