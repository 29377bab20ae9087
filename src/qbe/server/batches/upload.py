"""A file as a browser's form sends it (multipart/form-data), written to disk while it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from qbe.server.errors import APIError

FRAME_BYTES = 64 * 1024  # of everything beside the file: fields, and what stands between them
_FORM = "send it as multipart/form-data, with 'file' and 'purpose'"


class Form:
    """Takes the parts of a form.

    Args:
        boundary: between them.
        path: where the file goes.
        most: bytes that it may have.

    Attributes:
        fields: those that are no file.
        filename: what the client calls it; None until it comes.
    """

    def __init__(self, boundary: bytes, path: Path, most: int) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._path, self._left, self._frame_bytes = path, most, 0
        self._file: IO[bytes] | None = None
        self._header = self._value = b""
        self._disposition = b""
        self._name = ""
        self._content = bytearray()
        self._in_file = self.ended = False
        self._parser = MultipartParser(boundary, {
            "on_part_begin": self._begin, "on_header_field": self._on_header, "on_header_value": self._on_value,
            "on_header_end": self._on_header_end, "on_headers_finished": self._headers, "on_part_data": self._data,
            "on_part_end": self._end, "on_end": self._over,
        })  # fmt: skip

    def write(self, data: bytes) -> None:
        """More of the form. Raises APIError for what is none, or too large."""
        self._frame_bytes += len(data)
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise APIError(400, f"the form is wrong ({error}): {_FORM}", code="invalid_form") from None
        if self._frame_bytes > FRAME_BYTES:
            raise APIError(413, f"the form has more than {FRAME_BYTES} bytes beside the file", code="body_too_large")

    def close(self) -> None:
        """Nothing more comes."""
        if self._file is not None:
            self._file.close()

    def _begin(self) -> None:
        self._disposition, self._name, self._in_file = b"", "", False
        self._content.clear()

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name != "file":
            return
        if self._file is not None:
            raise APIError(400, "file: there are two: send one after the other", param="file")
        name = options.get(b"filename", b"").decode("utf-8", "replace")[:255]
        self.filename = "".join(c for c in name if c.isprintable()) or "file"
        self._in_file, self._file = True, open(self._path, "xb")  # noqa: SIM115

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            assert self._file is not None
            self._left -= end - start
            self._frame_bytes -= end - start
            if self._left < 0:
                raise APIError(413, "file: it is larger than this server takes, or than its key may keep",
                               param="file", code="file_too_large")  # fmt: skip
            self._file.write(data[start:end])
            return
        self._content += data[start:end]

    def _end(self) -> None:
        if not self._in_file:
            self.fields[self._name[:64]] = self._content.decode("utf-8", "replace")

    def _over(self) -> None:
        self.ended = True


async def receive(chunks: AsyncIterator[bytes], content_type: str, path: Path, most: int, seconds: float) -> Form:
    """Read a form whose file goes to `path`; nothing stays there if it fails.

    Args:
        most: bytes of the file.
        seconds: that all of it may take.

    Raises:
        APIError: it is no form with a file, too large or too slow.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= 70:
        raise APIError(400, f"the body is no form: {_FORM}", code="invalid_form")
    form = Form(boundary, path, most)
    try:
        async with asyncio.timeout(seconds):
            async for chunk in chunks:
                form.write(chunk)
        if not form.ended or form.filename is None:
            raise APIError(400, f"file: there is none: {_FORM}", param="file", code="invalid_form")
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, TimeoutError):
            raise APIError(408, f"the file took longer than {seconds:g} s to arrive", code="timeout") from None
        if isinstance(error, OSError):
            raise APIError(503, "the file cannot be written: try again later", code="no_files") from error
        raise
    finally:
        form.close()
    return form
