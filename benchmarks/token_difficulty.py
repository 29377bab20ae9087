"""What it buys to give 16-bit activations to the tokens that were hard to predict, beside as many others.

    python benchmarks/token_difficulty.py [--model NAME] [--data DIR] [--tokens N] [--weights BITS]

Text: WikiText-2's test split from `--data` (default $QBE_DATA or ../shared/data), windows of 256 tokens, float32. All
nested sites but the output head have 8-bit activations, but for the rows named. KL divergence, nats per token, from the
same model with 16-bit activations: lower is better. `entropy` takes the tokens whose distribution had the most entropy,
as an engine does; `random` as many rows at random, mean and range of five draws; `after` those whose own next
distribution has the most, which nobody knows before the row has been computed.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch.distributions import Categorical

from qbe.kernels.reference.activations import precision_word
from qbe.sites import Role
from qbe.store.prepare import prepare

WINDOW = 256
DRAWS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("QBE_DATA", "../shared/data")))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--weights", type=int, default=16)
    args = parser.parse_args()

    prepared = prepare(args.model, dtype="float32", device=torch.device("cpu"), need_sensitivity=False)
    model, table = prepared.model, prepared.table
    ids = prepared.tokenizer((args.data / "wikitext2_test.txt").read_text()[: 8 * args.tokens])["input_ids"]
    windows = torch.tensor(ids[: args.tokens // WINDOW * WINDOW]).view(-1, WINDOW)

    @torch.inference_mode()
    def logs(careful: torch.Tensor) -> list[torch.Tensor]:
        """Log probabilities of each window; `careful` bool [windows, 256] are the rows with 16-bit activations."""
        found = []
        for row, at in zip(windows, careful, strict=True):
            low = torch.where(at, precision_word(args.weights), precision_word(args.weights, 8)).to(torch.int32)
            for site in table.nested:
                full = torch.full_like(low, precision_word(args.weights))
                model.get_submodule(site.name).weight.bits = full if site.role is Role.OUTPUT_HEAD else low
            found.append(model(input_ids=row[None], use_cache=False).logits[0].float().log_softmax(-1))
        return found

    reference = logs(torch.ones(windows.shape, dtype=torch.bool))
    own = torch.stack([Categorical(logits=r, validate_args=False).entropy() for r in reference])
    before = torch.nn.functional.pad(own[:, :-1], (1, 0), value=-1.0)  # nothing predicted a window's first token

    def report(what: str, masks: list[torch.Tensor]) -> None:
        values = []
        for mask in masks:
            pairs = zip(reference, logs(mask), strict=True)
            values.append(float(torch.stack([(r.exp() * (r - n)).sum(-1).mean() for r, n in pairs]).mean()))
        share = float(masks[0].float().mean())
        spread = f"  {min(values):.6f} to {max(values):.6f}" if len(values) > 1 else ""
        print(f"{what:10s} {share:6.1%} of the rows at 16 bits  KL {sum(values) / len(values):.6f}{spread}", flush=True)

    report("none", [torch.zeros_like(own, dtype=torch.bool)])
    generator = torch.Generator().manual_seed(0)
    limits = [float(before.quantile(q)) for q in (0.75, 0.5)]
    if table.difficult_entropy is not None:
        limits.insert(0, table.difficult_entropy)
    for limit in limits:
        mask = before > limit
        share = float(mask.float().mean())
        print(f"more than {limit:.2f} nats")
        report("entropy", [mask])
        report("random", [torch.rand(own.shape, generator=generator) < share for _ in range(DRAWS)])
        report("after", [own > own.quantile(1 - share)])


if __name__ == "__main__":
    main()
