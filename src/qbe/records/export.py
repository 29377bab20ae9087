"""Records as a file that other tools read: JSON lines or Parquet, one record at a time."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import IO, Any

from qbe.errors import QBEError
from qbe.files import replacing
from qbe.records.record import FIELDS
from qbe.records.store import RecordStore

FORMATS = ("jsonl", "parquet")
ROWS_PER_GROUP = 1000  # of a Parquet file; also the most records held in memory


def export(store: RecordStore, path: Path | None = None, format: str = "jsonl") -> int:
    """Writes every record, oldest first; returns how many.

    Args:
        store: where they are.
        path: the file to make or replace; None writes to standard output (JSON lines only).
        format: `jsonl` (one JSON object a line) or `parquet` (mappings as Parquet maps, bits as lists, KV
            bits as a list per layer, refreshes and quality as JSON).

    Raises:
        QBEError: an unknown format, Parquet without pyarrow or without a path, or a file that can't be written. The
            file that was there before is then unchanged.
    """
    if format not in FORMATS:
        raise QBEError(f"records cannot be exported as '{format}': choose {' or '.join(FORMATS)}")
    if format == "parquet":
        if path is None:
            raise QBEError("a Parquet file cannot go to standard output: give the path of a file")
        _pyarrow()  # before a file is begun
    write = _write_parquet if format == "parquet" else _write_jsonl
    try:
        if path is None:
            sys.stdout.flush()
            n = write(store, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            return n
        with replacing(Path(path)) as file:
            return write(store, file)
    except BrokenPipeError:
        raise  # the reader (`| head`) has enough: the command line's business
    except OSError as e:
        where = "standard output" if path is None else path
        raise QBEError(f"records cannot be written to {where}: {e.strerror or e}; choose another place") from e


def _write_jsonl(store: RecordStore, file: IO[bytes]) -> int:
    n = 0
    for record in store:
        file.write(json.dumps(record.describe(), ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        n += 1
    return n


def _write_parquet(store: RecordStore, file: IO[bytes]) -> int:
    pa, pq = _pyarrow()
    bits = pa.list_(pa.int16())
    kinds = {
        **dict.fromkeys(FIELDS, pa.string()),
        **dict.fromkeys(("prompt_tokens", "completion_tokens", "bytes_per_token", "bytes_moved"), pa.int64()),
        **dict.fromkeys(("pages_read", "pages_raised", "host_bytes", "drafted_tokens", "accepted_tokens"), pa.int64()),
        **dict.fromkeys(("budget_bits", "score", "average_weight_bits", "read_weight_bits", "kv_error"), pa.float64()),
        **dict.fromkeys(("asked_weight_bits", "cached_weight_bits"), pa.float64()),
        **dict.fromkeys(("cached_tokens", "precision_misses"), pa.int64()),
        **dict.fromkeys(("analysis_ms", "policy_ms", "prefill_ms", "decode_ms"), pa.float64()),
        **dict.fromkeys(("weight_bits", "activation_bits"), bits),
        "kv_bits": pa.list_(bits),
        "state_bits": bits,
        **dict.fromkeys(("analysis_tier", "cluster", "first_kv_bits"), pa.int16()),
        "features": pa.map_(pa.string(), pa.float64()),
        **dict.fromkeys(("tokens_by_bits", "tokens_by_activation_bits"), pa.map_(pa.int16(), pa.int64())),
        **dict.fromkeys(("entropies", "margins"), pa.list_(pa.float64())),
    }
    schema = pa.schema(list(kinds.items()))
    n = 0
    records = iter(store)
    with pq.ParquetWriter(file, schema) as writer:
        while rows := [_parquet_row(r.describe()) for r in islice(records, ROWS_PER_GROUP)]:
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
            n += len(rows)
    return n


def _parquet_row(described: dict[str, Any]) -> dict[str, Any]:
    for name in ("features", "tokens_by_bits", "tokens_by_activation_bits"):
        described[name] = list(described[name].items())  # Arrow's maps are lists of pairs
    for name in ("refreshes", "quality"):
        described[name] = None if described[name] is None else json.dumps(described[name])
    described["kv_bits"] = [b if isinstance(b, list) else [b] for b in described["kv_bits"]]  # and have one type
    return described


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as e:
        raise QBEError("Parquet needs pyarrow: 'pip install pyarrow', or export as jsonl") from e
    return pyarrow, pyarrow.parquet
