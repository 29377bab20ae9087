"""A GGUF tensor's rows, read and dequantised."""

from __future__ import annotations

import numpy as np
from gguf import dequantize

from qbe.errors import QBEError
from qbe.models.gguf_header import GGUFTensor

CHUNK_ELEMENTS = 1 << 18  # 1 MiB of fp32 per step: small beside any model, large enough for numpy


def read_rows(source: GGUFTensor, start: int, end: int) -> np.ndarray:
    """Rows [start, end) of a tensor seen as a matrix of `shape[-1]` columns, fp32, writable.

    Raises:
        QBEError: the file has become shorter.
    """
    with source.file.open("rb") as f:  # read, not mapped: mapped pages would count as memory in use
        f.seek(source.offset + start * source.row_bytes)
        raw = np.frombuffer(f.read((end - start) * source.row_bytes), dtype=np.uint8)
    if raw.nbytes != (end - start) * source.row_bytes:
        raise QBEError(f"{source.file} ends inside tensor {source.name}; it changed while it was read")
    kind = {"F32": np.float32, "F16": np.float16}.get(source.type.name, np.uint8)
    rows = dequantize(raw.view(kind).reshape(end - start, -1), source.type)
    return rows if rows.flags.writeable else rows.copy()


def read_whole(source: GGUFTensor) -> np.ndarray:
    """The tensor in its shape, fp32."""
    out = np.empty((source.numel // source.shape[-1], source.shape[-1]), dtype=np.float32)
    for start, end in steps(source):
        out[start:end] = read_rows(source, start, end)
    return out.reshape(source.shape)


def steps(source: GGUFTensor) -> list[tuple[int, int]]:
    """Row ranges of about `CHUNK_ELEMENTS` elements that cover a tensor seen as a matrix."""
    rows, step = source.numel // source.shape[-1], max(1, CHUNK_ELEMENTS // source.shape[-1])
    return [(start, min(rows, start + step)) for start in range(0, rows, step)]
