"""Which versions of vLLM the plug-in fits. It subclasses its worker, model runner and scheduler, which are no public
interfaces: another version is refused rather than tried."""

from __future__ import annotations

from typing import Any, NoReturn

SUPPORTED = ("0.32", "0.33")


def refusal() -> str | None:
    """One line on why this vLLM is refused; None when it is not."""
    from vllm import __version__

    if __version__.startswith(tuple(f"{v}." for v in SUPPORTED)):
        return None
    return f"this QBE runs in vLLM {' or '.join(SUPPORTED)}, not {__version__}: install 'qbe[vllm]', or update QBE"


def refused(message: str) -> type:
    """A quantization config that cannot be made."""
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    class Refused(QuantizationConfig):
        def __init__(self) -> None:
            raise ValueError(message)

        @classmethod
        def from_config(cls, _config: dict[str, Any]) -> NoReturn:
            raise ValueError(message)

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        get_name = get_supported_act_dtypes = get_min_capability = get_quant_method = None

    return Refused
