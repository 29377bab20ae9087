"""A GGUF file's config, tokenizer and weights as transformers' own objects, one tensor in memory at a time.

transformers' loader holds every weight in fp32 at once. Here its name map and its per-architecture processors are
used on one tensor at a time, and a matrix that its processor leaves alone goes in chunks of rows.
"""

from __future__ import annotations

import importlib
import os
import shutil
import struct
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import dequantize
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_TO_TRANSFORMERS_MAPPING,
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from qbe.errors import QBEError
from qbe.files import reason
from qbe.models.gguf_header import GGUFHeader, GGUFTensor

try:  # moved between transformers 5.17 and 5.23
    convert_gguf_tokenizer = importlib.import_module("transformers.integrations.gguf").convert_gguf_tokenizer
except (ImportError, AttributeError):
    convert_gguf_tokenizer = importlib.import_module("transformers.integrations.ggml").convert_gguf_tokenizer

CHUNK_ELEMENTS = 1 << 18  # 1 MiB of fp32 per step: small beside any model, large enough for numpy
_MAX_EXPERTS = 1 << 16


def config_of(header: GGUFHeader) -> PreTrainedConfig:
    """The transformers config that the metadata describes, by transformers' own rules.

    Raises:
        QBEError: an architecture that transformers cannot read from GGUF, or impossible numbers.
    """
    _check_counts(header)
    with _temporary_folder() as tmp:
        try:
            _write_stub(header, Path(tmp) / "stub.gguf")
        except OSError as e:
            raise QBEError(f"a temporary file cannot be written in {tmp}: {reason(e)}") from e
        try:
            config = AutoConfig.from_pretrained(tmp, gguf_file="stub.gguf", local_files_only=True)
        except Exception as e:
            raise QBEError(
                f"{header.path}: transformers has no config for GGUF architecture '{header.architecture[:60]}' with "
                f"this metadata ({_first_line(e)}); use the model's safetensors checkpoint"
            ) from e
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if f"{header.architecture}.vocab_size" not in header.metadata and isinstance(tokens, list):
        config.get_text_config().vocab_size = len(tokens)
    config.name_or_path = str(header.path)
    return config


@contextmanager
def _temporary_folder() -> Iterator[str]:
    try:
        folder = tempfile.mkdtemp(prefix="qbe-gguf-")
    except OSError as e:
        # Where all temporary folders are on a full disk, Python says that there is none.
        raise QBEError(
            f"no temporary folder can be made ({e.strerror or e}): free some space in /tmp, "
            "or set TMPDIR to a folder that can be written"
        ) from e
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_counts(header: GGUFHeader) -> None:
    """Refuse counts that would make a huge module tree; sizes of weights are checked against the tensors later."""
    limits = {"block_count": len(header.tensors), "expert_count": _MAX_EXPERTS}
    for suffix, limit in limits.items():
        value = header.metadata.get(f"{header.architecture}.{suffix}", 0)
        if not isinstance(value, int) or not 0 <= value <= limit:
            raise QBEError(f"{header.path} is corrupt: {suffix} is {value} with {len(header.tensors)} tensors")


def _write_stub(header: GGUFHeader, stub: Path) -> None:
    """The same header without its long arrays, and holes for the data: all that the config needs, read at once."""
    keep = [k for k, v in header.metadata.items() if not (isinstance(v, list) and len(v) > 1024)]
    with header.path.open("rb") as source, stub.open("wb") as out:
        out.write(b"GGUF" + struct.pack("<IQQ", header.version, len(header.tensors), len(keep)))
        for start, end in (*(header.spans[k] for k in keep), header.table):
            source.seek(start)
            out.write(source.read(end - start))
    os.truncate(stub, header.size + 4096)  # sparse: takes no disk


