"""Records: one row for each request, kept in SQLite, exported as JSON lines or Parquet; and served use of experts."""

from __future__ import annotations

from qbe.records.expert_use import ServedUse
from qbe.records.export import export
from qbe.records.record import Record
from qbe.records.store import RecordStore
from qbe.records.writer import RecordWriter

__all__ = ["Record", "RecordStore", "RecordWriter", "ServedUse", "export"]
