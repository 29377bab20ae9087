"""Models that llama.cpp split over several GGUF files: read as one from the first part."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from qbe.errors import QBEError
from qbe.models.gguf_header import GGUFHeader, GGUFTensor, read_header

READER = 2  # of how files are read: raised when the same file makes another model than before

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAX_PARTS = 99999  # five digits


def read_parts(path: Path) -> GGUFHeader:
    """The header of a file, with the tensors of all parts if it is the first of several.

    Raises:
        QBEError: as `read_header`; another part than the first, or parts that are missing or do not belong together.
    """
    header = read_header(path)
    number, count = _number(header, "no"), _number(header, "count")
    if count <= 1 and number == 0:
        return header
    name = _PART.fullmatch(path.name)
    if number != 0:
        first = f"{name['stem']}-00001-of-{count:05d}.gguf" if name else f"a name ending in -00001-of-{count:05d}.gguf"
        raise QBEError(f"{path} is part {number + 1} of {count} of a model: give the first part, {first}")
    if name is None or (int(name["number"]), int(name["count"])) != (1, count):
        raise QBEError(
            f"{path} is the first of {count} parts, which are found by their names: "
            f"it must end in -00001-of-{count:05d}.gguf"
        )
    tensors: dict[str, GGUFTensor] = dict(header.tensors)
    for i, file in enumerate(_names(path, name["stem"], count)[1:], start=1):
        if not file.is_file():
            raise QBEError(f"{file} is missing: {path.name} is the first of {count} parts; download it, too")
        part = read_header(file)
        same = part.architecture in ("", header.architecture)
        if (_number(part, "no"), _number(part, "count")) != (i, count) or not same:
            raise QBEError(f"{file} is no part {i + 1} of {path.name}; download the parts again")
        if twice := next(iter(tensors.keys() & part.tensors.keys()), None):
            raise QBEError(f"{file} holds tensor {twice[:60]} once more; download the parts again")
        tensors |= part.tensors
    if (total := _number(header, "tensors.count") or len(tensors)) != len(tensors):
        raise QBEError(f"{path}: its parts hold {len(tensors)} of {total} tensors; download them again")
    return replace(header, tensors=tensors)


def part_files(path: Path) -> list[Path]:
    """The files of a model: its parts if it is the first of several by its name, else itself."""
    name = _PART.fullmatch(path.name)
    if name is None or int(name["number"]) != 1:
        return [path]
    return [file for file in _names(path, name["stem"], int(name["count"])) if file.is_file()]


def _names(path: Path, stem: str, count: int) -> list[Path]:
    return [path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]


def _number(header: GGUFHeader, key: str) -> int:
    value = header.metadata.get(f"split.{key}", 0)
    most = len(str(_MAX_PARTS)) if key != "tensors.count" else 9
    if not isinstance(value, int) or isinstance(value, bool) or value < 0 or len(str(value)) > most:
        raise QBEError(f"{header.path} is corrupt: split.{key} is {str(value)[:60]}; download it again")
    return value
