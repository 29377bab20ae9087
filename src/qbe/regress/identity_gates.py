"""Gates on what does not depend on precision, and on how far precision moves the distributions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from qbe.regress.client import ScoredText
from qbe.regress.divergence import Divergence, compare, per_text
from qbe.regress.gate import Flips, Gate, Judge
from qbe.regress.identity import Difference
from qbe.regress.observe import Observed
from qbe.regress.statistics import ratio_bounds
from qbe.regress.suite import Suite
from qbe.regress.task import Task
from qbe.regress.weights import MOST_STEPS, WeightCheck

_BLOCK = 64  # tokens of the long text that the bootstrap draws together


def identity(
    before: Observed, now: Observed, tasks: Sequence[Task], differences: Sequence[Difference] | None, unended: float,
    decide: Judge,
) -> list[Gate]:  # fmt: skip
    """Tokenizer, template, stop tokens and defaults: of the files where both are here, and of what is served."""
    found = []
    for one in differences or ():
        saw = one.found or "the same"
        found.append(Gate(f"identity.{one.name.replace(' ', '_')}", "fail" if one.found else "pass", saw, "the same"))
    if differences is None:
        found.append(Gate("identity.files", "not run", "baseline and candidate are not both local"))
    found.append(_prompt_tokens(before, now, tasks))
    ended = [{n: r.finish != "length" for n, r in of.replies.items() if not r.error} for of in (before, now)]
    found.append(decide.loss("identity.ends", Flips.of(*ended), unended, "answers that end by themselves"))
    return found


def _prompt_tokens(before: Observed, now: Observed, tasks: Sequence[Task]) -> Gate:
    """As served, a prompt is as many tokens. Tools are left out: servers tell models of them in their own words."""
    name, tools = "identity.prompt_tokens", {t.name for t in tasks if "tools" in t.fields}
    counts = [
        (n, r.prompt_tokens, now.replies[n].prompt_tokens)
        for n, r in before.replies.items()
        if n in now.replies and n not in tools and r.prompt_tokens and now.replies[n].prompt_tokens
    ]
    if not counts:
        return Gate(name, "not run", "the servers do not count prompt tokens")
    other = [(n, a, b) for n, a, b in counts if a != b]
    if before.chats != now.chats:
        return Gate(name, "fail", "only one of the two has a chat template", "the same")
    if other:
        n, a, b = other[0]
        saw = f"{len(other)} of {len(counts)} prompts are other numbers of tokens: {n} is {a} and {b}"
        return Gate(name, "fail", saw, "the same", tuple(n for n, _, _ in other), len(counts))
    return Gate(name, "pass", f"{len(counts)} prompts are as many tokens", "the same", n=len(counts))


def fidelity(before: Observed, now: Observed, suite: Suite, decide: Judge) -> list[Gate]:
    """Divergence from the baseline on given text, short and long."""
    limits, found = suite.limits, list[Gate]()
    for name, first, second, limit, block in (
        ("identity.divergence", before.passages, now.passages, limits.divergence, 0),
        ("retrieval.long_divergence", _one(before.long), _one(now.long), limits.long_divergence, _BLOCK),
    ):
        if why := before.unscored or now.unscored:
            found.append(Gate(name, "not run", why))
        elif first:
            found.append(_divergence(name, first, second, limit, block, decide))
    return found


def _one(text: ScoredText | None) -> list[ScoredText]:
    return [] if text is None else [text]


def _divergence(
    name: str, before: Sequence[ScoredText], now: Sequence[ScoredText], limit: float, block: int, decide: Judge
) -> Gate:  # fmt: skip
    compared = [compare(a, b) for a, b in zip(before, now, strict=True)]
    there = [c for c in compared if c is not None]
    if len(there) < len(compared):
        text = next(a for a, c in zip(before, compared, strict=True) if c is None)
        saw = f"{len(compared) - len(there)} of {len(compared)} texts are other tokens, such as that of "
        saw += repr("".join(text.tokens)[:40])
        return Gate(name, "fail", saw, "the same tokens")
    units = [part for c in there for part in (_blocks(c, block) if block else (c,))]
    nats, tokens = per_text(units)
    value = float(nats.sum() / max(1.0, tokens.sum()))
    agreed = sum(c.agreed for c in there) / max(1.0, tokens.sum())
    gate = decide.ratio(name, partial(ratio_bounds, nats, tokens), value, limit, "nats a token", len(units))
    saw = f"{gate.saw}; the likeliest token is the same at {agreed:.1%} of {tokens.sum():.0f} places"
    return Gate(gate.name, gate.status, saw, gate.limit, n=int(tokens.sum()))


def _blocks(of: Divergence, size: int) -> list[Divergence]:
    parts = [of.nats[i : i + size] for i in range(0, len(of.nats), size)]
    return [Divergence(np.asarray(p), 0) for p in parts]


def laws(before: Observed, now: Observed) -> list[Gate]:
    """The candidate keeps the laws of sampling that the baseline keeps."""
    known = {law.name: law for law in before.laws}
    found = []
    for law in now.laws:
        base = known.get(law.name)
        if law.kept is None:
            found.append(Gate(f"sampler.{law.name}", "not run", law.saw))
        elif not law.kept and base is not None and base.kept is False:
            found.append(
                Gate(f"sampler.{law.name}", "not run", f"the baseline does not keep to it, either: {base.saw}")
            )
        else:
            found.append(Gate(f"sampler.{law.name}", "pass" if law.kept else "fail", law.saw, "always"))
    return found


def weights(check: WeightCheck | None) -> list[Gate]:
    """No group of weights is off by more than its precision explains."""
    if check is None:
        return [Gate("weights.codes", "not run", "the candidate's weights are not here, or not to be compared")]
    stored = [line for line in check.wrong if "in 16 bits" in line or "differs by" in line]
    coded = [line for line in check.wrong if line not in stored]
    worst = max((off for name, off in check.worst.items() if "in 16 bits" not in name), default=0.0)
    limit = f"groups off by at most {MOST_STEPS:g} steps"
    saw = _lines(coded) or f"the worst group of {check.sites} sites is off by {worst:.2f} steps"
    found = [Gate("weights.codes", "fail" if coded else "pass", saw, limit, tuple(coded), check.sites)]
    if check.skipped:
        return [*found, Gate("weights.checkpoint", "not run", check.skipped)]
    saw = _lines(stored) or "the 16-bit weights are the baseline's, as nearly as 4 bits"
    return [*found, Gate("weights.checkpoint", "fail" if stored else "pass", saw, limit, tuple(stored))]


def _lines(lines: Sequence[str]) -> str:
    return lines[0] + (f"; and {len(lines) - 1} more" if len(lines) > 1 else "") if lines else ""
