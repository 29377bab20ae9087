"""An engine of vLLM on a CPU that schedules a step ahead of what runs, as vLLM does on a GPU.

    python ahead_engine.py MODEL ahead|after

`after` schedules when a step's tokens are there, which is all that vLLM's CPU platform lets an engine do by itself.
Prints one line of JSON: the scheduler's name and the token ids of two answers, of which the first is refreshed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams
from vllm.platforms import current_platform


def schedule_ahead() -> None:
    """From now on, engines of this process do."""
    builtin: Any = type(current_platform).__mro__[1]  # what QBE's platform asks first
    check = builtin.check_and_update_config.__func__

    def forced(cls: Any, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    builtin.check_and_update_config = classmethod(forced)


def main() -> None:
    model, when = sys.argv[1:]
    if when == "ahead":
        schedule_ahead()
    llm = LLM(
        model, dtype="float32", quantization="qbe", enforce_eager=True, max_model_len=1024, max_num_seqs=8,
        max_num_batched_tokens=128, kv_cache_memory_bytes=1 << 24, additional_config={"qbe_rows": "exact"},
    )  # fmt: skip
    asked = [({"qbe_refresh": 1, "service_tier": "priority"}, 130), ({"qbe_bits": 4, "qbe_policy": "uniform"}, 60)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, extra_args=args) for args, n in asked]
    answers = llm.generate(["Once upon a time", "def f(x):"], params, use_tqdm=False)
    scheduler = llm.llm_engine.vllm_config.scheduler_config.scheduler_cls
    print(json.dumps({"scheduler": str(scheduler), "answers": [list(a.outputs[0].token_ids) for a in answers]}))


if __name__ == "__main__":
    main()
