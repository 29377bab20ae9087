"""Which pages bounded attention reads again: `page_bounds` and `pages_to_raise` of its reference, on a walk's notes.

A program serves one key head of one sequence. It writes the table of the second walk, whether there is anything in it,
and counts.
"""

# mypy: disable-error-code="no-untyped-def, assignment, operator, call-arg"

from __future__ import annotations

import triton
import triton.language as tl

from qbe.kernels.triton.attention.page_notes import NOTES
from qbe.kernels.triton.attention.page_walk import LOG2E
from qbe.kernels.triton.kv_cache.blocks import PAGE

SLACK = tl.constexpr(1.001)  # for the rounding of the bound itself
NO_ORIGINAL = tl.constexpr(-1)


@triton.jit(
    do_not_specialize=[
        "note_row", "table_row", "original_row", "block_tables_ptr", "originals_ptr", "lengths_ptr", "limits_ptr",
        "counts_ptr", "raised_ptr", "full_bytes",
    ]
)  # fmt: skip
def raise_pages_kernel(
    notes_ptr, note_row, out_ptr, head_offsets_ptr, block_tables_ptr, table_row, originals_ptr, original_row,
    lengths_ptr, limits_ptr, counts_ptr, sinks_ptr, again_ptr, raised_ptr, full_bytes, KV_HEADS: tl.constexpr,
    REPEAT: tl.constexpr, VALUE_DIM: tl.constexpr, BV: tl.constexpr, BP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    sequence = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    head = tl.program_id(0) % KV_HEADS
    limit = tl.load(limits_ptr + sequence)
    number = 0
    if limit < float("inf"):
        past = tl.load(lengths_ptr + sequence).to(tl.int32) - 1
        first = 0
        if WINDOW > 0:
            first = tl.maximum(past + 1 - WINDOW, 0) // PAGE
        p = tl.arange(0, BP)
        seen = (p >= first) & (p < tl.cdiv(past, PAGE))
        block_id = tl.load(block_tables_ptr + sequence * table_row + p, mask=seen, other=0)
        original = tl.load(originals_ptr + sequence * original_row + p, mask=seen, other=NO_ORIGINAL)
        bits = tl.load(head_offsets_ptr + block_id % 256 * KV_HEADS + head, mask=seen, other=16) % 256
        lowered = (bits != 16) & (original != NO_ORIGINAL)
        wanted = tl.zeros((BP,), tl.int32)
        dv = tl.arange(0, BV)
        for m in range(REPEAT):
            row = sequence * KV_HEADS * REPEAT + head * REPEAT + m
            notes = notes_ptr + row * NOTES * note_row
            log = tl.load(notes + p, mask=seen, other=float("-inf"))
            e = tl.load(notes + note_row + p, mask=seen, other=0.0)
            h = tl.load(notes + 2 * note_row + p, mask=seen, other=0.0)
            a = tl.load(notes + 3 * note_row + p, mask=seen, other=0.0)
            log_new = tl.load(notes + note_row - 1)  # of the step's own token, which is at 16 bits
            a_new = tl.load(notes + 4 * note_row - 1)
            log_sink = log_new + float("-inf")
            if sinks_ptr is not None:
                log_sink = tl.load(sinks_ptr + head * REPEAT + m) * LOG2E
            top = tl.maximum(tl.maximum(tl.max(log, 0), log_new), log_sink)
            share = tl.exp2(log - top)
            new = tl.exp2(log_new - top)
            at_sink = tl.exp2(log_sink - top)
            total = tl.sum(share, 0) + new + at_sink
            share /= total
            new /= total
            least = tl.sum(share * tl.exp(-e), 0) + new + at_sink / total
            centre = (tl.sum(share * a * tl.exp(e), 0) + new * a_new) / least
            grown = tl.maximum(tl.exp(e) - 1, e * (1 + e / 2))  # the second one where e is small
            bound = SLACK * share * (h + grown * (a + centre)) / least
            bound = tl.where(lowered, bound, 0.0)
            y = tl.load(out_ptr + row * VALUE_DIM + dv, mask=dv < VALUE_DIM, other=0.0).to(tl.float32)
            allowed = limit * tl.sqrt(tl.sum(y * y, 0))
            highest = allowed
            while tl.sum(tl.where(bound <= highest, bound, 0.0), 0) > allowed:
                highest = highest / 2
            wanted = tl.where(lowered & ((bound <= highest) == 0), 1, wanted)
        to = again_ptr + tl.program_id(0).to(tl.int64) * (note_row - 1) + p
        tl.store(to, tl.where(wanted == 1, original, block_id), mask=seen)
        number = tl.sum(wanted, 0)
        tl.atomic_add(counts_ptr + sequence * 3, tl.sum(lowered.to(tl.int64), 0))
        tl.atomic_add(counts_ptr + sequence * 3 + 1, number.to(tl.int64))
        tl.atomic_add(counts_ptr + sequence * 3 + 2, number.to(tl.int64) * full_bytes)
    tl.store(raised_ptr + tl.program_id(0), number)
