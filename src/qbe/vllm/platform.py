"""The platform that vLLM runs on, with QBE's two hooks in it: the config of an engine, and every request.

A platform has the last word on an engine's config and sees each request in the front end before it is cut loose from
the caller's parameters. No other extension point of vLLM has either, so this is how `--quantization qbe` is all that a
user types. Without that flag nothing differs from vLLM's own platform.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.utils.import_utils import resolve_obj_by_qualname

from qbe.vllm import QUANTIZATION, builtin_platform

if TYPE_CHECKING:
    from vllm.platforms import Platform as Base
else:
    Base = resolve_obj_by_qualname(builtin_platform())


class QBEPlatform(Base):
    """vLLM's own platform of this machine, and QBE's hooks.

    On a machine without a GPU vLLM names no resource that Ray could count its workers by, and refuses Ray. Ray knows
    ids of accelerators only, so a worker there is what `ray start --num-gpus N` calls a GPU.
    """

    ray_device_key = Base.ray_device_key or "GPU"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        super().check_and_update_config(vllm_config)
        model = vllm_config.model_config
        if model is not None and model.quantization == QUANTIZATION:
            from qbe.vllm.takeover import take_over

            take_over(vllm_config)

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        super().validate_request(processed_inputs, params)
        from vllm.sampling_params import SamplingParams

        from qbe.vllm.config import active

        config = active()
        if config is not None and isinstance(params, SamplingParams):
            from qbe.vllm.frontend import admit

            admit(config, processed_inputs, params)