def tokenizer_of(header: GGUFHeader, model_type: str) -> PreTrainedTokenizerFast:
    """The tokenizer that the metadata describes, with its chat template, by transformers' own converters.

    Raises:
        QBEError: no vocabulary in the file, or one that transformers cannot build.
    """
    mapping: dict[str, Any] = GGUF_TO_TRANSFORMERS_MAPPING
    groups = {
        group: {
            new: header.metadata[f"tokenizer.{old}"]
            for old, new in mapping[group]["tokenizer"].items()
            if f"tokenizer.{old}" in header.metadata
        }
        for group in ("tokenizer", "tokenizer_config")
    }
    fields, options = groups["tokenizer"], groups["tokenizer_config"]
    tokens = fields.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise QBEError(f"{header.path} holds no tokenizer; use a GGUF with one or the model's safetensors checkpoint")
    try:
        for name in ("bos", "eos", "unk", "pad"):
            if (token_id := fields.get(f"{name}_token_id")) is not None:
                options[f"{name}_token"] = tokens[token_id]
        if fields.get("tokenizer_type") == "llama":  # llama.cpp's rule for files that do not say
            options.setdefault("add_bos_token", True)
        backend, extra = convert_gguf_tokenizer(model_type, fields)
        # The file's own ids win: the converter of transformers 5.16 and 5.17 takes the first special token as `eos`.
        options = extra | options | {"clean_up_tokenization_spaces": False}
        return PreTrainedTokenizerFast(tokenizer_object=backend, name_or_path=str(header.path), **options)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # the tokenizers library panics with a BaseException on bad merges
        raise QBEError(f"{header.path}: its tokenizer cannot be built ({_first_line(e)}); download it again") from e


class LazyGGUFTensor:
    """One parameter of the model, read when transformers asks for it with `[...]` and `.to(device, dtype)`."""

    def __init__(self, name: str, shape: tuple[int, ...], sources: list[GGUFTensor], loader: WeightLoader) -> None:
        self.name, self.shape, self.sources, self.loader = name, shape, sources, loader

    def __getitem__(self, _: Any) -> LazyGGUFTensor:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.loader.read(self, torch.device(device or "cpu"), dtype or torch.float32)


class _Trunk:
    """A module as `get_gguf_hf_weights_map` sees it, without the layers' insides.

    The function calls itself on every child to find names without the model's prefix; inside a numbered layer no name
    can match, and hundreds of calls there take seconds.
    """

    def __init__(self, module: torch.nn.Module, config: PreTrainedConfig) -> None:
        self.module, self.config = module, config.get_text_config()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.module.state_dict()

    def named_children(self) -> list[tuple[str, _Trunk]]:
        return [(n, _Trunk(m, self.config)) for n, m in self.module.named_children() if not n.isdigit()]


