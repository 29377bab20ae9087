"""Reading and checking a GGUF file's header, before anything else trusts it.

`gguf.GGUFReader` believes every count in the file: a flipped byte makes it loop or allocate without end, and it
builds several numpy objects per vocabulary entry (seconds and 100 MB on a real file). This walk is bounded by the
file's size. Format: GGUF as ggml describes it, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType
from gguf.quants import _type_traits

from qbe.errors import QBEError

_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
_FLOATS = {GGMLQuantizationType.F32, GGMLQuantizationType.F16}  # stored as themselves; the rest as blocks of bytes
_MAX_DIMS = 4
_MAX_KINDS = 64  # numbers that ggml has given out, or soon will


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is in torch order (rows first); `offset` counts bytes from the file's start."""

    file: Path
    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, i.e. of `shape[-1]` elements."""
        block, size = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block * size


@dataclass(frozen=True)
class GGUFHeader:
    """A checked header.

    Attributes:
        metadata: key -> number, string, or list of them.
        tensors: name -> place; every one lies inside its file.
        table: (start, end) of the tensor table.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    table: tuple[int, int]

    @property
    def architecture(self) -> str:
        """Empty in the later parts of a model."""
        return str(self.metadata.get("general.architecture", ""))


class _Walk:
    """A cursor that refuses to leave the file."""

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self.data, self.size, self.pos = data, size, 0

    def take(self, n: int) -> int:
        """Advance by n bytes; where they start."""
        start = self.pos
        if n > self.size - start:
            raise EOFError
        self.pos += n
        return start

    def number(self, fmt: str) -> Any:
        return struct.unpack_from(fmt, self.data, self.take(struct.calcsize(fmt)))[0]

    def string(self) -> str:
        n = self.number("<Q")
        start = self.take(n)
        return self.data[start : start + n].decode("utf-8")

    def value(self, kind: GGUFValueType) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == GGUFValueType.STRING:
            return self.string()
        item = GGUFValueType(self.number("<I"))
        count = self.number("<Q")
        if item in _SCALARS:
            code = _SCALARS[item][1]
            start = self.take(count * struct.calcsize("<" + code))
            return list(struct.unpack_from(f"<{count}{code}", self.data, start))
        if item == GGUFValueType.STRING:
            if count * 8 > self.size - self.pos:
                raise EOFError
            return [self.string() for _ in range(count)]
        raise ValueError("an array of arrays")


def read_header(path: Path) -> GGUFHeader:
    """Read and check the header of a GGUF file; the tensors' data is not touched.

    Raises:
        QBEError: the file is missing, empty, not a GGUF, cut off, or contradicts itself.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            if f.read(4) != b"GGUF":
                what = "is empty" if size == 0 else "is not a GGUF file (it does not start with 'GGUF')"
                raise QBEError(f"{path} {what}; give another file or download it again")
            with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, _Walk(data, size))
    except EOFError as e:
        raise QBEError(f"{path} is cut off inside its header ({size} bytes); download it again") from e
    except UnicodeDecodeError as e:
        raise QBEError(f"{path} is corrupt: its header holds text that is not UTF-8; download it again") from e
    except (ValueError, KeyError, struct.error) as e:  # ValueError includes unknown type numbers
        reason = str(e).strip("'\"").splitlines()[0] if str(e) else type(e).__name__
        raise QBEError(f"{path} is corrupt: its header holds {reason}; download it again") from e
    except OSError as e:
        raise QBEError(f"cannot read {path}: {e.strerror or e}") from e


def _parse(path: Path, walk: _Walk) -> GGUFHeader:
    walk.take(4)
    version = walk.number("<I")
    if version not in (2, 3):
        raise QBEError(f"{path} has GGUF version {version}; versions 2 and 3 of the format are supported")
    tensor_count, entry_count = walk.number("<Q"), walk.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):  # ends with the file at the latest: every entry takes bytes
        key = walk.string()
        if key in metadata:
            raise ValueError(f"the key {key[:60]!r} twice")
        metadata[key] = walk.value(GGUFValueType(walk.number("<I")))
    later_part = metadata.get("split.no", 0) != 0  # the first one has the metadata
    if not isinstance(metadata.get("general.architecture"), str) and not later_part:
        raise ValueError("no general.architecture")

    table_start = walk.pos
    entries = []
    for _ in range(tensor_count):
        name = walk.string()
        n_dims = walk.number("<I")
        if not 1 <= n_dims <= _MAX_DIMS:
            raise ValueError(f"a tensor of {n_dims} dimensions")
        dims = tuple(walk.number("<Q") for _ in range(n_dims))
        entries.append((name, dims[::-1], _kind(path, name, walk.number("<I")), walk.number("<Q")))
    table = (table_start, walk.pos)

    align = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(align, int) or align <= 0 or align & (align - 1):
        raise ValueError(f"an alignment of {align!r}")
    data_start = -(-walk.pos // align) * align
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise ValueError(f"the tensor {name[:60]!r} twice")
        tensors[name] = _place(path, name, shape, kind, data_start + offset, align, walk.size)
    if sum(t.nbytes for t in tensors.values()) > walk.size:
        raise ValueError("tensors that overlap")
    return GGUFHeader(path, metadata, tensors, table)


def _kind(path: Path, name: str, number: int) -> GGMLQuantizationType:
    """How a tensor is stored, if that can be read."""
    known = number in GGMLQuantizationType.__members__.values()
    if not known and number >= _MAX_KINDS:
        raise ValueError(f"a tensor of type {number}")
    kind = GGMLQuantizationType(number) if known else None
    if kind is None or (kind not in _FLOATS and kind not in _type_traits):
        label = kind.name if kind is not None else f"type {number}, newer or older than the gguf package"
        raise QBEError(f"{path}: tensor {name[:60]} is stored as {label}, which cannot be read; use another GGUF file")
    return kind


def _place(
    path: Path, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int, align: int, size: int
) -> GGUFTensor:
    """A tensor's place in the file, if it can lie there."""
    label = name[:60]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[-1] % block:
        raise ValueError(f"an impossible shape {shape} for {label}")
    nbytes = math.prod(shape) // block * block_bytes
    if offset % align:
        raise ValueError(f"a bad offset for {label}")
    if offset + nbytes > size:
        raise QBEError(f"{path} is cut off: tensor {label} ends at byte {offset + nbytes} of {size}; download it again")
    return GGUFTensor(path, name, shape, kind, offset, nbytes)
