"""A picture as it came: encoded bytes, from a file, a `data:` URI or memory. Nothing is fetched from elsewhere."""

from __future__ import annotations

import binascii
import hashlib
import io
import os
from base64 import b64decode
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from qbe.errors import QBEError

MOST_BYTES = 16 << 20  # of one picture, encoded
MOST_PICTURES = 32  # of one prompt


@dataclass(frozen=True)
class Picture:
    """One picture of a prompt.

    Attributes:
        data: the file's bytes: PNG, JPEG, WebP or GIF, of which the first frame counts.
        name: for messages.

    Raises:
        QBEError: no bytes, or more than 16 MiB.
    """

    data: bytes = field(repr=False)
    name: str = "the picture"

    def __post_init__(self) -> None:
        if not self.data:
            raise QBEError(f"{self.name} is empty: give the bytes of a PNG, JPEG, WebP or GIF file", field="prompt")
        if len(self.data) > MOST_BYTES:
            raise QBEError(
                f"{self.name} has {len(self.data)} bytes, but at most {MOST_BYTES} are taken: make it smaller",
                field="prompt",
            )

    @cached_property
    def digest(self) -> bytes:
        """What it is known by: 32 bytes."""
        return hashlib.blake2b(self.data, digest_size=32).digest()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Picture:
        """Of a file. Raises QBEError where it cannot be read, or is too large."""
        file = Path(path)
        try:
            if file.is_file() and file.stat().st_size > MOST_BYTES:
                raise QBEError(f"{file} has {file.stat().st_size} bytes, but a picture has at most {MOST_BYTES}")
            with file.open("rb") as opened:
                return cls(opened.read(MOST_BYTES + 1), str(path))
        except (OSError, ValueError) as error:
            raise QBEError(f"cannot read the picture {path}: {getattr(error, 'strerror', None) or error}") from error

    @classmethod
    def of_uri(cls, uri: str, name: str = "the picture") -> Picture:
        """Of a `data:` URI. Raises QBEError for any other, and for one that is damaged."""
        check_uri(uri, name)
        head, comma, body = uri.partition(",")
        if not comma:
            raise QBEError(f"{name} is a data: URI without a comma: nothing follows its type", field="prompt")
        if len(body) > MOST_BYTES * 4 // 3 + 4 and head.endswith(";base64"):
            raise QBEError(f"{name} has more than {MOST_BYTES} bytes: make it smaller", field="prompt")
        try:
            data = b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
        except (binascii.Error, ValueError) as error:
            raise QBEError(f"{name} is no base64 ({error}): send all of the file", field="prompt") from None
        return cls(data, name)

    @classmethod
    def of(cls, source: Any, name: str = "the picture") -> Picture:
        """Of a path, a `data:` URI, bytes, an image of Pillow or another picture. Raises QBEError for anything else."""
        if isinstance(source, Picture):
            return source
        if isinstance(source, bytes | bytearray):
            return cls(bytes(source), name)
        if isinstance(source, str) and source[:5].lower() == "data:":
            return cls.of_uri(source, name)
        if isinstance(source, str | os.PathLike):
            return cls.open(source)
        from PIL import Image

        if isinstance(source, Image.Image):
            encoded = io.BytesIO()
            source.convert("RGB").save(encoded, "PNG", compress_level=1)
            return cls(encoded.getvalue(), name)
        raise QBEError(f"{name} is a {type(source).__name__}: give a path, bytes, or an image of Pillow")


def check_uri(uri: str, name: str = "the picture") -> None:
    """Raises QBEError for one that would have to be fetched."""
    if uri[:5].lower() != "data:":
        raise QBEError(
            f"{name} is at '{uri[:64]}', but nothing is fetched: send it as data:image/png;base64,... itself",
            field="prompt",
        )