class WeightLoader:
    """Maps a file's tensors to a model's parameters and reads them.

    Args:
        header: of the file.
        skeleton: the model on the meta device.

    Raises:
        QBEError: the file's tensors are not those of the model.
    """

    def __init__(self, header: GGUFHeader, skeleton: PreTrainedModel) -> None:
        self.header = header
        self.processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(
            config=skeleton.config.get_text_config().to_dict()
        )
        try:
            self.names: dict[str, str] = get_gguf_hf_weights_map(_Trunk(skeleton, skeleton.config), self.processor)
        except NotImplementedError as e:
            raise QBEError(f"{header.path}: GGUF architecture '{header.architecture[:60]}' is not supported") from e
        self.skeleton = skeleton

    def state_dict(self) -> dict[str, LazyGGUFTensor]:
        """Parameter name -> lazy tensor. Every parameter has its tensors, and their sizes agree."""
        sources: dict[str, list[GGUFTensor]] = defaultdict(list)
        for gguf_name, hf_name in self.names.items():
            tensor = self.header.tensors.get(gguf_name)
            # MoE experts of one layer map without their suffix; transformers' processors know them so.
            if tensor is None and not gguf_name.endswith((".weight", ".bias")):
                tensor = self.header.tensors.get(gguf_name + ".weight")
            if tensor is not None:
                sources[hf_name].append(tensor)
        expected = {k: tuple(v.shape) for k, v in self.skeleton.state_dict().items()}
        tied = set(getattr(self.skeleton, "all_tied_weights_keys", {}))
        for name, shape in expected.items():
            have = sum(t.numel for t in sources.get(name, []))
            if have == 0 and name in tied:
                continue
            want = int(np.prod(shape, dtype=object))
            if have != want:
                reason = f"has {have} weights instead of {want}" if have else "is missing"
                raise QBEError(f"{self.header.path} does not fit its own metadata: {name} {reason}; download it again")
        return {n: LazyGGUFTensor(n, expected[n], s, self) for n, s in sources.items() if n in expected}

    def read(self, lazy: LazyGGUFTensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """A parameter, dequantised through fp32 and cast."""
        if len(lazy.sources) == 1 and self._row_by_row(lazy):
            return self._read_rows(lazy.sources[0], device, dtype)
        done: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}
        for source in lazy.sources:
            result = self.processor.process(
                weights=self._whole(source),
                name=source.name,
                tensor_key_mapping=self.names,
                parsed_parameters=done,
            )
            if result.name in self.names:
                done["tensors"][self.names[result.name]] = torch.from_numpy(np.ascontiguousarray(result.weights))
        tensor = done["tensors"][lazy.name]
        if tuple(tensor.shape) != lazy.shape:
            raise QBEError(f"{self.header.path}: {lazy.name} has shape {tuple(tensor.shape)}, not {lazy.shape}")
        return tensor.to(device=device, dtype=dtype)

    def _row_by_row(self, lazy: LazyGGUFTensor) -> bool:
        """Whether the architecture's processor leaves this matrix alone, tried on its first row."""
        source = lazy.sources[0]
        if source.shape != lazy.shape or len(source.shape) != 2:
            return False
        row = self._rows(source, 0, 1)
        try:
            result = self.processor.process(
                weights=row, name=source.name, tensor_key_mapping=self.names, parsed_parameters={"tensors": {}}
            )
        except Exception:
            return False
        return result.weights is row and result.name == source.name

    def _read_rows(self, source: GGUFTensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(source.shape, dtype=dtype, device=device)
        for start, end in _steps(source):
            out[start:end] = torch.from_numpy(self._rows(source, start, end))
        return out

    def _whole(self, source: GGUFTensor) -> np.ndarray:
        out = np.empty((source.numel // source.shape[-1], source.shape[-1]), dtype=np.float32)
        for start, end in _steps(source):
            out[start:end] = self._rows(source, start, end)
        return out.reshape(source.shape)

    def _rows(self, source: GGUFTensor, start: int, end: int) -> np.ndarray:
        """Rows [start, end) of a tensor seen as a matrix of `shape[-1]` columns, fp32, writable."""
        with self.header.path.open("rb") as f:  # read, not mapped: mapped pages would count as memory in use
            f.seek(source.offset + start * source.row_bytes)
            raw = np.frombuffer(f.read((end - start) * source.row_bytes), dtype=np.uint8)
        if raw.nbytes != (end - start) * source.row_bytes:
            raise QBEError(f"{self.header.path} ends inside tensor {source.name}; it changed while it was read")
        kind = {"F32": np.float32, "F16": np.float16}.get(source.type.name, np.uint8)
        rows = dequantize(raw.view(kind).reshape(end - start, -1), source.type)
        return rows if rows.flags.writeable else rows.copy()


def _steps(source: GGUFTensor) -> list[tuple[int, int]]:
    """Row ranges of about `CHUNK_ELEMENTS` elements that cover a tensor seen as a matrix."""
    rows, step = source.numel // source.shape[-1], max(1, CHUNK_ELEMENTS // source.shape[-1])
    return [(start, min(rows, start + step)) for start in range(0, rows, step)]


def generation_ids(header: GGUFHeader) -> dict[str, Any]:
    """Token ids for a GenerationConfig: every id that ends a turn is an `eos_token_id`."""
    get = header.metadata.get
    ends = [get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(i for i in ends if isinstance(i, int)))
    ids = {"bos_token_id": get("tokenizer.ggml.bos_token_id"), "pad_token_id": get("tokenizer.ggml.padding_token_id")}
    ids = {k: v for k, v in ids.items() if isinstance(v, int)}
    return ids | ({"eos_token_id": eos[0] if len(eos) == 1 else eos} if eos else {})


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:160]
