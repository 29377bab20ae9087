"""A transformers folder's safetensors as lazy tensors: read once, cast while reading, never mapped.

transformers maps the file and casts from the map, so that an fp32 checkpoint loaded in 16 bits holds three times
the 16-bit size. Here each tensor is read straight into its final memory.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from qbe.errors import QBEError

CHUNK_BYTES = 1 << 18  # larger ones leave holes between the weights in the allocator's arenas

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class LazySafetensor:
    """One tensor of a safetensors file, read when transformers asks for it with `[...]` and `.to(device, dtype)`.

    Attributes:
        offset: of its first byte in the file.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    def __getitem__(self, _: Any) -> LazySafetensor:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor on `device` in `dtype`, through a small buffer."""
        out = torch.empty(self.shape, dtype=dtype or self.dtype, device=device or "cpu")
        flat = out.view(-1)
        with self.file.open("rb", buffering=0) as f:
            f.seek(self.offset)
            if out.dtype == self.dtype and out.device.type == "cpu":
                self._fill(f, flat)
                return out
            step = CHUNK_BYTES // self.dtype.itemsize
            buffer = torch.empty(min(step, flat.numel()), dtype=self.dtype)
            for start in range(0, flat.numel(), step):
                part = buffer[: min(step, flat.numel() - start)]
                self._fill(f, part)
                flat[start : start + part.numel()] = part.to(out.device)
        return out

    def _fill(self, f: Any, target: torch.Tensor) -> None:
        """Read into a contiguous 1-D CPU tensor."""
        memory = memoryview(target.view(torch.uint8).numpy().data)
        done = 0
        while done < len(memory):
            n = f.readinto(memory[done:])
            if not n:
                raise QBEError(f"{self.file} ends inside tensor {self.name}; it changed while it was read")
            done += n


def lazy_state_dict(folder: Path) -> dict[str, LazySafetensor]:
    """Every tensor of a checkpoint folder: name -> lazy tensor. Extra safetensors files of the folder are not read.

    Raises:
        QBEError: no safetensors in the folder, a missing shard, or a truncated or corrupt file.
    """
    tensors: dict[str, LazySafetensor] = {}
    for file in _weight_files(folder):
        tensors |= _open(file)
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        pickles = any(folder.glob("pytorch_model*.bin"))
        hint = "convert its pickled weights to safetensors" if pickles else "download the model again"
        raise QBEError(f"{folder} has no model.safetensors: {hint}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / Path(str(n)).name for n in names]
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as e:
        raise QBEError(f"{index} is corrupt (no weight_map); download the model again") from e
    for file in files:
        if not file.is_file():
            raise QBEError(f"{file} is missing: {index.name} lists {len(files)} files; download the model again")
    return files


def _open(file: Path) -> dict[str, LazySafetensor]:
    """The tensors of one file. `safe_open` checks the header, the offsets and the file's length; it reads no data."""
    try:
        with safe_open(file, framework="pt"):
            pass
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(length))
    except (SafetensorError, ValueError, OSError) as e:
        raise QBEError(f"{file} is truncated or corrupt ({str(e).splitlines()[0]}); download it again") from e
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if (dtype := _DTYPES.get(entry["dtype"])) is None:
            raise QBEError(f"{file}: {name} is stored as {entry['dtype']}; QBE loads unquantised checkpoints only")
        start, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if end - start != math.prod(shape) * dtype.itemsize:
            raise QBEError(f"{file} is corrupt: the size of {name} contradicts its shape; download it again")
        tensors[name] = LazySafetensor(file, name, shape, dtype, 8 + length + start)
    return tensors
