r"""QBE as a model of lm-evaluation-harness (`pip install 'qbe[lm-eval]'`).

    python -m qbe.eval.harness run --model qbe --model_args model=MODEL,policy=static,bits=5 --device auto \
        --tasks gsm8k --limit 50

is `lm_eval` with the model `qbe` registered; a program registers it by importing this module. Every request runs at the
blueprint that the policy chooses for its context; the KV cache has 16 bits unless `kv_bits` says otherwise.
"""

from __future__ import annotations

import os
import sys
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("GOMP_SPINCOUNT", "0")  # as the command `qbe` does: before torch is imported

from qbe.budget import Budget
from qbe.engine.engine import Engine
from qbe.engine.result import Request
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.errors import QBEError
from qbe.eval.likelihood import Continuation, likelihoods
from qbe.sites import FULL_BITS

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    missing = f"lm-evaluation-harness is not installed ({error}): pip install 'qbe[lm-eval]'"
    if __name__ == "__main__":
        print(f"qbe: {missing}", file=sys.stderr)
        sys.exit(2)
    raise QBEError(missing) from None

TOGETHER = 64  # requests that are handed over at once; the core runs as many of them together as it can


@register_model("qbe")
class QBEModel(TemplateLM):
    """What `--model_args` says: model, policy, bits (or tier), kv_bits, dtype, originals; `--device` is auto, cpu or
    cuda.

    `batch_size` of lm-evaluation-harness has no meaning here: the engine batches by itself.

    Raises:
        QBEError: bad input, in one line.
    """

    def __init__(
        self,
        model: str | Engine = "smollm2-135m-instruct",
        policy: str = "tiered",
        bits: float | None = None,
        tier: str = "default",
        kv_bits: float | None = FULL_BITS,
        dtype: str = "auto",
        device: str = "auto",
        originals: str | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
    ) -> None:
        super().__init__()
        if isinstance(model, Engine):
            self.engine = model
        else:
            self.engine = Engine(model, policy=policy, dtype=dtype, device=device, originals=originals, records=False)
        self.tokenizer, self.policy = self.engine.tokenizer, policy
        self.budget = Budget(bits=bits, tier=tier, kv_bits=kv_bits)

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id or 0)

    @property
    def prefix_token_id(self) -> int:
        """What a text without context comes after."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        return self.engine.name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        ids = list(self.tokenizer(string, add_special_tokens=add_special_tokens is not False)["input_ids"])
        doubled = len(ids) > 1 and ids[0] == ids[1] == self.tokenizer.bos_token_id  # a chat template wrote one, too
        return ids[1:] if doubled else ids

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        scores: list[tuple[float, bool]] = []
        for i in range(0, len(requests), TOGETHER):
            part = [
                Continuation(before or [self.prefix_token_id], ids, self._chosen(texts[0] or texts[1]))
                for texts, before, ids in requests[i : i + TOGETHER]
            ]
            scores += likelihoods(self.engine.core, part)
        return scores

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        return [self._rolling(request.args[0]) for request in requests]

    def _rolling(self, text: str) -> float:
        """Log likelihood of a text in windows of the model's context, each token with as much before it as fits."""
        ids, blueprint = self.tok_encode(text, add_special_tokens=False), self._chosen(text)
        longest = (self.engine.core.context or len(ids) + 2) - 1
        windows = get_rolling_token_windows(ids, self.prefix_token_id, longest, 1)
        parts = [Continuation(b, t, blueprint) for b, t in map(make_disjoint_window, windows)]
        return sum(value for value, _ in likelihoods(self.engine.core, parts))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        texts: list[str] = []
        for i in range(0, len(requests), TOGETHER):
            part = [self._request(*request.args) for request in requests[i : i + TOGETHER]]
            results = self.engine.generate_batch(part)
            for result in results:
                if result.error is not None:
                    raise QBEError(result.error)
            texts += [result.text for result in results]
        return texts

    def _request(self, context: str, asked: dict[str, Any]) -> Request:
        stop = asked.get("until") or []
        names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
        most = next((int(asked[n]) for n in names if asked.get(n) is not None), 256)
        temperature = float(asked.get("temperature") or 0.0) if asked.get("do_sample", True) else 0.0
        params = SamplingParams(
            max_tokens=most, temperature=temperature, top_p=float(asked.get("top_p") or 1.0),
            stop=tuple(s for s in ([stop] if isinstance(stop, str) else stop) if s),
        )  # fmt: skip
        ids = self.tok_encode(context)
        context_limit = (self.engine.core.context or len(ids) + most) - most
        if context_limit < 1:
            raise QBEError(f"{most} new tokens leave no room for a prompt in the model's context: lower max_gen_toks")
        if len(ids) > context_limit:
            context = self.tokenizer.decode(ids[-context_limit:])
        elif ids != list(self.tokenizer(context)["input_ids"]):
            context = context.removeprefix(self.tokenizer.bos_token)
        return Request(context, params, self.budget, self.policy)

    def _chosen(self, text: str) -> Any:
        return self.engine.explain(text, budget=self.budget, policy=self.policy).blueprint


def main() -> None:
    """`lm_eval`, with this model in its list. Exit code 2 and one line for bad input to the model."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except QBEError as error:
        print(f"qbe: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
