"""Files and batches on disk: what each is as JSON, written whole, and the content of files beside it.

One server at a time uses the folder. What is there is also in memory, without content; the folder is read once.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

from qbe.errors import QBEError
from qbe.files import make_folder, reason, write_text
from qbe.server.batches.protocol import Batch, StoredFile
from qbe.server.errors import APIError
from qbe.server.settings import Batches

log = logging.getLogger(__name__)

DAY_S = 86400
_FREE_BYTES = 64 << 20  # that others find on the disk whatever comes


class BatchStore:
    """What one server keeps for its clients.

    Args:
        folder: where; made when the first file comes.
        settings: bounds, those in use now.
        clock: seconds since 1970.
    """

    def __init__(self, folder: Path, settings: Callable[[], Batches], clock: Callable[[], float] = time.time) -> None:
        self._folder, self._settings, self._clock = folder, settings, clock
        self._lock: IO[str] | None = None
        self.files: dict[str, StoredFile] = {}
        self.batches: dict[str, Batch] = {}

    @property
    def settings(self) -> Batches:
        """Those in use now."""
        return self._settings()

    @property
    def now(self) -> int:
        """Seconds since 1970."""
        return int(self._clock())

    @property
    def is_open(self) -> bool:
        """Whether the folder is this server's."""
        return self._lock is not None

    def open(self, make: bool = True) -> None:
        """Take the folder and read what is in it.

        Args:
            make: whether there shall be one.

        Raises:
            APIError: it cannot be used, or another server uses it.
        """
        if self.is_open or not (make or self._folder.exists()):
            return
        try:
            make_folder(self._folder)
            lock = open(self._folder / "lock", "w")  # noqa: SIM115
        except (QBEError, OSError) as error:
            said = reason(error) if isinstance(error, OSError) else str(error)
            raise APIError(503, f"files and batches cannot be kept: {said}", code="no_files") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise APIError(503, "another server on this machine keeps files and batches: ask that one, or give each "
                           "a folder of its own (batches.folder)", code="no_files") from None  # fmt: skip
        self._lock = lock
        self._read()

    def close(self) -> None:
        """Let others have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _read(self) -> None:
        for path in sorted(self._folder.glob("*.json")):
            try:
                fields = json.loads(path.read_text(encoding="utf-8"))
                if path.name.startswith("batch_"):
                    self.batches[path.stem] = Batch(**fields)
                else:
                    self.files[path.stem] = StoredFile(**fields)
            except (OSError, ValueError, TypeError) as error:
                log.warning("'%s' is left out, because it cannot be read: %s", path, error)
        for partial in self._folder.glob("*.partial"):  # of an upload that was cut off
            partial.unlink(missing_ok=True)

    def content(self, id: str) -> Path:
        """Where the content of a file is, or what a batch has come to so far."""
        return self._folder / f"{id}.jsonl"

    def partial(self) -> Path:
        """Where an upload is written."""
        return self._folder / f"{uuid.uuid4().hex}.partial"

    def room(self, key: str) -> int:
        """Bytes that a key may add.

        Raises:
            APIError: it may add nothing.
        """
        used = sum(f.bytes for f in self.files.values() if f.key == key)
        used += sum(self._written(b) for b in self.batches.values() if b.key == key and not b.over)
        free = os.statvfs(self._folder)
        left = min(self.settings.key_bytes - used, free.f_bavail * free.f_frsize - _FREE_BYTES)
        if left <= 0:
            raise APIError(413, f"this key's files have {used} of the {self.settings.key_bytes} bytes it may have, "
                           "or the disk is full: delete some", code="files_full")  # fmt: skip
        return left

    def _written(self, batch: Batch) -> int:
        paths = [self.content(batch.id + end) for end in (".output", ".errors")]
        return sum(path.stat().st_size for path in paths if path.exists())

    def add(
        self, key: str, path: Path, filename: str, purpose: str, seconds: int = 0, id: str = ""
    ) -> StoredFile:  # fmt: skip
        """A file, of what was written at `path`, which is moved.

        Args:
            seconds: that it is kept; 0: what the settings say.
            id: of the file; empty: a new one.
        """
        now, keep = self.now, self.settings.days * DAY_S
        file = StoredFile(id or f"file-{uuid.uuid4().hex}", key, path.stat().st_size, now, filename, purpose,
                          now + min(keep, seconds or keep))  # fmt: skip
        os.replace(path, self.content(file.id))
        self._write(file)
        self.files[file.id] = file
        return file

    def file(self, key: str, id: str) -> StoredFile:
        """Raises APIError for a file that is not there or not this key's."""
        file = self.files.get(id)
        if file is None or file.key != key:
            raise APIError(404, f"there is no file '{id[:200]}' here", param="file_id", code="file_not_found")
        return file

    def delete(self, key: str, id: str) -> None:
        """Raises APIError likewise, and for a file that a batch reads."""
        self.file(key, id)
        reads = next((b.id for b in self.batches.values() if b.input_file_id == id and not b.over), None)
        if reads is not None:
            raise APIError(409, f"the file is read by batch '{reads}': cancel that first", param="file_id")
        self._remove(id)

    def batch(self, key: str, id: str) -> Batch:
        """Raises APIError for a batch that is not there or not this key's."""
        batch = self.batches.get(id)
        if batch is None or batch.key != key:
            raise APIError(404, f"there is no batch '{id[:200]}' here", param="batch_id", code="batch_not_found")
        return batch

    def put(self, batch: Batch) -> None:
        """Keep it as it is now. Raises QBEError where the disk refuses."""
        self._write(batch)
        self.batches[batch.id] = batch

    def sweep(self) -> None:
        """Delete what is too old."""
        now, keep = self.now, self.settings.days * DAY_S
        for file in [f for f in self.files.values() if f.expires_at <= now]:
            if not any(b.input_file_id == file.id and not b.over for b in self.batches.values()):
                self._remove(file.id)
        for batch in [b for b in self.batches.values() if b.over and max(b.times.values()) + keep <= now]:
            self._remove(batch.id)

    def _write(self, one: StoredFile | Batch) -> None:
        write_text(self._folder / f"{one.id}.json", json.dumps(asdict(one)))

    def _remove(self, id: str) -> None:
        self.files.pop(id, None)
        self.batches.pop(id, None)
        for path in (self._folder / f"{id}.json", self.content(id)):
            with suppress(OSError):
                path.unlink()
