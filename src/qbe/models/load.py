"""Loading a model: any causal LM of transformers, from a folder or a GGUF file, within 1.3 x its 16-bit size.

Both formats take the same way: a state dict of lazy tensors goes to transformers' own `from_pretrained`, which
renames, converts, ties and places the weights; each tensor is read and cast when its turn comes.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from qbe.errors import QBEError
from qbe.models import folder_weights, gguf_weights, mxfp4, sentencepiece
from qbe.models.config_check import check_counts, check_limits, check_size
from qbe.models.fetch import progress_bar
from qbe.models.gguf_configs import config_of, generation_ids
from qbe.models.gguf_header import GGUFHeader
from qbe.models.gguf_split import read_parts
from qbe.models.gguf_tokenizer import tokenizer_of
from qbe.models.resolve import pull

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MAX_BUFFER_BYTES = 1 << 30

Lazy = folder_weights.LazySafetensor | mxfp4.LazyMXFP4


@dataclass
class LoadedModel:
    """A model in memory, ready for inference.

    Attributes:
        model: in eval mode, no parameter requires a gradient.
        tokenizer: with the checkpoint's chat template, if it has one.
        path: the folder or GGUF file it came from.
        name: as the caller gave it; the folder's or file's name for a path.
        dtype: of the weights.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    path: Path
    name: str
    dtype: torch.dtype


