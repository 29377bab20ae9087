"""QBE inside vLLM: `vllm serve MODEL --quantization qbe`. What vLLM calls in every one of its processes is here.

The entry points are `vllm.general_plugins` (`register`) and `vllm.platform_plugins` (`platform`). Both are called
wherever vLLM starts, with QBE or without it, so they import next to nothing and change nothing but what is named `qbe`.
"""

from __future__ import annotations

from importlib.metadata import entry_points

QUANTIZATION = "qbe"


def register() -> None:
    """Makes `--quantization qbe` known; with a vLLM that it does not fit, as a method that refuses in one line."""
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader

    from qbe.vllm.versions import refusal, refused

    if (message := refusal()) is not None:
        register_quantization_config(QUANTIZATION)(refused(message))
        return
    from qbe.vllm.config import QBEConfig
    from qbe.vllm.loader import QBELoader

    register_quantization_config(QUANTIZATION)(QBEConfig)
    register_model_loader(QUANTIZATION)(QBELoader)


def platform() -> str | None:
    """vLLM's own platform of this machine with QBE's hooks, or None where another plug-in brings a platform."""
    from qbe.vllm.versions import refusal

    if refusal() is not None or builtin_platform() is None:
        return None
    others = [e for e in entry_points(group="vllm.platform_plugins") if e.value != "qbe.vllm:platform"]
    return None if any(e.load()() for e in others) else "qbe.vllm.platform.QBEPlatform"


def builtin_platform() -> str | None:
    """Qualified name of the platform class that vLLM would take by itself."""
    from vllm.platforms import builtin_platform_plugins

    return next((name for plugin in builtin_platform_plugins.values() if (name := plugin())), None)
