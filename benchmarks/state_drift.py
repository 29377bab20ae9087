"""Whether predicted drift holds: recurrent states profiled on a short text, then measured on one four times as long.

    OMP_NUM_THREADS=1 python benchmarks/state_drift.py MODEL TEXT [--tokens 1024] [--windows 2] [--times 4]
                                                       [--json FILE]

The profile is what `qbe quantize --calibrate TEXT` makes of the first windows of the text, but predicts to `times` as
many tokens rather than to the model's context. What is measured is one window of that many tokens from behind them: the
mean KL divergence of its second half, of each layer's state by itself at each gear. MODEL is the 16-bit model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from qbe.models import load_model, pull
from qbe.progress import bar
from qbe.sites import STATE_FULL_BITS
from qbe.store.drift_curve import Profile
from qbe.store.state_drift import Drift, measure
from qbe.tagger import tag


def compared(profile: Profile, measured: dict[str, Drift]) -> list[dict[str, Any]]:
    """For each layer and gear what was predicted and what was measured; `floor` marks the gear that was chosen."""
    rows = []
    for state in profile.states:
        for gear, kl in measured[state.name].kl.items():
            late = float(kl[:, kl.shape[1] // 2 :].double().mean())
            rows.append({
                "layer": state.layer, "bits": gear, "floor": state.floor == gear, "predicted": state.predicted[gear],
                "measured": late, "holds": late <= state.predicted[gear],
            })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    loaded, device = load_model(pull(given.model)), torch.device(given.device)
    table, longer = tag(loaded.model, name=given.model), given.tokens * given.times
    short = given.tokens * given.windows
    ids = loaded.tokenizer(given.text.read_text(), add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < short + longer:
        raise SystemExit(f"{given.text} has {len(ids)} tokens, but {short + longer} are needed")
    texts = torch.tensor(ids[:short]).view(given.windows, -1), torch.tensor(ids[short : short + longer])[None]
    found = []
    for what, text in zip(("profiling", "measuring"), texts, strict=True):
        with bar(what, len(table.states) * text.shape[1], show=True) as step:
            found.append(measure(loaded.model, table, text, device, step))
    profile = Profile.of(table, found[0], longer)
    rows = compared(profile, found[1])
    for row in rows:
        mark = " floor" if row["floor"] else ""
        held = "holds" if row["holds"] else "EXCEEDED"
        print(f"layer {row['layer']:3d} {row['bits']:3d} bits  predicted {row['predicted']:.2e}  "
              f"measured {row['measured']:.2e}  {held}{mark}")  # fmt: skip
    at_32 = [s.layer for s in profile.states if s.floor == STATE_FULL_BITS]
    print(f"bound of a layer {profile.bound:.2e}; at 32 bits: {at_32 or 'none'}; "
          f"{sum(r['holds'] for r in rows)} of {len(rows)} hold")  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps({"profile": short, "measured": longer, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