def load_model(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    without: Collection[str] = (),
    progress: bool = True,
) -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        name_or_path: what `pull` takes: a folder, a GGUF file, a hub id or the default model's name.
        dtype: `auto` (the checkpoint's own; bfloat16 for a GGUF), `float32`, `bfloat16` or `float16`.
        device: where the weights go, one tensor at a time.
        without: modules whose weight is not read, because another takes its place: it has its shape and no memory.
            Weights that belong to another module, too, are read all the same.
        progress: show bars on stderr.

    Raises:
        QBEError: an unknown name or dtype, a missing, truncated or corrupt file, an unsupported architecture.
    """
    wanted = _parse_dtype(dtype)
    path = pull(str(name_or_path), progress=progress)
    is_path = isinstance(name_or_path, Path) or Path(name_or_path).expanduser().exists()
    name = (path.stem if path.is_file() else path.resolve().name) if is_path else str(name_or_path)
    with quiet(), torch.no_grad():
        if path.is_file():
            model, tokenizer = _load_gguf(path, wanted or torch.bfloat16, torch.device(device), without, progress)
        else:
            model, tokenizer = _load_folder(path, wanted, torch.device(device), without, progress)
    model.requires_grad_(False).eval()
    return LoadedModel(model, tokenizer, path, name, model.dtype)


def load_config_and_tokenizer(path: str | Path) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """The config and the tokenizer of a local folder or GGUF file, without its weights.

    Raises:
        QBEError: as `load_model`.
    """
    path = Path(path)
    with quiet():
        if path.is_file():
            header = read_parts(path)
            config = config_of(header)
            return config, tokenizer_of(header, config.model_type)
        return _folder_config(path), _folder_tokenizer(path)


def load_skeleton(path: str | Path) -> PreTrainedModel:
    """The model of a local folder or GGUF file on the meta device: its class, names and shapes, no memory.

    Raises:
        QBEError: as `load_model`.
    """
    path = Path(path)
    with quiet():
        config = config_of(read_parts(path)) if path.is_file() else _folder_config(path)
        return _skeleton(config, path)


def _parse_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """None for `auto`."""
    if dtype == "auto":
        return None
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise QBEError(f"unsupported dtype '{dtype}': choose auto, {', '.join(DTYPES)}")
    return found


def _load_gguf(
    path: Path, dtype: torch.dtype, device: torch.device, without: Collection[str], progress: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    header = read_parts(path)
    config = config_of(header)
    check_limits(config, path)
    skeleton = _skeleton(config, path)
    weights = gguf_weights.WeightLoader(header, skeleton).state_dict()  # refuses tensors before work is done
    weights = _left_out(weights, skeleton, without)
    tokenizer = tokenizer_of(header, config.model_type)
    model = _materialise(type(skeleton), config, weights, path, dtype, device, progress)
    _set_generation_ids(model, header)
    return model, tokenizer


def _set_generation_ids(model: PreTrainedModel, header: GGUFHeader) -> None:
    ids = generation_ids(header)
    model.generation_config = GenerationConfig(**ids)
    for key, value in ids.items():
        setattr(model.config, key, value)


def _load_folder(
    path: Path, dtype: torch.dtype | None, device: torch.device, without: Collection[str], progress: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if not (path / "config.json").is_file():
        raise QBEError(f"{path} has no config.json: it is not a transformers model folder")
    weights = mxfp4.dequantised(folder_weights.lazy_state_dict(path))
    check_counts(path, weights)  # even making the config takes as long as it has layers
    config = _folder_config(path)
    tokenizer = _folder_tokenizer(path)
    skeleton = _skeleton(config, path)
    for name, parameter in skeleton.state_dict().items():
        if name in weights and tuple(parameter.shape) != weights[name].shape:
            raise QBEError(
                f"{path}: {name} has shape {weights[name].shape}, but config.json asks for {tuple(parameter.shape)}; "
                f"the weights and the config belong to different models"
            )
    check_size(path, skeleton, weights)
    dtype = dtype or _checkpoint_dtype(config, weights)
    read = _left_out(weights, skeleton, without)
    model = _materialise(type(skeleton), config, read, path, dtype, device, progress)
    if (path / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
        except (ValueError, TypeError, OSError) as e:
            raise QBEError(f"{path / 'generation_config.json'} is corrupt ({_first_line(e)}); download it again") from e
    return model, tokenizer


def _left_out(weights: Mapping[str, Any], skeleton: PreTrainedModel, without: Collection[str]) -> dict[str, Any]:
    """The weights, of which those of these modules alone are not to be read."""
    owners: dict[int, int] = {}
    for _, parameter in skeleton.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    alone = {f"{name}.weight" for name in without if owners[id(skeleton.get_parameter(f"{name}.weight"))] == 1}
    return {name: _Unread(weight.shape) if name in alone else weight for name, weight in weights.items()}


class _Unread:
    """In place of a lazy tensor: the shape, and one number for all of it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Zeros without memory."""
        return torch.zeros((), device=device, dtype=dtype).expand(self.shape)


def _checkpoint_dtype(config: PreTrainedConfig, weights: Mapping[str, Lazy]) -> torch.dtype:
    """What the config says, else the type of most weights; float32 for types that QBE does not run in."""
    stated = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if stated is None:
        floating = [w.dtype for w in weights.values() if w.dtype.is_floating_point]
        stated = max(set(floating), key=floating.count) if floating else torch.float32
    return stated if stated in DTYPES.values() else torch.float32


def _folder_config(path: Path) -> PreTrainedConfig:
    if not (path / "config.json").is_file():
        raise QBEError(f"{path} has no config.json: it is not a transformers model folder")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as e:
        raise QBEError(
            f"{path / 'config.json'} cannot be used ({_line(e)}); mend it or download the model again"
        ) from e
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        method = (
            quantization.get("quant_method", "?") if isinstance(quantization, dict) else type(quantization).__name__
        )
        if method != mxfp4.METHOD:
            raise QBEError(f"{path} is already quantised ({method}); give QBE the unquantised checkpoint")
        del config.quantization_config  # in 16 bits it is what it was
    check_limits(config, path / "config.json")
    return config


def _folder_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    try:
        if sentencepiece.is_alone(path):
            return sentencepiece.load(path)
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (KeyboardInterrupt, SystemExit, QBEError):
        raise
    except BaseException as e:  # the tokenizers library panics with a BaseException on some corrupt files
        raise QBEError(f"the tokenizer in {path} cannot be loaded ({_first_line(e)}); download the model again") from e


def _skeleton(config: PreTrainedConfig, path: Path) -> PreTrainedModel:
    """The model on the meta device: its class, names and shapes, no memory."""
    failure: Exception | None = None
    both: list[Any] = [AutoModelForCausalLM, AutoModelForImageTextToText]
    if (config.architectures or [""])[0].endswith("ForConditionalGeneration"):
        both.reverse()  # some families have a class without their tower, too (Qwen3.5)
    for auto in both:
        try:
            with torch.device("meta"):
                model = auto.from_config(config)
            break
        except Exception as e:
            failure = failure or e
    else:
        raise QBEError(
            f"{path}: transformers {transformers.__version__} has no causal language model for "
            f"'{config.model_type}' with this config ({_first_line(failure)})"
        ) from failure
    # Buffers are made at their full size; a corrupt config must not fill the memory with them.
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    weights = sum(p.numel() * 2 for p in model.parameters())
    if buffers > max(_MAX_BUFFER_BYTES, 2 * weights):
        raise QBEError(f"{path}: its config asks for {buffers >> 20} MiB of buffers beside the weights; it is corrupt")
    return model


def _materialise(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    weights: Mapping[str, Any],
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
) -> PreTrainedModel:
    """The model with its weights in `dtype` on `device`; transformers reads the lazy tensors in worker threads."""
    _give_back_freed_memory()  # what building the tokenizer took
    with progress_bar(f"loading {path.name}", progress, len(weights), bytes_=False) as bar:
        counted = {k: _Counted(v, lambda: bar.advance(bar.task_ids[0])) for k, v in weights.items()}
        try:
            loaded: Any = model_class.from_pretrained(
                None, config=config, state_dict=counted, dtype=dtype, device_map={"": device}, output_loading_info=True
            )
        except QBEError:
            raise
        except (torch.OutOfMemoryError, MemoryError) as e:
            raise QBEError(f"not enough memory on {device} for {path}; use a smaller model or another device") from e
        except Exception as e:
            cause: BaseException = e
            while cause.__cause__ is not None and not isinstance(cause, QBEError):
                cause = cause.__cause__
            raise cause if isinstance(cause, QBEError) else QBEError(f"cannot load {path}: {_first_line(e)}") from e
    model, info = loaded
    for problem in ("missing_keys", "mismatched_keys", "error_msgs", "conversion_errors"):
        if found := info.get(problem):
            named = f"{problem.replace('_', ' ')} {str(sorted(found))[:160]}"
            raise QBEError(f"{path} is incomplete: {named}; download again")
    model.config.name_or_path = str(path)
    return model


def _give_back_freed_memory() -> None:
    """Return freed memory to the system, which glibc does not do by itself for small blocks."""
    with suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class _Counted:
    """A lazy tensor that ticks the progress bar when it has been read."""

    def __init__(self, tensor: Any, tick: Any) -> None:
        self.tensor, self.tick, self.shape = tensor, tick, tensor.shape

    def __getitem__(self, _: Any) -> _Counted:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        out = self.tensor.to(device=device, dtype=dtype)
        self.tick()
        return out


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' bars and warnings: errors become one line of ours, stdout belongs to results."""
    hub_log = transformers.utils.logging
    level, bars = hub_log.get_verbosity(), hub_log.is_progress_bar_enabled()
    hub_log.set_verbosity(logging.CRITICAL)
    hub_log.disable_progress_bar()
    try:
        yield
    finally:
        hub_log.set_verbosity(level)
        if bars:
            hub_log.enable_progress_bar()


def _first_line(e: BaseException | None) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:200]


def _line(e: BaseException) -> str:
    """All of a message that transformers spreads over several lines."""
    return " ".join(str(e).split())[:200] or type(e).__name__
